"""A child that was born with someone else's lock is found out, and another one takes its place."""

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lab.patience import PATIENCE, until
from muster.worker import MusterError
from muster.worker.saves import AsyncRequest, ForkCaller
from muster.worker.saves.writers import forking
from muster.worker.saves.writers.callers import ForkedWrite
from tests.support.expect import raising
from tests.support.saves.child_processes import no_child_left, no_file_left, state_of

Born = Callable[[int], list[int]]


@pytest.fixture
def stillborn(monkeypatch: pytest.MonkeyPatch) -> Born:
    """Lets the next children hang before any code of theirs runs; tells the children that were forked."""
    fork = os.fork

    def let(count: int) -> list[int]:
        born: list[int] = []

        def fork_and_hang() -> int:
            hangs = len(born) < count
            pid = fork()
            if pid == 0 and hangs:
                while True:
                    signal.pause()
            born.append(pid)
            return pid

        monkeypatch.setattr(os, "fork", fork_and_hang)
        return born

    return let


def test_another_child_writes_the_same(
    stillborn: Born, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(forking, "SIGN_TIMEOUTS", (0.1, PATIENCE))
    born = stillborn(1)
    with no_file_left(), no_child_left():
        write = ForkCaller().start(AsyncRequest((tmp_path / "saved").write_text, ("the state",), []))
        assert write.wait(PATIENCE).failure is None
    assert (tmp_path / "saved").read_text() == "the state"
    assert len(born) == 2
    assert write.pid == born[1]
    assert f"the writing process (pid {born[0]}) did not begin within 0.1 s of its fork" in caplog.text


def test_when_none_begins_the_save_fails_and_says_what_to_do(
    stillborn: Born, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(forking, "SIGN_TIMEOUTS", (0.01, 0.01, 0.01))
    born = stillborn(3)
    with (
        no_file_left(),
        no_child_left(),
        pytest.raises(MusterError, match=r"3 writing processes .* persistent=True"),
    ):
        ForkCaller().start(AsyncRequest(time.sleep, (0,), []))
    assert len(born) == 3


def test_a_child_that_is_killed_at_once_is_not_taken_for_one_that_hangs(
    stillborn: Born, monkeypatch: pytest.MonkeyPatch
):
    born = stillborn(0)
    fork = os.fork

    def fork_and_kill() -> int:
        pid = fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return pid

    monkeypatch.setattr(os, "fork", fork_and_kill)
    failure = ForkCaller().start(AsyncRequest(time.sleep, (0,), [])).wait(PATIENCE).failure
    assert failure is not None
    assert "killed by SIGKILL" in failure
    assert len(born) == 1


def test_the_child_lives_while_copies_go_on_and_writes_when_they_have_ended(tmp_path: Path):
    shared = torch.zeros(3).share_memory_()
    saved = tmp_path / "saved"

    def copied() -> None:
        shared.fill_(7)

    def write() -> None:
        saved.write_text(str(shared.tolist()))

    with no_file_left(), no_child_left():
        forked = forking.fork(write, copied)
        assert ForkedWrite(forked, 0, 0, AsyncRequest(None, (), [])).wait(PATIENCE).failure is None
    assert saved.read_text() == "[7.0, 7.0, 7.0]"


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), KeyboardInterrupt()])
def test_if_a_copy_fails_the_child_ends_and_writes_nothing(tmp_path: Path, error: BaseException):
    saved = tmp_path / "saved"
    with no_file_left(), no_child_left(), pytest.raises(type(error)):
        ForkCaller().start(AsyncRequest(saved.write_text, ("the state",), []), raising(error))
    assert not saved.exists()


def test_a_child_of_a_parent_that_gives_the_save_up_ends_by_itself(tmp_path: Path):
    """As after an interrupt at a moment when nobody has the child yet."""
    saved = tmp_path / "saved"
    with no_file_left(), no_child_left():
        forked = forking._begin(lambda: saved.touch())
        forked.close()
        os.waitpid(forked.process.pid, 0)
    assert not saved.exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGWINCH])
def test_a_signal_to_a_child_that_waits_changes_nothing(tmp_path: Path, number: signal.Signals):
    """A signal to the process group, for which the training program has a handler."""
    before = signal.signal(number, lambda *_: None)
    born: list[int] = []
    fork = forking._fork

    def copied() -> None:
        os.kill(born[0], number)
        until(lambda: state_of(born[0]) == "S")

    def forked() -> int:
        born.append(fork())
        return born[0]

    try:
        with no_file_left(), no_child_left(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(forking, "_fork", forked)
            write = ForkCaller().start(AsyncRequest((tmp_path / "saved").write_text, ("it",), []), copied)
            assert write.wait(PATIENCE).failure is None
    finally:
        signal.signal(number, before)
    assert (tmp_path / "saved").read_text() == "it"


@pytest.mark.parametrize(("pid", "collects"), [(7, True), (0, False), (None, True)])
def test_a_child_collects_no_garbage_from_its_first_moment_on(
    monkeypatch: pytest.MonkeyPatch, pid: int | None, collects: bool
):
    """It would run the finalizers of the parent's objects. Its parent goes on as before."""
    seen = []

    def fork() -> int:
        seen.append(gc.isenabled())
        if pid is None:
            raise OSError("no more processes")
        return pid

    monkeypatch.setattr(os, "fork", fork)
    assert gc.isenabled()
    try:
        with contextlib.suppress(OSError):
            assert forking._fork() == pid
        assert seen == [False]
        assert gc.isenabled() is collects
        seen.clear()
        gc.disable()
        with contextlib.suppress(OSError):
            forking._fork()
        assert not gc.isenabled(), "nor is it turned on for who had turned it off"
    finally:
        gc.enable()
