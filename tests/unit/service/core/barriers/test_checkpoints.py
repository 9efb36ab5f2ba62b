"""What the ranks tell of their saves: what counts as a commit, what as a failed save, and what is kept."""

import dataclasses

import pytest

from muster.client.protocol import MAX_STEP, MAX_WRITE_BYTES, MAX_WRITE_SECONDS
from muster.service.core import views
from muster.service.core.barriers.checkpoints import MAX_FAILURES, MAX_INTERVALS
from muster.service.core.vocabulary.events import Arrival, Arrive, CloseRun, Forget, WriteReport
from muster.service.core.vocabulary.model import Checkpoint, CheckpointHistory, Outcome, SlowestWrite
from muster.service.core.vocabulary.records import CheckpointsRecord
from muster.service.core.vocabulary.refusal import Reason
from muster.service.core.vocabulary.report import MAX_SAVE_REASON
from tests.support.expect import some
from tests.support.world.core_client import Client
from tests.support.world.core_world import RUN, TTL, WALL, World

SAVE = "save"
COMMIT = "save/commit"


@pytest.fixture
def world() -> World:
    return World()


def history(world: World) -> CheckpointHistory:
    return world.coordinator.runs[RUN].checkpoints.history


def newest(world: World) -> Checkpoint:
    return some(history(world).newest)


def view(world: World) -> views.CheckpointsView:
    return some(views.checkpoints(world.coordinator.runs[RUN], world.instant))


def arrive(clients: list[Client], *reports: WriteReport | None, prefix: str = SAVE) -> None:
    for client, report in zip(clients, reports, strict=True):
        client.arrive(prefix, report=report)


def commit(clients: list[Client], step: int | None, prefix: str = SAVE) -> None:
    arrive(clients, *(WriteReport(step=step, commits=True) for _ in clients), prefix=prefix)


# ---------------------------------------------------------------------- commits


def test_release_of_the_last_barrier_is_the_commit(world: World):
    clients = world.ranks(prefix=SAVE)
    world.wait(5)
    first = WriteReport(step=100, bytes=2_000, seconds=1.5, commits=True)
    second = WriteReport(step=100, bytes=3_000, seconds=2.5, commits=True)
    arrive(clients, first, second)
    assert newest(world) == Checkpoint(100, WALL + world.now, 5_000, SlowestWrite(1, "node-0", 2.5), SAVE, 0)
    assert history(world).committed == 1
    assert history(world).failures == ()


def test_release_of_an_earlier_barrier_of_a_save_commits_nothing(world: World):
    clients = world.ranks(prefix=SAVE)
    written = WriteReport(step=100, bytes=1, seconds=1.0)
    arrive(clients, written, written)
    assert history(world) == CheckpointHistory()
    commit(clients, 100, prefix=COMMIT)
    assert (newest(world).prefix, newest(world).step) == (COMMIT, 100)


@pytest.mark.parametrize("other", [None, WriteReport(step=100)])
def test_barrier_at_which_one_rank_does_not_commit_commits_nothing(world: World, other: WriteReport | None):
    clients = world.ranks(prefix=SAVE)
    arrive(clients, WriteReport(step=100, commits=True), other)
    assert history(world) == CheckpointHistory()
    assert not world.disk.of_kind(CheckpointsRecord)


def test_unreported_value_is_absent_and_not_zero(world: World):
    clients = world.ranks(prefix=SAVE)
    commit(clients, None)
    assert (newest(world).step, newest(world).bytes, newest(world).slowest) == (None, None, None)
    arrive(clients, WriteReport(commits=True, step=0, bytes=0, seconds=0.0), WriteReport(commits=True))
    assert (newest(world).step, newest(world).bytes) == (0, 0)
    assert newest(world).slowest == SlowestWrite(0, "node-0", 0.0)


def test_ranks_at_different_steps_commit_no_step(world: World):
    clients = world.ranks(prefix=SAVE)
    arrive(clients, WriteReport(step=1, commits=True), WriteReport(step=2, commits=True))
    assert (history(world).committed, newest(world).step) == (1, None)


def test_newest_is_the_last_commit_also_after_going_back(world: World):
    clients = world.ranks(prefix=SAVE)
    for step in (80, 90, 60):
        commit(clients, step)
    assert (newest(world).step, history(world).committed) == (60, 3)


def test_report_of_a_superseded_process_does_not_count(world: World):
    zero, one = world.ranks(prefix=SAVE)
    one.arrive(SAVE, report=WriteReport(step=7, bytes=10, commits=True))
    newer = world.start(1)
    newer.join(SAVE)
    newer.arrive(SAVE)
    zero.arrive(SAVE, report=WriteReport(step=7, bytes=1, commits=True))
    assert history(world) == CheckpointHistory(), "the newer one tells of no commit"


