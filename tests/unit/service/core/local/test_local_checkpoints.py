"""Local checkpoints: levels and orders, through the core's events alone."""

import pytest

from muster.service.core.local.views import local_tier
from muster.service.core.vocabulary.effects import Refused
from muster.service.core.vocabulary.events import Disconnected, Tick
from muster.service.core.vocabulary.local import (
    Attachment,
    Attempt,
    Holding,
    Level,
    LocalCommitted,
    Peers,
    ReportKeeper,
    ReportTaken,
    Transfer,
)
from muster.service.core.vocabulary.model import Instant
from muster.service.core.vocabulary.refusal import Reason
from tests.support.keepers.scripted_job import RUN, Job, chosen, digest, refused


def test_checkpoint_becomes_replicated_when_each_part_has_its_copies():
    job = Job().connect_all()
    first = Attempt(1, 0)
    waiting = job.commit(first, 10, Level.REPLICATED)
    assert job.level(first) is Level.LOCAL
    for node in range(3):
        job.report(node, first, {node})
    assert job.answer(waiting) is None
    job.follow(first)
    assert job.level(first) is Level.REPLICATED
    assert job.answer(waiting) == LocalCommitted(Level.REPLICATED)


def test_orders_name_own_part_copies_and_their_sources():
    job = Job().connect_all()
    first = Attempt(1, 0)
    job.commit(first, 10)
    (order,) = job.orders("k1").checkpoints
    assert order.ranks == (0, 1)
    assert [(one.url, one.ranks) for one in order.sources] == [("http://k0", ())], "the manifest alone"
    job.report(0, first, {0})
    (order,) = job.orders("k1").checkpoints
    assert [(one.url, one.ranks) for one in order.sources] == [("http://k0", (0,))]


def test_keeper_without_a_manifest_is_told_where_one_is_though_it_is_to_hold_nothing():
    """It may have a part of that checkpoint, which it cannot verify without it."""
    job = Job().connect_all()
    first = Attempt(1, 0)
    job.save(first, 10)
    held = {node: job.core.run(RUN).local.keepers.find(f"k{node}").holdings for node in (1, 2)}  # type: ignore[union-attr]
    for node in (0, 1, 2):
        job.lose(node)
    job.connect(0, generation=2)
    job.connect(1, *held[1].values(), generation=2)
    job.connect(2, *held[2].values(), generation=2)
    (order,) = job.orders("k0").checkpoints
    assert order.ranks == ()
    assert [(one.url, one.ranks) for one in order.sources] == [("http://k1", ()), ("http://k2", ())]


def test_peers_are_told_when_every_rank_has_its_keeper():
    job = Job()
    job.connect(0)
    job.connect(1)
    job.connect(2)
    for name in ("k0", "k1", "k2"):
        peers = [one for one in job.sent[job.sessions[name]] if isinstance(one, Peers)][-1]
        assert [one.url for one in peers.keepers] == ["http://k0", "http://k1", "http://k2"]
        assert peers.token == "secret"


def test_job_resumes_from_a_copy_of_the_lost_node():
    job = Job().connect_all().save(Attempt(1, 0), 10)
    held = {node: job.core.run(RUN).local.keepers.find(f"k{node}").holdings for node in range(3)}  # type: ignore[union-attr]
    job.lose(2)
    job.connect(2, generation=2)
    for node in (0, 1):
        job.lose(node)
        job.connect(node, *held[node].values(), generation=2)
    asked = [job.recover(2) for _ in range(3)]
    assert {chosen(job, session) for session in asked} == {Attempt(1, 0)}
    order = job.orders("k2").checkpoints[0]
    assert {rank for source in order.sources for rank in source.ranks} == {0, 1, 2}
    assert order.ranks == (1, 2)


def test_keeper_that_has_reported_nothing_yet_is_told_of_all_checkpoints_and_deletes_none():
    job = Job().connect_all().save(Attempt(1, 0), 10)
    job.lose(1)
    job.connect(1, generation=2)
    (order,) = job.orders("k1").checkpoints
    assert order.checkpoint.attempt == Attempt(1, 0)
    assert order.ranks == ()


def test_keeper_that_has_lost_the_manifest_is_not_the_only_source():
    job = Job(replicas=0).connect_all().save(Attempt(1, 0), 10)
    job.report(0, Attempt(1, 0), set())
    job.lose(2)
    job.connect(2)
    urls = {source.url for source in job.orders("k2").checkpoints[0].sources}
    assert urls == {"http://k0", "http://k1"}


def test_each_keeper_persists_what_it_wrote():
    job = Job().connect_all()
    job.commit(Attempt(1, 0), 10, persist_to="/shared")
    for node in range(3):
        job.report(node, Attempt(1, 0), {node})
    job.follow(Attempt(1, 0))
    for node in range(3):
        (order,) = job.orders(f"k{node}").checkpoints
        assert order.persist == (node,)
    job.lose(2)
    (order,) = job.orders("k0").checkpoints
    assert order.persist == (0, 2)


