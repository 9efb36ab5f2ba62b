"""What people are told that the missing do: when they are asked, and how long an answer is of use."""

import dataclasses

import pytest

from muster.service.core import probes, views
from muster.service.core.barriers import observations
from muster.service.core.vocabulary.effects import ProbeTarget
from muster.service.core.vocabulary.events import ProbeResult, ProbeResults, Stepped
from muster.service.core.vocabulary.model import Outcome
from muster.service.core.vocabulary.refusal import Reason, Refusal
from tests.support.expect import some
from tests.support.world.core_client import CKPT, Client
from tests.support.world.core_world import RUN, World

LINE = "main thread in all_reduce, train.py:214"


@pytest.fixture
def world() -> World:
    return World()


def see(world: World, client: Client, doing: str = LINE) -> None:
    world.do(ProbeResults(RUN, (ProbeResult(client.rank, client.incarnation, doing),)))


def probed(world: World, seconds: float) -> list[tuple[ProbeTarget, ...]]:
    """Return the processes that the coordinator probes within some seconds."""
    found = []
    end = world.now + seconds
    while (due := world.coordinator.next_deadline()) is not None and due <= end:
        world.wait(due - world.now)
        found += [look.processes for look in world.last.probes]
    return found


def test_missing_ranks_are_probed_shortly_before_a_report(world: World):
    zero, one = world.ranks()
    zero.arrive(timeout=100.0)
    world.wait(47.9)
    assert world.last.probes == []
    world.wait(0.1)
    (look,) = world.last.probes
    assert look.run_id == RUN
    assert [(a.rank, a.incarnation, a.session, a.relayed) for a in look.processes] == [
        (1, one.incarnation, one.session, False)
    ]
    see(world, one)
    world.wait(2.0)
    (progress,) = zero.memberships[CKPT].progress
    assert progress.message.endswith(f"connected, not arrived yet): {LINE}")
    assert progress.missing[0].doing == LINE


def test_missing_ranks_are_probed_again_before_the_timeout(world: World):
    zero, one = world.ranks()
    zero.arrive(timeout=100.0)
    assert len(probed(world, 99.0)) == 2
    see(world, one)
    world.wait(100.0)
    assert zero.last.outcome is Outcome.TIMED_OUT
    assert zero.last.missing[0].doing == LINE
    assert f"connected, not arrived yet): {LINE}\n" in zero.last.message


def test_nobody_is_asked_for_a_barrier_that_everyone_comes_to_in_time(world: World):
    zero, one = world.ranks()
    for _ in range(3):
        zero.arrive(timeout=10.0)
        one.arrive(timeout=10.0)
    assert probed(world, 100.0) == []


def test_outdated_observation_is_not_shown(world: World):
    zero, one = world.ranks()
    zero.arrive(timeout=100.0)
    see(world, one)
    world.wait(observations.OBSERVATION_TTL + 0.1)
    world.wait(40.0)
    assert zero.memberships[CKPT].progress[0].missing[0].doing == ""


def test_observation_of_a_gone_process_is_not_shown(world: World):
    zero, one = world.ranks()
    zero.arrive(timeout=100.0)
    see(world, one)
    one.goodbye()
    assert zero.last.outcome is Outcome.MEMBER_LOST
    assert zero.last.missing[0].doing == ""


def test_observation_of_an_unknown_process_changes_nothing(world: World):
    zero, _ = world.ranks()
    before = dataclasses.asdict(world.coordinator.runs[RUN].roster.of_rank(0)[0])
    world.do(
        ProbeResults("nobody's", (ProbeResult(0, "x", LINE),)),
        ProbeResults(RUN, (ProbeResult(0, "x", LINE), ProbeResult(-7, "", ""))),
    )
    assert dataclasses.asdict(world.coordinator.runs[RUN].roster.of_rank(0)[0]) == before
    assert zero.memberships[CKPT].progress == []


