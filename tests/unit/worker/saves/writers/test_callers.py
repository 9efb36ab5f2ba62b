"""Writes aside: what is written is the state at the start, and how it ended is known."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.patience import PATIENCE, until
from muster.worker.errors import AsyncSaveError
from muster.worker.insight import saves as under_way
from muster.worker.saves import AsyncCallsQueue, AsyncRequest, ForkCaller
from muster.worker.saves.writers import forking, writer_process
from muster.worker.transport.fork_guard import HANDLERS
from tests.support.expect import raising
from tests.support.saves.child_processes import no_child_left, no_file_left, state_of
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.writers.write_functions import fail, save_when


@pytest.mark.parametrize(("value", "warns"), [(None, True), ("1", True), ("0", False)])
def test_a_process_with_grpcs_fork_handlers_is_told_before_it_forks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str | None, warns: bool
):
    if value is None:
        monkeypatch.delenv(HANDLERS, raising=False)
    else:
        monkeypatch.setenv(HANDLERS, value)
    ForkCaller()
    assert ("import muster.worker before grpc" in caplog.text) is warns


@pytest.mark.parametrize("shared", [False, True], ids=["own memory", "shared memory"])
def test_the_state_is_that_of_the_start(caller: Any, tmp_path: Path, shared: bool):
    tensor = torch.arange(100_000, dtype=torch.float32)
    state = {"list": [tensor], "tuple": (tensor[10:20],), "step": 7}
    if shared:
        tensor.share_memory_()
    path, gate = tmp_path / "saved.pt", tmp_path / "gate"
    write = caller.start(AsyncRequest(save_when, (str(path), state, str(gate)), []))
    tensor.fill_(-1)
    gate.touch()
    assert write.wait(PATIENCE).failure is None
    saved = torch.load(path)
    assert torch.equal(saved["list"][0], torch.arange(100_000, dtype=torch.float32))
    assert torch.equal(saved["tuple"][0], torch.arange(10, 20, dtype=torch.float32))
    assert saved["step"] == 7


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "OSError: [Errno 28] No space left on device"),
        ("exit", "exit status 5"),
        ("exit well", "exit status 0 before its function had returned"),
        ("kill", "killed by SIGKILL"),
    ],
)
def test_a_failure_is_known_and_the_next_write_is_well(caller: Any, how: str, said: str):
    failure = caller.start(AsyncRequest(fail, (how,), [])).wait(PATIENCE).failure
    assert said in failure
    assert caller.start(AsyncRequest(time.sleep, (0,), [])).wait(PATIENCE).failure is None


def terminate_and_write(path: str) -> None:
    """As torchrun stops a rank, whose process group has its writer, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    Path(path).write_text("saved")


def test_a_writer_survives_the_signals_to_its_process_group(caller: Any, tmp_path: Path):
    path = tmp_path / "saved"
    assert caller.start(AsyncRequest(terminate_and_write, (str(path),), [])).wait(PATIENCE).failure is None
    assert path.read_text() == "saved"


