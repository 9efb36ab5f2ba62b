import pytest

from muster.service.core.membership.process import Process
from muster.service.core.membership.roster import Roster
from muster.service.core.vocabulary.effects import Effects, Welcome
from muster.service.core.vocabulary.events import Hello, ProcessInfo
from muster.service.core.vocabulary.model import MemberState
from tests.support.expect import raising
from tests.support.world.core_world import RUN, World


def a_process(ordinal, state=MemberState.CONNECTED, rank=0):
    return Process(
        run_id="job1",
        rank=rank,
        incarnation=f"p{ordinal}",
        ordinal=ordinal,
        host="node-0",
        pid=ordinal,
        node_name="node-0",
        generation=0,
        unary=False,
        session=None,
        state=state,
        since=0.0,
        lineage=ordinal,
    )


def a_roster(*processes):
    roster = Roster(0)
    for process in processes:
        roster.add(process)
    return roster


def test_newest_process_said_hello_last_in_any_order_of_adding():
    roster = a_roster(a_process(5), a_process(3))
    newest = roster.newest(0)
    assert newest is not None
    assert newest.incarnation == "p5"
    assert [p.ordinal for p in roster.of_rank(0)] == [3, 5]


def test_process_is_found_by_rank_and_incarnation():
    roster = a_roster(a_process(1), a_process(2, rank=1))
    assert roster.find(1, "p2") is roster.newest(1)
    assert roster.find(0, "p2") is None
    assert roster.find(7, "p1") is None
    assert roster.newest(7) is None


def test_dead_process_is_kept_only_while_it_owns_a_rank():
    mute, speaker = a_process(1, MemberState.LOST), a_process(2, MemberState.LEFT)
    speaker.prefixes.add("checkpoint")
    roster = a_roster(mute, speaker)
    roster.add(a_process(3))
    assert [p.ordinal for p in roster.of_rank(0)] == [2, 3]


def test_roster_is_deserted_without_living_processes():
    assert a_roster(a_process(1, MemberState.LEFT), a_process(2, MemberState.LOST, rank=1)).deserted
    assert not a_roster(a_process(1, MemberState.LEFT), a_process(2, MemberState.DISCONNECTED)).deserted


def test_roster_is_deserted_after_its_last_living_process_died():
    process = a_process(1)
    roster = a_roster(process)
    process.leave(5.0)
    roster.refresh(process)
    assert roster.deserted
    process.connect(session=2, now=6.0)
    roster.refresh(process)
    assert not roster.deserted


def test_hello_looks_at_no_other_rank(monkeypatch):
    world = World(3)
    world.start(0)
    world.start(1)

    monkeypatch.setattr(
        Roster,
        "__iter__",
        raising(AssertionError, "a hello looks at every rank: a job start costs the square of its ranks"),
    )
    effects = Effects()
    world.coordinator.step(Hello(9, RUN, 0, (ProcessInfo(2, "p2", "node-0", 7),)), world.instant, effects)
    (delivery,) = effects.deliveries
    assert isinstance(delivery.message, Welcome)


def test_it_iterates_by_rank_and_forgets_everyone_when_cleared():
    roster = a_roster(a_process(4, rank=2), a_process(3, rank=0), a_process(5, rank=0))
    assert [(p.rank, p.ordinal) for p in roster] == [(0, 3), (0, 5), (2, 4)]
    roster.clear()
    assert len(roster) == 0


@pytest.mark.parametrize(
    ("state", "gone"),
    [
        (MemberState.CONNECTED, False),
        (MemberState.DISCONNECTED, False),
        (MemberState.IDLE, False),
        (MemberState.LOST, True),
        (MemberState.LEFT, True),
    ],
)
def test_rank_is_gone_when_its_only_process_is(state, gone):
    process = a_process(1, state)
    roster = a_roster(process)
    assert roster.is_gone(0, None) is gone
    assert roster.is_gone(0, process) is gone


def test_rank_that_was_never_seen_is_not_gone():
    assert not a_roster().is_gone(3, None)


def test_only_a_newer_process_may_take_the_place_of_a_dead_speaker():
    older, speaker, newer = a_process(1), a_process(2, MemberState.LOST), a_process(3)
    speaker.prefixes.add("checkpoint")
    assert a_roster(older, speaker).is_gone(0, speaker)
    newer.successor_until = 60.0
    assert not a_roster(speaker, newer).is_gone(0, speaker)
    newer.successor_until = None
    assert a_roster(speaker, newer).is_gone(0, speaker)
    newer.lineage = speaker.lineage
    assert not a_roster(speaker, newer).is_gone(0, speaker)
