"""What a keeper does next: a function of its orders, its folder, and what is under way."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.manifest import MANIFEST, ManifestReference
from muster.keeper.orders import (
    Action,
    CommitPersisted,
    DeleteAttempt,
    FetchFile,
    GetHead,
    Kept,
    PersistPart,
    Situation,
    SyncFile,
    VerifyFile,
    decide,
    holding,
    is_forgotten,
    may_be_verified,
    wanted_ranks,
)
from muster.keeper.vocabulary import LocalCheckpoint, Location, Order, Orders

WORLD = 3
ATTEMPTS = [SaveAttempt(generation, number) for generation in (1, 2) for number in (0, 1)]
PARTS = {
    SaveAttempt(generation, number): {
        rank: frozenset(f"{generation}-{number}-{rank}-{one}" for one in range(rank)) for rank in range(WORLD)
    }
    for generation, number in ATTEMPTS
}
"""Rank 0 has written no file."""
SOURCES = (Location("http://k1", frozenset(range(WORLD))),)

ranks = st.frozensets(st.integers(0, WORLD - 1))


def checkpoint(attempt: SaveAttempt, persist_to: str = "/shared") -> LocalCheckpoint:
    return LocalCheckpoint(
        attempt=attempt,
        step=10 * attempt.generation + attempt.number,
        world_size=WORLD,
        manifest=ManifestReference(7, "00" * 16),
        persist_to=persist_to,
    )


@st.composite
def orders(draw: st.DrawFn) -> Orders:
    named = draw(st.frozensets(st.sampled_from(ATTEMPTS)))
    return Orders(
        {
            attempt: Order(
                checkpoint(attempt, draw(st.sampled_from(["", "/shared"]))),
                ranks=draw(ranks),
                sources=SOURCES,
                persist=draw(ranks),
                commit=draw(st.booleans()),
            )
            for attempt in named
        },
        draw(st.sampled_from([SaveAttempt(0, 0), *ATTEMPTS, SaveAttempt(9, 9)])),
    )


@st.composite
def kept(draw: st.DrawFn, attempt: SaveAttempt) -> Kept:
    names = sorted(name for part in PARTS[attempt].values() for name in part)
    some = st.frozensets(st.sampled_from(names))
    held, unsynced, other = draw(some), draw(some), draw(some)
    if draw(st.booleans()):
        return Kept(unverified=held | other)
    return Kept(
        PARTS[attempt],
        b"digest",
        verified=held,
        unsynced=unsynced - held,
        unverified=other - held - unsynced,
        persisted=draw(ranks),
        persisted_as=draw(st.sampled_from(["", "/x"])),
    )


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    here = draw(st.frozensets(st.sampled_from(ATTEMPTS)))
    return Situation(draw(orders()), {attempt: draw(kept(attempt)) for attempt in here})


@given(situations(), st.data())
def test_busy_actions_are_left_out_and_no_others(now: Situation, data: st.DataObject):
    actions = decide(now)
    assert len(set(actions)) == len(actions)
    busy = data.draw(st.frozensets(st.sampled_from(actions))) if actions else frozenset[Action]()
    assert decide(replace(now, busy=busy)) == [action for action in actions if action not in busy]


@given(situations())
def test_only_forgotten_attempts_are_deleted_and_all_of_them(now: Situation):
    deleted = {action.attempt for action in decide(now) if isinstance(action, DeleteAttempt)}
    assert deleted == {attempt for attempt in now.kept if is_forgotten(now.orders, attempt)}
    assert not deleted & now.orders.orders.keys()
    assert all(attempt < now.orders.forget_before for attempt in deleted)


@given(situations())
def test_nothing_is_done_about_attempts_that_are_not_ordered(now: Situation):
    touched = {action.attempt for action in decide(now) if not isinstance(action, DeleteAttempt)}
    assert touched <= now.orders.orders.keys()


@given(situations())
def test_nothing_is_persisted_before_it_is_held(now: Situation):
    for action in decide(now):
        order = now.orders.orders.get(action.attempt)
        here = now.kept.get(action.attempt, Kept())
        if isinstance(action, PersistPart):
            assert order is not None
            assert here.holds(action.rank)
            assert action.rank in order.persist - here.persisted
        if isinstance(action, PersistPart | CommitPersisted):
            assert order is not None
            assert order.checkpoint.persist_to
            assert not here.persisted_as


def done(now: Situation, action: Action) -> Situation:
    """What is there after an action has succeeded."""
    here = now.kept.get(action.attempt, Kept())
    match action:
        case DeleteAttempt(attempt):
            return replace(now, kept={one: was for one, was in now.kept.items() if one != attempt})
        case GetHead(attempt):
            after = replace(here, parts=PARTS[attempt])
        case FetchFile(_, name, _):
            after = replace(here, unsynced=here.unsynced | {name})
        case VerifyFile(_, name) | SyncFile(_, name):
            after = replace(
                here,
                verified=here.verified | {name},
                unsynced=here.unsynced - {name},
                unverified=here.unverified - {name},
            )
        case PersistPart(_, rank):
            after = replace(here, persisted=here.persisted | {rank})
        case CommitPersisted(_):
            after = replace(here, persisted_as="/shared/step-10")
    return replace(now, kept={**now.kept, action.attempt: after})


@given(situations(), st.data())
def test_actions_lead_to_what_is_ordered_whatever_their_order(now: Situation, data: st.DataObject):
    for _ in range(200):
        actions = decide(now)
        if not actions:
            break
        now = done(now, data.draw(st.sampled_from(actions)))
    assert decide(now) == []
    for attempt, order in now.orders.orders.items():
        here = now.kept.get(attempt, Kept())
        assert all(here.holds(rank) for rank in wanted_ranks(order))
        if order.checkpoint.persist_to and not here.persisted_as:
            assert order.persist <= here.persisted
        said = holding(attempt, here, order)
        assert said is None or said.ranks >= wanted_ranks(order)
    assert not any(is_forgotten(now.orders, attempt) for attempt in now.kept)


@given(situations())
def test_report_names_exactly_the_parts_that_are_verified(now: Situation):
    for attempt, here in now.kept.items():
        said = holding(attempt, here, now.orders.orders.get(attempt))
        if here.parts is None:
            assert said is None
            continue
        assert said is not None
        assert all(here.parts[rank] <= here.verified for rank in said.ranks)
        assert {rank for rank, part in here.parts.items() if part and part <= here.verified} <= said.ranks


def test_local_files_are_verified_even_if_no_rank_needs_them():
    """It may be the only copy: nothing is ordered of a rank that was lost together with its keeper."""
    (attempt, *_) = ATTEMPTS
    elsewhere = (Location("http://k1", frozenset()),)
    without_source = Orders({attempt: Order(checkpoint(attempt))}, attempt)
    with_source = Orders({attempt: Order(checkpoint(attempt), sources=elsewhere)}, attempt)
    names = PARTS[attempt][2]

    def looked(orders: Orders, here: Kept, *failed: Action) -> tuple[Sequence[Action], bool]:
        kept = {attempt: here}
        return decide(Situation(orders, kept)), may_be_verified(orders, kept, failed)

    without_head, with_head = Kept(unverified=names), Kept(PARTS[attempt], unverified=names)
    assert looked(without_source, without_head) == ([], False)
    assert looked(with_source, without_head) == ([GetHead(attempt)], True)
    assert looked(with_source, without_head, GetHead(attempt))[1] is False
    own_head = Kept(unverified=names | {MANIFEST})
    assert looked(without_source, own_head) == ([GetHead(attempt)], True)
    assert looked(without_source, own_head, GetHead(attempt))[1] is False
    verifications = [VerifyFile(attempt, name) for name in sorted(names)]
    assert looked(without_source, with_head) == (verifications, True)
    assert looked(without_source, with_head, *verifications)[1] is False
    assert looked(with_source, Kept(PARTS[attempt], verified=names)) == ([], False)
    synced: list[Action] = [SyncFile(attempt, name) for name in sorted(names)]
    fetched = Kept(PARTS[attempt], unsynced=names)
    assert looked(with_source, fetched) == (synced, True)
    assert looked(with_source, fetched, *synced) == (synced, False)
    has_it = Orders({attempt: Order(checkpoint(attempt), sources=SOURCES)}, attempt)
    assert looked(has_it, fetched) == (synced, False), "another keeper has the part"
    assert looked(with_source, Kept()) == ([], False)
    assert looked(Orders(), with_head) == ([], False)


def test_part_is_fetched_only_when_a_keeper_has_it():
    (attempt, *_) = ATTEMPTS
    here = {attempt: Kept(PARTS[attempt])}

    def fetched(*ranks: int) -> Sequence[Action]:
        sources = (Location("http://k1", frozenset(ranks)),)
        order = Order(checkpoint(attempt), ranks=frozenset({1, 2}), sources=sources)
        return decide(Situation(Orders({attempt: order}, attempt), here))

    assert fetched() == []
    assert fetched(1) == [FetchFile(attempt, name, 1) for name in sorted(PARTS[attempt][1])]
    assert len(fetched(0, 1, 2)) == len(PARTS[attempt][1] | PARTS[attempt][2])


def test_heads_come_before_files():
    """Other keepers may wait for them."""
    _, second, third, _ = ATTEMPTS
    wanted = frozenset({1})
    orders = Orders(
        {one: Order(checkpoint(one), ranks=wanted, sources=SOURCES) for one in (second, third)}, second
    )
    here = {second: Kept(), third: Kept(PARTS[third])}
    fetch = FetchFile(third, min(PARTS[third][1]), 1)
    assert decide(Situation(orders, here))[:2] == [GetHead(second), fetch]


def test_deletions_come_first_then_newer_checkpoints():
    first, second, third, fourth = ATTEMPTS
    given_orders = Orders(
        {
            second: Order(checkpoint(second), ranks=frozenset({1}), sources=SOURCES, persist=frozenset({0})),
            third: Order(checkpoint(third), ranks=frozenset({1, 2})),
            fourth: Order(checkpoint(fourth), ranks=frozenset({0})),
        },
        third,
    )
    here = {
        first: Kept(),
        second: Kept(PARTS[second]),
        third: Kept(PARTS[third], verified=PARTS[third][2], unverified=PARTS[third][1]),
    }
    assert decide(Situation(given_orders, here)) == [
        DeleteAttempt(first),
        GetHead(fourth),
        VerifyFile(third, "2-0-1-0"),
        FetchFile(second, "1-1-1-0", 1),
        PersistPart(second, 0),
    ]