def test_two_safe_checkpoints_are_kept():
    job = Job().connect_all()
    for number in range(4):
        job.save(Attempt(1, number), 10 * number)
    assert [one.checkpoint.step for one in job.core.run(RUN).local.copies] == [20, 30]
    assert [one.checkpoint.step for one in job.orders("k0").checkpoints] == [20, 30]
    assert job.orders("k0").forget_before == Attempt(1, 4)


def test_commit_of_an_earlier_generation_is_refused():
    job = Job().connect_all().save(Attempt(1, 0), 10)
    for node in range(3):
        job.report(node, Attempt(1, 0), {node})
        session = job.session()
        attachment = Attachment(2, 3, frozenset({node}), 1)
        job.step(ReportKeeper(session, RUN, f"k{node}", (), 0, attachment))
        assert job.answer(session) == ReportTaken()
    assert chosen(job, job.recover(2)) == Attempt(1, 0)
    assert refused(job, job.commit(Attempt(1, 7), 20)) is Reason.ATTEMPT_SUPERSEDED


def test_commit_may_be_repeated():
    job = Job().connect_all()
    for _ in range(2):
        assert job.answer(job.commit(Attempt(1, 0), 10)) == LocalCommitted(Level.LOCAL)
    job.restart()
    job.connect_all()
    assert job.answer(job.commit(Attempt(1, 0), 10)) == LocalCommitted(Level.LOCAL)


def test_report_needs_an_open_stream():
    job = Job().connect_all()
    job.lose(1)
    answer = job.report(1, Attempt(1, 0), {1})
    assert isinstance(answer, Refused)
    assert answer.refusal.reason is Reason.KEEPER_NOT_CONNECTED


def test_second_stream_of_a_keeper_ends_the_first():
    job = Job().connect_all()
    first = job.sessions["k1"]
    job.connect(1)
    assert refused(job, first) is Reason.SESSION_REPLACED
    job.step(Disconnected(first))
    assert job.core.run(RUN).local.keepers.find("k1").session == job.sessions["k1"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "holding",
    [
        Holding(Attempt(1, 0), b"another manifest", frozenset({2})),
        Holding(Attempt(1, 0), digest(Attempt(1, 0)), frozenset({7})),
        Holding(Attempt(0, 0), digest(Attempt(1, 0)), frozenset({2})),
    ],
)
def test_holding_of_another_manifest_rank_or_attempt_does_not_count(holding: Holding):
    job = Job(replicas=0).connect_all()
    job.commit(Attempt(1, 0), 10)
    for node in range(2):
        job.report(node, Attempt(1, 0), {node})
    session = job.session()
    job.step(ReportKeeper(session, RUN, "k2", (holding,), 0))
    assert job.core.run(RUN).local.copies[0].missing() == [2]


def test_checkpoint_is_not_persisted_after_a_newer_one():
    job = Job(replicas=0).connect_all()
    old, new = Attempt(1, 0), Attempt(1, 1)
    for attempt, step in ((old, 10), (new, 20)):
        job.commit(attempt, step, persist_to="/shared")
    for node in range(3):
        job.report(node, new, {node}, persisted_ranks=frozenset({node}))
    job.report(0, new, {0}, persisted_ranks=frozenset({0}), persisted_as="/shared/step-20")
    assert job.level(new) is Level.PERSISTED
    for node in range(3):
        job.report(node, old, {node})
    assert [one.persist for one in job.orders("k0").checkpoints if one.checkpoint.attempt == old] == [()]


def test_persisted_checkpoint_newer_than_the_newest_whole_one_is_not_forgotten():
    job = Job(replicas=0).connect_all()
    whole, persisted = Attempt(1, 0), Attempt(1, 1)
    job.save(whole, 10)
    job.commit(persisted, 20, persist_to="/shared")
    for node in range(3):
        job.report(node, persisted, {node}, persisted_ranks=frozenset({node}))
    job.report(0, persisted, {0}, persisted_ranks=frozenset({0}), persisted_as="/shared/step-20")
    job.report(2, persisted, set())
    for number in range(2, 9):
        job.commit(Attempt(1, number), 10 + 10 * number)
    asked = job.recover(1)
    job.now += 6
    job.step(Tick())
    assert chosen(job, asked) is None, "step 20 in shared storage is newer than step 10"


def test_sources_of_all_parts_are_told_only_until_all_ranks_have_loaded():
    job = Job().connect_all().save(Attempt(1, 0), 10)
    job.recover(1)
    (order,) = job.orders("k0").checkpoints
    assert {rank for source in order.sources for rank in source.ranks} == {0, 1, 2}
    job.commit(Attempt(1, 1), 20)
    assert job.orders("k0").checkpoints[0].sources == ()