def test_repeated_arrival_counts_its_bytes_once(world: World):
    zero, one = world.ranks(prefix=SAVE)
    zero.arrive(SAVE, report=WriteReport(bytes=10, commits=True))
    zero.arrive_again(SAVE)
    one.arrive(SAVE, report=WriteReport(bytes=1, commits=True))
    assert newest(world).bytes == 11


def test_unary_call_reports_too(world: World):
    for rank in range(2):
        arrival = Arrival(rank, report=WriteReport(step=9, bytes=4, commits=True))
        world.do(world.arrive_once(rank, prefix=SAVE, arrival=arrival))
    assert (newest(world).step, newest(world).bytes) == (9, 8)


# ---------------------------------------------------------------------- failures


def test_failure_of_any_barrier_of_a_save_is_a_failed_save(world: World):
    zero, one = world.ranks(prefix=SAVE)
    zero.arrive(SAVE, report=WriteReport(step=100))
    one.arrive(SAVE, failure="OSError: no space left\nTraceback …", report=WriteReport(step=100))
    (failed,) = history(world).failures
    assert (failed.step, failed.failed_at, failed.prefix, failed.sequence) == (100, WALL + world.now, SAVE, 0)
    assert failed.reason == f"was aborted: rank 1 (node-0, pid {one.pid}) failed: OSError: no space left"
    assert history(world).newest is None


def test_failed_save_that_timed_out_names_the_missing(world: World):
    zero, _ = world.ranks(prefix=SAVE)
    zero.arrive(SAVE, timeout=30.0, report=WriteReport(step=100, commits=True))
    world.wait(30)
    (failed,) = history(world).failures
    assert failed.reason.startswith(
        "timed out after 30 s (the first arrival's timeout); arrived 1 of 2; missing:"
    )
    assert "rank 1 (node-0, pid" in failed.reason


def test_given_up_save_fails_although_its_barrier_is_released(world: World):
    clients = world.ranks(prefix=SAVE)
    arrive(clients, WriteReport(step=100, gives_up=True), WriteReport(step=100))
    (failed,) = history(world).failures
    assert (failed.step, failed.sequence) == (100, 0)
    assert failed.reason.startswith("was given up by rank 0: ")
    arrive(clients, *(WriteReport(step=101, commits=True, gives_up=True) for _ in clients))
    assert history(world).failures[0].reason.startswith("was given up by ranks 0-1: ")
    assert history(world).newest is None


def test_failure_of_a_barrier_of_no_save_is_none(world: World):
    zero, one = world.ranks(prefix=SAVE)
    zero.arrive(SAVE)
    one.arrive(SAVE, failure="no")
    assert history(world) == CheckpointHistory()


def test_last_failures_are_kept_newest_first_and_cut(world: World):
    (only,) = world.ranks(1, prefix=SAVE)
    for step in range(MAX_FAILURES + 2):
        only.arrive(SAVE, failure="x" * 1_000, report=WriteReport(step=step))
    kept = history(world).failures
    assert [failed.step for failed in kept] == list(range(MAX_FAILURES + 1, 1, -1))
    assert {len(failed.reason) for failed in kept} == {MAX_SAVE_REASON + 1}


# ---------------------------------------------------------------------- how often


def test_usual_interval_is_known_after_three_commits(world: World):
    clients = world.ranks(prefix=SAVE)
    commit(clients, 1)
    world.wait(600)
    commit(clients, 2)
    assert history(world).interval is None
    world.wait(610)
    commit(clients, 3)
    assert history(world).interval == pytest.approx(605)


def test_two_long_pauses_do_not_change_the_usual_interval(world: World):
    clients = world.ranks(prefix=SAVE)
    for pause in (60, 60, 60, 7_200, 60, 7_200):
        commit(clients, 1)
        world.wait(pause)
    commit(clients, 1)
    assert len(history(world).intervals) == MAX_INTERVALS
    assert history(world).interval == pytest.approx(60)


def test_saves_of_two_groups_do_not_shorten_the_interval(world: World):
    clients = world.ranks(prefix=SAVE)
    for _ in range(4):
        commit(clients, 1)
        world.wait(1)
        commit(clients, None, prefix="save-2")
        world.wait(599)
    assert history(world).interval == pytest.approx(600)


def test_wall_clock_that_is_set_back_makes_no_negative_time(world: World):
    clients = world.ranks(prefix=SAVE)
    checkpoints = world.coordinator.runs[RUN].checkpoints
    commit(clients, 1)
    later = dataclasses.replace(newest(world), committed_at=newest(world).committed_at + 1_000)
    checkpoints.restore(CheckpointsRecord(RUN, dataclasses.replace(history(world), newest=later)))
    assert view(world).age == 0
    commit(clients, 2)
    assert history(world).intervals == (0,)


# ---------------------------------------------------------------------- what people see


