"""What a forked child is, seen from inside: it writes down what it finds."""

import gc
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.patience import PATIENCE, until
from lab.processes import fork_client
from muster.worker.saves import AsyncRequest, ForkCaller
from muster.worker.saves.failure import MAX_TEXT
from muster.worker.saves.writers import child
from muster.worker.saves.writers.child import wait_readable
from tests.support.expect import raising
from tests.support.saves.child_processes import state_of


def seen_by_a_child(look: Callable[[], Any], folder: Path) -> Any:
    """What a function returns in a child."""

    def write() -> None:
        (folder / "seen").write_text(json.dumps(look()))

    assert ForkCaller().start(AsyncRequest(write, (), [])).wait(PATIENCE).failure is None
    return json.loads((folder / "seen").read_text())


def _is_same(number: int, was: os.stat_result) -> bool:
    """Whether a file descriptor is what it was; a number that was closed may have been given again."""
    try:
        return os.path.samestat(os.fstat(number), was)
    except OSError:
        return False


def test_it_has_none_of_its_parents_sockets(tmp_path: Path):
    ours, theirs = socket.socketpair()
    kept = (tmp_path / "a file").open("w")
    with ours, theirs, kept:
        numbers = (ours.fileno(), theirs.fileno(), kept.fileno())
        were = [os.fstat(number) for number in numbers]
        look = lambda: [_is_same(*one) for one in zip(numbers, were, strict=True)]  # noqa: E731
        assert seen_by_a_child(look, tmp_path) == [False, False, True]
        assert look() == [True] * 3
        nothing = Path(os.devnull).stat()
        look = lambda: [_is_same(number, nothing) for number in numbers]  # noqa: E731
        assert seen_by_a_child(look, tmp_path) == [True, True, False], "their numbers are nobody else's"


def test_it_ignores_the_signals_of_torchrun_to_the_process_group(tmp_path: Path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    defaults = [signal.SIG_DFL, signal.SIG_IGN, signal.SIG_IGN]
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        look = lambda: [signal.getsignal(n) for n in numbers]  # noqa: E731
        assert seen_by_a_child(look, tmp_path) == defaults
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_it_collects_no_garbage_and_has_one_thread_for_tensors(tmp_path: Path):
    assert gc.isenabled()
    assert seen_by_a_child(lambda: [gc.isenabled(), torch.get_num_threads()], tmp_path) == [False, 1]
    assert gc.isenabled()


def test_it_runs_no_exit_handlers(tmp_path: Path):
    script = """
import atexit
from pathlib import Path
from muster.worker.saves import AsyncRequest, ForkCaller
atexit.register(lambda: print("exit"))
print("begin", end=" ")
assert ForkCaller().start(AsyncRequest(lambda: print("child", end=" "), (), [])).wait(30).failure is None
"""
    done = fork_client.run([sys.executable, "-c", script], timeout=PATIENCE)
    assert (done.stdout, done.returncode) == ("begin child exit\n", 0), done.stderr


@pytest.mark.parametrize("caller", ["ForkCaller", "PersistentCaller"])
def test_it_dies_with_its_parent(caller: str, tmp_path: Path):
    script = f"""
import os, signal, threading
from muster.worker.saves import AsyncRequest, {caller}
if __name__ == "__main__":
    write = {caller}().start(AsyncRequest(signal.pause, (), []))
    print(write.pid, flush=True)
    signal.pause()
"""
    (tmp_path / "parent.py").write_text(script)
    parent = fork_client.popen(
        [sys.executable, str(tmp_path / "parent.py")], spawns=True, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        born = int(parent.stdout.readline())
        handle = os.pidfd_open(born)
        parent.kill()
    try:
        assert wait_readable(handle, PATIENCE)
    finally:
        os.close(handle)


class Stuck(io.StringIO):
    """A stream with a lock of its own, which in a child nobody gives back.

    Args:
        sign: the file that it makes when it waits for the lock.
    """

    def __init__(self, sign: Path) -> None:
        super().__init__()
        self._parent = os.getpid()
        self._sign = sign

    def flush(self) -> None:
        """Wait for ever, in a child."""
        if os.getpid() != self._parent:
            self._sign.touch()
            threading.Event().wait()


def test_a_child_that_cannot_print_has_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(child, "PRINT_TIMEOUT", 0.05)
    monkeypatch.setattr(sys, "stdout", Stuck(tmp_path / "sign"))
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGALRM,))
    try:
        write = ForkCaller().start(AsyncRequest((tmp_path / "saved").write_text, ("the state",), []))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM,))
        signal.signal(signal.SIGALRM, before)
    assert write.wait(PATIENCE).failure is None
    assert (tmp_path / "sign").exists()
    assert "a save was written; then the writing process was killed by SIGALRM" in caplog.text


def test_a_save_that_was_ended_has_failed_also_if_all_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdout", Stuck(tmp_path / "sign"))
    write = ForkCaller().start(AsyncRequest(lambda: None, (), []))
    until((tmp_path / "sign").exists)
    write.abort("the job has ended")
    assert write.wait(PATIENCE).failure == "the job has ended"


def test_a_large_error_text_comes_whole_as_far_as_a_vote_takes_it():
    failure = (
        ForkCaller()
        .start(AsyncRequest(raising(ValueError, "x" * 10_000_000 + "the end"), (), []))
        .wait(PATIENCE)
        .failure
    )
    assert failure is not None
    assert failure.rstrip().endswith("the end")
    assert MAX_TEXT < len(failure) < MAX_TEXT + 200


def test_a_process_that_a_child_leaves_behind_does_not_hold_its_end_up(tmp_path: Path):
    def write() -> None:
        if os.fork() == 0:
            (tmp_path / "pid").write_text(str(os.getpid()))
            (tmp_path / "pid").rename(tmp_path / "there")
            signal.pause()
        while not (tmp_path / "there").exists():
            time.sleep(0.005)
        os._exit(3)

    ending = ForkCaller().start(AsyncRequest(write, (), [])).wait(PATIENCE)
    left = int((tmp_path / "there").read_text())
    assert state_of(left) is not None
    os.kill(left, signal.SIGKILL)
    assert ending.failure == "the writing process ended with exit status 3"


def test_file_descriptors_may_have_high_numbers():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 4096, "this user may not open so many files"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert ForkCaller().start(AsyncRequest(lambda: None, (), [])).wait(PATIENCE).failure is None
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