def test_two_checkpoints_are_kept_on_a_single_node():
    job = Job(nodes=1).connect_all()
    for number in range(4):
        job.save(Attempt(1, number), 10 * number)
    assert [one.checkpoint.step for one in job.core.run(RUN).local.copies] == [20, 30]


def test_part_is_persisted_by_one_keeper_when_its_own_comes_back():
    job = Job().connect_all()
    job.commit(Attempt(1, 0), 10, persist_to="/shared")
    for node in range(3):
        job.report(node, Attempt(1, 0), {node})
    job.follow(Attempt(1, 0))
    job.report(2, Attempt(1, 0), set())
    assert job.orders("k0").checkpoints[0].persist == (0, 2)
    job.report(2, Attempt(1, 0), {2})
    assert job.orders("k0").checkpoints[0].persist == (0,)
    assert job.orders("k2").checkpoints[0].persist == (2,)


def test_lost_keepers_lead_to_one_round_of_orders():
    job = Job(nodes=4).connect_all().save(Attempt(1, 0), 10)
    job.recover(1)
    before = len(job.sent[job.sessions["k0"]])
    job.lose(1, 2, 3)
    assert len(job.sent[job.sessions["k0"]]) == before + 1


def test_checkpoint_without_upload_progress_is_given_up_for_a_newer_one():
    job = Job(replicas=0).connect_all()
    for number in range(2):
        job.commit(Attempt(1, number), 10 * number, persist_to="/shared")
        for node in range(3):
            job.report(node, Attempt(1, number), {node})
    assert [one.checkpoint.step for one in job.orders("k0").checkpoints if one.persist] == [0]
    job.now += 901
    job.step(Tick())
    assert [one.checkpoint.step for one in job.orders("k0").checkpoints if one.persist] == [10]
    shown = local_tier(job.core.run(RUN).local, Instant(job.now, job.now)).checkpoints
    assert [one.pending for one in shown] == [
        "parts of 0 of 3 ranks are in shared storage",
        "is not persisted, because shared storage took nothing of it for too long",
    ]


def test_committer_is_told_the_sources_of_all_parts():
    job = Job(replicas=0).connect_all()
    first = Attempt(1, 0)
    job.commit(first, 10, persist_to="/shared")
    for node in range(3):
        job.report(node, first, {node})
    assert [one.sources for one in job.orders("k0").checkpoints] == [()]
    for node in range(3):
        job.report(node, first, {node}, persisted_ranks=frozenset({node}))
    (order,) = job.orders("k0").checkpoints
    assert order.commit
    assert order.ranks == (0,)
    assert [(one.url, one.ranks) for one in order.sources] == [("http://k1", (1,)), ("http://k2", (2,))]


def test_coordinator_that_has_lost_its_state_has_nothing_deleted():
    job = Job()
    job.connect_all(generation=3)
    assert job.orders("k0").forget_before == Attempt(0, 0)


def test_rank_that_moves_within_a_generation_belongs_to_its_new_node():
    job = Job().connect_all()
    session = job.session()
    moved = Attachment(1, 3, frozenset({0, 1}), 1)
    job.step(ReportKeeper(session, RUN, "k1", (), 0, moved))
    peers = [one for one in job.sent[job.sessions["k2"]] if isinstance(one, Peers)][-1]
    assert [one.ranks for one in peers.keepers] == [(), (0, 1), (2,)]


def test_speeds_of_a_keeper_are_shown_until_it_tells_others():
    job = Job().connect_all()
    transfers = (Transfer("http://k0", 1000, 2.0),)
    job.step(ReportKeeper(job.session(), RUN, "k1", (), 0, transfers=transfers))
    job.step(ReportKeeper(job.session(), RUN, "k1", (), 0))
    keepers = local_tier(job.core.run(RUN).local, Instant(job.now, 0.0)).keepers
    assert [one.transfers for one in keepers] == [(), transfers, ()]


@pytest.mark.parametrize(
    "transfers",
    [
        [Transfer("", 1, 1.0)],
        [Transfer("http://k0", 2**63, 1.0)],
        [Transfer("http://k0", 1, -1.0)],
        [Transfer("http://k0", 1, float("nan"))],
        [Transfer("http://k0", 1, float("inf"))],
        [Transfer(f"http://k{number}", 1, 1.0) for number in range(65)],
    ],
)
def test_speeds_that_cannot_be_are_refused(transfers: list[Transfer]):
    job = Job().connect_all()
    session = job.session()
    job.step(ReportKeeper(session, RUN, "k1", (), 0, transfers=tuple(transfers)))
    assert refused(job, session) is Reason.INVALID_ARGUMENT