def test_age_is_that_of_the_newest_commit(world: World):
    clients = world.ranks(prefix=SAVE)
    commit(clients, 1)
    world.wait(40)
    assert view(world).age == pytest.approx(40)
    assert view(world).unsaved == pytest.approx(40)


def test_run_without_reports_has_no_save_history(world: World):
    world.ranks(prefix=SAVE)
    assert views.run(world.coordinator.runs[RUN], world.instant).checkpoints is None


def test_unsaved_time_begins_when_ranks_are_there_again(world: World):
    clients = world.ranks(prefix=SAVE)
    commit(clients, 1)
    for client in clients:
        client.die()
    world.wait(3_600)
    assert view(world).age == pytest.approx(3_600)
    assert view(world).unsaved is None
    world.start(0)
    world.wait(5)
    world.start(1)
    assert view(world).age == pytest.approx(3_605)
    assert view(world).unsaved == pytest.approx(5)


# ---------------------------------------------------------------------- keeping


def test_restart_loses_nothing_of_it(world: World):
    clients = world.ranks(prefix=SAVE)
    for step in (1, 2, 3):
        commit(clients, step)
        world.wait(60)
    clients[0].arrive(SAVE, failure="no", report=WriteReport(step=4))
    before = history(world)
    world.crash()
    assert history(world) == before
    for client in clients:
        client.connect()
    clients[1].arrive(SAVE)
    commit(clients, 5)
    # The time between two commits is known over the restart, too.
    assert history(world).intervals == pytest.approx((60, 60, 60))


def test_repeated_report_counts_after_a_restart(world: World):
    clients = world.ranks(prefix=SAVE)
    clients[0].arrive(SAVE, report=WriteReport(step=1, bytes=2, commits=True))
    world.crash()
    for client in clients:
        client.connect()
    clients[1].arrive(SAVE, report=WriteReport(step=1, bytes=2, commits=True))
    assert newest(world).bytes == 4


def test_new_generation_keeps_the_commits_before(world: World):
    commit(world.ranks(prefix=SAVE), 1)
    world.ranks(prefix=SAVE, generation=1)
    assert newest(world).step == 1


def test_forgotten_run_leaves_nothing(world: World):
    commit(world.ranks(prefix=SAVE), 1)
    assert world.disk.of_kind(CheckpointsRecord)
    world.do(Forget(world.new_session(), RUN, force=True))
    assert not world.disk.of_kind(CheckpointsRecord)


def test_closed_run_still_commits(world: World):
    clients = world.ranks(prefix=SAVE)
    world.do(CloseRun(world.new_session(), RUN, "ann", ""))
    commit(clients, 1)
    assert newest(world).step == 1


# ---------------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("report", "field"),
    [
        (WriteReport(step=MAX_STEP + 1), "write.step"),
        (WriteReport(bytes=MAX_WRITE_BYTES + 1), "write.bytes"),
        (WriteReport(seconds=MAX_WRITE_SECONDS + 1), "write.write_ms"),
    ],
)
def test_report_beyond_its_bounds_is_refused_and_the_barrier_goes_on(
    world: World, report: WriteReport, field: str
):
    zero, one = world.ranks(prefix=SAVE)
    answer = world.refused(Arrive(some(zero.session), SAVE, 0, 60.0, (Arrival(0, report=report),)))
    assert answer.refusal.reason is Reason.INVALID_ARGUMENT
    assert answer.refusal.metadata == {"field": field}
    assert (answer.rank, answer.sequence) == (0, 0)
    refused = world.refused(world.arrive_once(0, prefix=SAVE, arrival=Arrival(0, report=report)))
    assert refused.refusal.metadata == {"field": field}
    zero.arrive(SAVE)
    assert some(one.arrive(SAVE)).outcome is Outcome.RELEASED


def test_report_at_its_bounds_is_taken(world: World):
    most = WriteReport(step=MAX_STEP, bytes=MAX_WRITE_BYTES, seconds=MAX_WRITE_SECONDS, commits=True)
    arrive(world.ranks(prefix=SAVE), most, most)
    assert newest(world).bytes == 2 * MAX_WRITE_BYTES


def test_report_changes_no_decision():
    """Telemetry decides nothing: whatever is reported, the ranks hear the same."""
    heard = []
    for report in (None, WriteReport(step=1), WriteReport(step=1, bytes=5, seconds=1e6, commits=True)):
        world = World()
        zero, one = world.ranks(prefix=SAVE)
        zero.arrive(SAVE, report=report, payload=b"0")
        one.arrive(SAVE, report=report, payload=b"1")
        zero.arrive(SAVE, report=report, failure="no")
        one.arrive(SAVE, report=report)
        one.lose_connection()
        zero.arrive(SAVE, report=report)
        world.wait(TTL + 1)
        heard.append(zero.memberships[SAVE].heard)
    assert len(heard[0]) == 3
    assert heard[1] == heard[0] == heard[2]