@contextmanager
def immortal(gate: Path) -> Iterator[None]:
    """SIGKILL ends nobody meanwhile, as if it waited for a file server; afterwards the gate is open."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(signal, "pidfd_send_signal", lambda *_: None)
        patched.setattr(writer_process, "KILL_GRACE", 0.05)
        yield
    gate.touch()


def wait_for(gate: str, began: str) -> None:
    """With a file open."""
    with Path(began).open("w"):
        until(Path(gate).exists)


def test_write_that_cannot_be_killed_fails_and_is_reaped_later(tmp_path: Path):
    gate, began = tmp_path / "gate", tmp_path / "began"
    with no_file_left(), no_child_left():
        with immortal(gate):
            write = ForkCaller().start(AsyncRequest(wait_for, (str(gate), str(began)), []))
            until(began.exists)
            failure = write.wait(0.01).failure or ""
            assert state_of(write.pid) is not None
            assert write.pid in under_way.under_way()
        until(lambda: write.pid not in under_way.under_way())
        until(lambda: all(not one.name.startswith("muster-reap") for one in threading.enumerate()))
    assert f"pid {write.pid}) had not ended after 0.01 s (its timeout), and was killed" in failure
    assert "has not ended 0.05 s after SIGKILL" in failure
    assert str(began) in failure


def test_abort_ends_the_wait_for_a_write_that_cannot_be_killed(caller: Any, tmp_path: Path):
    gate = tmp_path / "gate"
    with immortal(gate), ThreadPoolExecutor() as pool:
        write = caller.start(AsyncRequest(wait_for, (str(gate), str(tmp_path / "began")), []))
        ending = pool.submit(write.wait, PATIENCE)
        write.abort("given up")
        failure = ending.result().failure
        assert failure.startswith("given up; it has not ended 0.05 s after SIGKILL")
        caller.close()
        # Those are waited for when the program ends.
        assert write.pid not in {process.pid for process in active_children()}
    until(lambda: state_of(write.pid) is None)


@pytest.mark.parametrize("persistent", [False, True])
def test_queue_with_an_unkillable_writer_votes_and_closes(tmp_path: Path, persistent: bool):
    gate, barrier = tmp_path / "gate", FakeBarrier()
    queue = AsyncCallsQueue(persistent, barrier=barrier, timeout=0.2)  # type: ignore[arg-type]
    with immortal(gate):
        queue.schedule_async_request(AsyncRequest(wait_for, (str(gate), str(tmp_path / "began")), []))
        with pytest.raises(AsyncSaveError, match=r"has not ended 0\.05 s after SIGKILL"):
            queue.close()
    assert "has not ended" in (barrier.votes[0] or "")


@pytest.fixture
def _nobody_keeps_exit_statuses() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("_nobody_keeps_exit_statuses")
def test_a_program_that_ignores_sigchld_can_save(caller: Any):
    assert caller.start(AsyncRequest(time.sleep, (0,), [])).wait(PATIENCE).failure is None
    failure = caller.start(AsyncRequest(fail, ("raise",), [])).wait(PATIENCE).failure
    assert "OSError: [Errno 28] No space left on device" in failure
    failure = caller.start(AsyncRequest(fail, ("kill",), [])).wait(PATIENCE).failure
    assert "its exit status was taken by another part of this program" in failure


@pytest.mark.parametrize("how", ["well", "exit well"])
def test_child_that_was_reaped_elsewhere_is_judged_by_its_report(how: str):
    request = AsyncRequest(time.sleep, (0,), []) if how == "well" else AsyncRequest(fail, (how,), [])
    with no_file_left():
        write = ForkCaller().start(request)
        os.waitpid(write.pid, 0)
        failure = write.wait(PATIENCE).failure
    assert failure is None if how == "well" else "its exit status was taken" in (failure or "")


def test_child_that_was_reaped_at_once_is_judged_by_its_report(monkeypatch: pytest.MonkeyPatch):
    let_write = forking.Child.let_write

    def reaped(forked: forking.Child) -> None:
        let_write(forked)
        os.waitpid(forked.process.pid, 0)

    monkeypatch.setattr(forking.Child, "let_write", reaped)
    with no_file_left():
        assert ForkCaller().start(AsyncRequest(time.sleep, (0,), [])).wait(PATIENCE).failure is None


def test_a_childs_traceback_comes_along():
    failure = ForkCaller().start(AsyncRequest(fail, ("raise",), [])).wait(PATIENCE).failure
    assert failure is not None
    assert "exit status 1: OSError" in failure
    assert 'raise OSError(28, "No space left on device")' in failure


def test_a_write_that_hangs_is_ended(caller: Any):
    write = caller.start(AsyncRequest(fail, ("hang",), []))
    failure = write.wait(0.2).failure
    assert (
        failure
        == f"the writing process (pid {write.pid}) had not ended after 0.2 s (its timeout), and was killed"
    )


def test_write_may_take_for_ever(caller: Any):
    """``poll`` takes 24 days at most."""
    assert caller.start(AsyncRequest(time.sleep, (0,), [])).wait(1e12).failure is None


def test_a_write_that_is_given_up_says_why(caller: Any):
    write = caller.start(AsyncRequest(fail, ("hang",), []))
    write.abort("given up")
    write.abort("given up")
    assert write.wait(PATIENCE).failure == "given up"


def test_no_child_is_left():
    with no_child_left():
        for how in ("raise", "exit", "kill", "hang"):
            ForkCaller().start(AsyncRequest(fail, (how,), [])).wait(0.2)


def test_no_file_descriptor_is_left():
    with no_file_left():
        ForkCaller().start(AsyncRequest(fail, ("exit",), [])).wait(PATIENCE)


def test_a_write_that_has_ended_kills_nobody_else(monkeypatch: pytest.MonkeyPatch):
    """Its handle's number may be another process's by now."""
    write = ForkCaller().start(AsyncRequest(time.sleep, (0,), []))
    assert write.wait(PATIENCE).failure is None
    killed: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda handle, _: killed.append(handle))
    write.abort("too late")
    assert killed == []


def test_a_child_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch):
    with no_file_left(), no_child_left(), monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", raising(OSError, 24, "Too many open files"))
        with pytest.raises(OSError, match="Too many"):
            ForkCaller().start(AsyncRequest(signal.pause, (), []))


def test_an_interrupt_at_the_fork_does_not_reach_the_training_program(monkeypatch: pytest.MonkeyPatch):
    """A terminal sends it to the child too, which has the parent's handler still."""
    fork = os.fork
    program = os.getpid()

    def fork_and_interrupt() -> int:
        pid = fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", fork_and_interrupt)
    try:
        failure = ForkCaller().start(AsyncRequest(time.sleep, (0,), [])).wait(PATIENCE).failure
    finally:
        if os.getpid() != program:
            os._exit(3)
    assert failure == "the writing process was killed by SIGINT"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_interrupt_right_after_the_fork_leaves_no_child(monkeypatch: pytest.MonkeyPatch):
    fork = os.fork

    def interrupted() -> int:
        if pid := fork():
            raise KeyboardInterrupt
        return pid

    monkeypatch.setattr(os, "fork", interrupted)
    with no_file_left(), no_child_left(), pytest.raises(KeyboardInterrupt):
        ForkCaller().start(AsyncRequest(signal.pause, (), []))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_interrupt_when_the_child_is_left_alone_with_its_end_of_the_pipe_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
):
    close, program = os.close, os.getpid()

    def interrupted(number: int) -> None:
        close(number)
        if os.getpid() == program:
            monkeypatch.undo()
            raise KeyboardInterrupt

    def fork() -> int:
        pid = theirs()
        monkeypatch.setattr(os, "close", interrupted)
        return pid

    theirs = os.fork
    monkeypatch.setattr(os, "fork", fork)
    with no_file_left(), no_child_left(), pytest.raises(KeyboardInterrupt):
        ForkCaller().start(AsyncRequest(signal.pause, (), []))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_closed_stdout_fails_nothing(monkeypatch: pytest.MonkeyPatch):
    with Path(os.devnull).open("w") as closed:
        pass
    monkeypatch.setattr(sys, "stdout", closed)
    assert ForkCaller().start(AsyncRequest(time.sleep, (0,), [])).wait(PATIENCE).failure is None
