"""Saves that fail, are refused or are interrupted: each counts once, and none is committed."""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from lab.patience import PATIENCE
from muster.checkpoint.committed import UncommittedError
from muster.worker.errors import AsyncSaveError, ConnectError, MusterError
from muster.worker.saves import Checkpointer
from muster.worker.saves import checkpointer as module
from muster.worker.saves.memory import staging
from muster.worker.saves.planning import planning
from muster.worker.saves.planning.planning import CHANGED
from muster.worker.saves.queue import backlog
from muster.worker.saves.queue.backlog import MAX_UNDECIDED, MAX_UNDER_WAY
from muster.worker.saves.storage.folder_storage import PendingFolder
from tests.support.expect import raising
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.checkpointer.states import loaded, save_steps, state


def when_written(patched: pytest.MonkeyPatch, what: Callable[[Path], object]) -> None:
    """What happens in a child that has written, in the folder of the save."""
    leave = PendingFolder.leave

    def leave_and_more(self: PendingFolder, note: str, data: bytes) -> None:
        leave(self, note, data)
        if note.startswith("written"):
            what(self._unfinished)

    patched.setattr(PendingFolder, "leave", leave_and_more)


@contextmanager
def child_held_back(
    made: Checkpointer, step: int, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """Save a step. In the block, its child has written, and ends when the given function is called."""
    os.mkfifo(gate)
    with monkeypatch.context() as patched:
        when_written(patched, lambda _: gate.read_text())
        made.save(step, state(step))
    with gate.open("w") as held:  # Opens when the child has written and reads.
        yield held.close


def test_a_killed_child_commits_nothing_and_the_next_save_does(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    with monkeypatch.context() as patched:
        when_written(patched, lambda _: os.kill(os.getpid(), signal.SIGKILL))
        made.save(2, state(2))
    with pytest.raises(AsyncSaveError, match="SIGKILL"):
        made.finalize(blocking=True)
    assert loaded(made) == (1, 1)
    made.save(2, state(2.5))
    assert made.finalize(blocking=True) == [2]
    assert loaded(made) == (2, 2.5)
    made.close()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_save_with_an_unconfirmed_commit_has_failed_and_is_resumed_from(
    made: Checkpointer, barrier: FakeBarrier
):
    """As when rank 0 dies after its rename: the others hear of its loss, and the checkpoint is there."""
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    barrier.sibling("save/commit").others_fail[1] = "lost"
    made.save(2, state(2))
    with pytest.raises(AsyncSaveError, match="its commit failed or is not confirmed"):
        made.finalize(blocking=True)
    assert loaded(made) == (2, 2)


def test_uncommitted_checkpoint_is_not_loaded(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not even complete data."""
    with child_held_back(made, 1, tmp_path / "gate", monkeypatch):
        (unfinished,) = tmp_path.glob(".step-*")
        with pytest.raises(UncommittedError, match="is not a committed checkpoint"):
            made.load(state(0), unfinished)
        assert made.latest() is None
    assert made.finalize(blocking=True) == [1]


def test_a_disk_that_takes_no_more_fails_the_save(made: Checkpointer, tmp_path: Path):
    """Here the limit is the process's, which a child has from its parent."""
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        made.save(2, state(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(AsyncSaveError, match="File too large"):
        made.finalize(blocking=True)
    assert loaded(made) == (1, 1)


def test_bad_steps_are_refused(made: Checkpointer):
    with pytest.raises(ValueError, match="negative"):
        made.save(-1, state(0))
    made.save(1, state(1))
    with pytest.raises(ValueError, match=r"being saved already|committed already"):
        made.save(1, state(1))
    # Another rank may have seen it otherwise: it counts, and has failed for all.
    with pytest.raises(AsyncSaveError, match="step 1 was not committed") as caught:
        made.finalize(blocking=True)
    assert caught.value.finalized == (1,)
    with pytest.raises(ValueError, match="committed already"):
        made.save(1, state(1))
    with pytest.raises(AsyncSaveError) as caught:
        made.finalize(blocking=True)
    assert caught.value.finalized == ()
    made.save(2, state(2))
    assert made.finalize(blocking=True) == [2]


@pytest.mark.parametrize("copy", [True, False])
def test_a_state_that_is_too_large_for_a_copy_is_refused_before_the_fork(
    copy: bool, tmp_path: Path, barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch
):
    made = Checkpointer(tmp_path, copy=copy, barrier=barrier)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(staging, "available_memory", lambda: 4_000)
        with no_child_left(), pytest.raises(MemoryError, match="free memory"):
            made.save(1, state(1))
    with pytest.raises(AsyncSaveError, match="MemoryError"):
        made.finalize(blocking=True)
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    made.close()


def test_backlog_is_bounded_while_the_coordinator_is_away(
    made: Checkpointer, barrier: FakeBarrier, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Each further save would take room, and none would be removed."""
    barrier.open.clear()
    begun, refused = range(MAX_UNDECIDED), range(MAX_UNDECIDED, MAX_UNDECIDED + 3)
    for step in [*begun, *refused]:
        made.save(step, state(step))
    assert len(list(tmp_path.glob(".step-*"))) == MAX_UNDECIDED
    for step in refused:
        assert f"step {step} is not saved: the coordinator is away" in caplog.text
        assert not any(
            isinstance(one, BaseException) for record in caplog.records for one in record.args or ()
        )
        with pytest.raises(ValueError, match="not finalized"):
            made.save(step, state(step))
    barrier.open.set()
    for finalized, step in zip([tuple(begun), (), ()], refused, strict=True):
        with pytest.raises(AsyncSaveError, match=f"step {step} was not committed.*away") as caught:
            made.finalize(blocking=True)
        assert caught.value.finalized == finalized
    for step in refused:
        with pytest.raises(AsyncSaveError, match=f"step {step} was not committed.*being saved already"):
            made.finalize(blocking=True)
    save_steps(made, *refused)


def test_training_waits_for_saves_if_storage_is_slow(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Else more and more saves would share the storage's bandwidth, and none would end."""
    under_way: list[int] = []
    with child_held_back(made, 0, tmp_path / "gate", monkeypatch) as let_go:
        made.save(1, state(1))
        assert MAX_UNDER_WAY == 2

        def look(_: float) -> None:
            under_way.append(len(list(tmp_path.glob(".step-*"))))
            let_go()
            sleep(backlog.POLL_INTERVAL)

        monkeypatch.setattr(backlog, "sleep", look)
        made.save(2, state(2))
    assert under_way[0] == MAX_UNDER_WAY + 1
    assert caplog.text.count("training waits in save()") == 1
    assert made.finalize(blocking=True) == [0, 1, 2]


def test_save_that_is_interrupted_while_training_waits_is_made(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other ranks count it, too."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with child_held_back(made, 0, tmp_path / "gate", monkeypatch), monkeypatch.context() as patched:
        made.save(1, state(1))
        patched.setattr(backlog, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            made.save(2, state(2))
    made.save(3, state(3))
    assert made.finalize(blocking=True) == [0, 1, 2, 3]


def test_nothing_is_saved_after_closing(tmp_path: Path):
    made = Checkpointer(tmp_path, barrier=FakeBarrier())  # type: ignore[arg-type]
    made.close()
    with pytest.raises(MusterError, match="closed"):
        made.save(1, state(1))
    assert list(tmp_path.iterdir()) == []


def test_a_save_with_a_file_missing_is_not_committed(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    when_written(monkeypatch, lambda folder: os.truncate(folder / "__0_0.distcp", 10))
    made.save(1, state(1))
    with pytest.raises(AsyncSaveError, match="has 10 bytes"):
        made.finalize(blocking=True)
    assert made.latest() is None


def test_save_with_an_item_that_no_rank_wrote_is_not_committed(
    made: Checkpointer, monkeypatch: pytest.MonkeyPatch
):
    """Whatever the plans said: rank 0 looks at what was written."""
    finish = DefaultSavePlanner.finish_plan

    def less(self: DefaultSavePlanner, plan: SavePlan) -> SavePlan:
        return finish(self, replace(plan, items=plan.items[1:]))

    with monkeypatch.context() as patched:
        patched.setattr(DefaultSavePlanner, "finish_plan", less)
        made.save(1, state(1))
    with pytest.raises(AsyncSaveError, match="was written by no rank"):
        made.finalize(blocking=True)
    assert made.latest() is None
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]


@pytest.mark.parametrize("begun", [False, True], ids=["before", "after"])
def test_interrupt_when_a_plan_is_handed_in_keeps_nobody_waiting(
    made: Checkpointer, barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch, begun: bool
):
    """A save is begun or refused, and never both: else the next one would be another rank's this one."""
    negotiator = made._planning._negotiator
    put = negotiator.put

    def interrupt(negotiation: planning.PlanNegotiation) -> None:
        if begun:
            put(negotiation)
        monkeypatch.setattr(negotiator, "put", put)
        raise KeyboardInterrupt

    monkeypatch.setattr(negotiator, "put", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.save(1, state(1))
    with pytest.raises(AsyncSaveError):
        made.finalize(blocking=True)
    made.close()
    votes = barrier.siblings["save/plan"].votes
    # The save has failed, and may be swept before it is planned.
    assert (votes[0] is None) == begun
    assert len(votes) <= (3 if begun else 1)


def test_a_second_interrupt_does_not_keep_a_save_from_counting(
    made: Checkpointer, monkeypatch: pytest.MonkeyPatch
):
    """Control and C are pressed twice, or the process gets two signals to end."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(DefaultSavePlanner, "create_local_plan", interrupt)
        patched.setattr(made._planning, "refuse", interrupt)
        with pytest.raises(KeyboardInterrupt):
            made.save(1, state(1))
    assert made._queue.next_idx == 1
    with pytest.raises(AsyncSaveError):
        made.finalize(blocking=True)


@pytest.mark.parametrize("error", [OSError("stale"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize(
    "where",
    ["_check_new", "create_local_plan", "AsyncRequest"],
    ids=["before its plan", "in its plan", "after its plan"],
)
def test_wherever_a_save_fails_it_counts_once(
    made: Checkpointer,
    barrier: FakeBarrier,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: BaseException,
):
    """Else this rank's next save is the other ranks' one before."""
    with monkeypatch.context() as patched:
        owner = next(one for one in (made, DefaultSavePlanner, module) if hasattr(one, where))
        patched.setattr(owner, where, raising(error))
        with pytest.raises(type(error)):
            made.save(1, state(1))
    assert made._queue.next_idx == 1
    with pytest.raises(AsyncSaveError):
        made.finalize(blocking=True)
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    made.close()
    plan = barrier.siblings["save/plan"]
    begun = [word == CHANGED for word in plan.said].count(True)
    refused = [why is not None for why in plan.votes].count(True)
    assert (begun, refused) == (1, 0 if where == "AsyncRequest" else 1), (
        "the second has the plan of the first"
    )


def test_checkpointer_can_be_made_again_after_a_failed_connection(
    tmp_path: Path, barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch
):
    sibling = barrier.sibling

    def fail(prefix: str) -> FakeBarrier:
        if prefix == "save/plan":
            raise ConnectError("nobody answers")
        return sibling(prefix)

    with monkeypatch.context() as patched:
        patched.setattr(barrier, "sibling", fail)
        with pytest.raises(ConnectError) as caught:
            Checkpointer(tmp_path, barrier=barrier)  # type: ignore[arg-type]
    assert caught.tb is not None, "who handles it holds what it has passed"
    Checkpointer(tmp_path, barrier=barrier).close()  # type: ignore[arg-type]


def test_save_after_an_interrupted_close_is_refused(made: Checkpointer, monkeypatch: pytest.MonkeyPatch):
    save_steps(made, 1)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(made._huge_pages, "saving", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made.close()
    with pytest.raises(MusterError, match=r"its close\(\) was interrupted"):
        made.save(2, state(2))
    made.close()


def test_close_by_a_handler_that_interrupts_a_save_ends(made: Checkpointer, monkeypatch: pytest.MonkeyPatch):
    begin = planning.Planning.begin

    def interrupted(*args: Any, **options: Any) -> planning.PlanNegotiation:
        monkeypatch.setattr(planning.Planning, "begin", begin)
        made.close()
        return begin(*args, **options)

    made.save(1, state(1))
    monkeypatch.setattr(planning.Planning, "begin", interrupted)
    with pytest.raises(MusterError, match="closed"):
        in_thread(lambda: made.save(2, state(2) | {"more": torch.ones(3)})).result(PATIENCE)
    newest = made.latest()
    assert newest is not None
    assert newest.step == 1