def test_observation_of_a_process_is_made_printable_and_shortened(world: World):
    zero, one = world.ranks()
    zero.arrive(timeout=10.0)
    see(world, one, "main\x1b[2J thread\n  next: rm -rf " + "x" * 10_000)
    world.wait(5.0)
    doing = zero.memberships[CKPT].progress[0].missing[0].doing
    assert doing.startswith("main\\x1b[2J thread next: rm -rf xxx")
    assert len(doing) <= observations.MAX_OBSERVATION_LENGTH + 1


def test_few_are_asked_of_many_and_of_all_hosts():
    world = World(200)
    clients = world.ranks()
    for client in clients[1:]:
        process = world.coordinator.runs[RUN].roster.of_rank(client.rank)[0]
        process.host = "a" if client.rank < 150 else f"b{client.rank}"
    clients[0].arrive(timeout=8.0)
    (asked, *_) = probed(world, 4.0)
    assert len(asked) == observations.MAX_PROBE_TARGETS
    assert {a.host for a in asked} >= {f"b{rank}" for rank in range(150, 200)}


# ---------------------------------------------------------------------- how far a run has come


def test_run_has_come_as_far_as_its_connected_ranks_say():
    world = World(3)
    zero, one, two = world.ranks()
    run = world.coordinator.runs[RUN]
    assert views.steps(run) is None
    zero.step(7)
    two.step(5)
    world.now += 1.0
    one.step(5)
    found = some(views.steps(run))
    assert (found.highest, found.lowest, found.lowest_rank) == (7, 5, 2), "it has been there for longer"
    assert found.moved_at == world.now
    two.lose_connection()
    assert some(views.steps(run)).lowest_rank == 1
    steps = {view.rank: (view.step, view.step_age) for view in views.members(run, world.instant)}
    assert steps == {0: (7, 1.0), 1: (5, 0.0), 2: (5, 1.0)}


def test_repeated_step_is_no_progress():
    world = World(1)
    (zero,) = world.ranks()
    zero.step(7)
    world.now += 60.0
    zero.lose_connection()
    zero.connect()
    zero.step(7)
    assert some(views.steps(world.coordinator.runs[RUN])).moved_at == world.now - 60.0
    zero.step(3)
    assert some(views.steps(world.coordinator.runs[RUN])).lowest == 3, "a job may go back to a checkpoint"


def test_nobody_tells_another_ranks_step(world: World):
    zero, _ = world.ranks()
    world.do(Stepped(some(zero.session), ((1, 99), (-3, 1), (0, 2))))
    found = some(views.steps(world.coordinator.runs[RUN]))
    assert (found.highest, found.lowest) == (2, 2)
    world.do(Stepped(999, ((0, 50),)))
    assert some(views.steps(world.coordinator.runs[RUN])).highest == 2


# ---------------------------------------------------------------------- on demand


def test_probe_targets_are_living_processes_or_named_ranks():
    world = World(3)
    zero, one, two = world.ranks()
    one.lose_connection()
    core = world.coordinator
    zero.arrive()
    assert [a.rank for a in probes.find_probe_targets(core, RUN, (), CKPT)] == [1, 2]
    assert probes.find_probe_targets(core, RUN, (0,), CKPT) == []
    two.goodbye()
    assert [a.rank for a in probes.find_probe_targets(core, RUN, (), "")] == [0, 1]
    assert [(a.rank, a.session) for a in probes.find_probe_targets(core, RUN, (2, 1), "")] == [
        (1, None),
        (2, None),
    ]


@pytest.mark.parametrize(
    ("run_id", "ranks", "prefix", "reason"),
    [
        ("other", (), "", Reason.RUN_NOT_FOUND),
        (RUN, (7, 0), "", Reason.MEMBER_NOT_FOUND),
        (RUN, (-1,), "", Reason.MEMBER_NOT_FOUND),
        (RUN, (), "other", Reason.BARRIER_NOT_FOUND),
        (RUN, (), CKPT, Reason.NO_OPEN_BARRIER),
    ],
)
def test_probe_of_an_unknown_run_rank_or_barrier_is_refused(
    world: World, run_id: str, ranks: tuple[int, ...], prefix: str, reason: Reason
):
    world.ranks()
    with pytest.raises(Refusal) as caught:
        probes.find_probe_targets(world.coordinator, run_id, ranks, prefix)
    assert caught.value.reason is reason
