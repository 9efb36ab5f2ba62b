"""A persistent worker: its requests, its end, its replacement, and its start in advance."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.patience import PATIENCE, until
from muster.worker import MusterError
from muster.worker.insight import saves as under_way
from muster.worker.saves import AsyncRequest, PersistentCaller
from muster.worker.saves.writers import callers
from muster.worker.saves.writers.child import wait_readable
from muster.worker.saves.writers.priority import Priority
from tests.support.expect import raising
from tests.support.saves.open_files import open_files
from tests.unit.worker.saves.writers.write_functions import fail, save_when


def test_no_request_waits_for_a_worker_that_is_busy(persistent: PersistentCaller, tmp_path: Path):
    """A pipe has room for 200 KiB."""
    gate = tmp_path / "gate"
    names = {f"layer-{number}": torch.full((2,), float(number)) for number in range(500)}
    text = "x" * 10_000_000
    writes = [
        persistent.start(AsyncRequest(save_when, (str(tmp_path / f"{save}"), [names, text], str(gate)), []))
        for save in range(3)
    ]
    gate.touch()
    assert [write.wait(PATIENCE).failure for write in writes] == [None] * 3
    saved = torch.load(tmp_path / "2")
    assert saved[1] == text
    assert saved[0]["layer-499"].tolist() == [499.0] * 2


def test_worker_refuses_more_requests_than_its_pipe_holds(tmp_path: Path):
    caller = PersistentCaller()
    first = caller.start(AsyncRequest(time.sleep, (0,), []))
    assert first.wait(PATIENCE).failure is None
    os.kill(first.pid, signal.SIGSTOP)
    writes = [caller.start(AsyncRequest(time.sleep, (0,), [])) for _ in range(callers.MAX_WAITING)]
    with pytest.raises(MusterError, match=rf"\(pid {first.pid}\) has {callers.MAX_WAITING} saves still to"):
        caller.start(AsyncRequest(time.sleep, (0,), []))
    os.kill(first.pid, signal.SIGCONT)
    assert [write.wait(PATIENCE).failure for write in writes] == [None] * callers.MAX_WAITING
    assert caller.start(AsyncRequest(time.sleep, (0,), [])).wait(PATIENCE).failure is None
    caller.close()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_names_of_one_tensor_stay_one_in_a_worker(persistent: PersistentCaller, tmp_path: Path):
    weight = torch.arange(4.0)
    (tmp_path / "gate").touch()
    state = [weight, weight[1:3], torch.nn.Parameter(torch.ones(2)), torch.empty(0), torch.eye(2).to_sparse()]
    request = AsyncRequest(save_when, (str(tmp_path / "saved"), state, str(tmp_path / "gate")), [])
    assert persistent.start(request).wait(PATIENCE).failure is None
    one, view, parameter, empty, sparse = torch.load(tmp_path / "saved", weights_only=False)
    one.fill_(7)
    assert view.tolist() == [7.0, 7.0]
    assert (parameter.tolist(), empty.tolist(), sparse.to_dense().tolist()) == ([1, 1], [], [[1, 0], [0, 1]])


def test_killed_worker_leaves_no_descriptors_of_unread_requests():
    caller = PersistentCaller()
    assert caller.start(AsyncRequest(time.sleep, (0,), [])).wait(PATIENCE).failure is None
    kinds = ("pipe:", "anon_inode:[pidfd]", "/memfd:")
    before = open_files(*kinds)
    first = caller.start(AsyncRequest(fail, ("hang",), []))
    writes = [caller.start(AsyncRequest(torch.numel, (torch.ones(9),), [])) for _ in range(5)]
    first.abort("given up")
    assert [write.wait(PATIENCE).failure for write in (first, *writes)] == ["given up"] * 6
    caller._buffers._free.clear()
    caller.close()
    del first, writes
    assert open_files(*kinds) <= before


def test_signals_to_the_group_do_not_end_a_starting_worker(monkeypatch: pytest.MonkeyPatch):
    blocked: list[set[int]] = []
    spawn = util.spawnv_passfds

    def watched(*given: Any) -> int:
        blocked.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        return spawn(*given)

    monkeypatch.setattr(util, "spawnv_passfds", watched)
    caller = PersistentCaller()
    assert caller.start(AsyncRequest(time.sleep, (0,), [])).wait(PATIENCE).failure is None
    caller.close()
    assert blocked[-1] == {signal.SIGTERM, signal.SIGHUP}
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_writes_that_a_dead_worker_had_not_answered_have_failed_when_it_is_replaced():
    caller = PersistentCaller()
    first = caller.start(AsyncRequest(fail, ("hang",), []))
    second = caller.start(AsyncRequest(time.sleep, (0,), []))
    handle = os.pidfd_open(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    assert wait_readable(handle, PATIENCE)
    os.close(handle)
    third = caller.start(AsyncRequest(time.sleep, (0,), []))
    assert third.pid != first.pid
    assert "killed by SIGKILL" in (first.wait(PATIENCE).failure or "")
    assert "killed by SIGKILL" in (second.wait(PATIENCE).failure or "")
    assert third.wait(PATIENCE).failure is None
    caller.close()


def test_a_worker_ends_though_a_forked_process_holds_its_pipe(persistent: PersistentCaller):
    assert persistent.start(AsyncRequest(time.sleep, (0,), [])).wait(PATIENCE).failure is None
    holder = os.fork()
    if holder == 0:
        signal.pause()
        os._exit(0)
    try:
        persistent.close()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def test_request_that_cannot_be_pickled_is_refused_and_its_buffers_are_returned(persistent: PersistentCaller):
    with pytest.raises(Exception, match="pickle"):
        persistent.start(AsyncRequest(lambda: None, (torch.ones(4),), []))
    assert persistent.start(AsyncRequest(time.sleep, (0,), [])).wait(PATIENCE).failure is None
    assert len(persistent._buffers._free) >= 1


def test_an_interrupt_when_the_worker_has_a_request_is_no_answer_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The next would be taken for written as soon as this one is."""
    caller = PersistentCaller()
    try:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(under_way, "begin", raising(KeyboardInterrupt))
            caller.start(AsyncRequest(time.sleep, (0,), []))
        assert caller.start(AsyncRequest(fail, ("raises",), [])).wait(PATIENCE).failure is not None
        assert (
            caller.start(AsyncRequest((tmp_path / "saved").write_text, ("it",), [])).wait(PATIENCE).failure
            is None
        )
    finally:
        caller.close()
    assert (tmp_path / "saved").read_text() == "it"


def test_an_answer_to_another_request_is_none(monkeypatch: pytest.MonkeyPatch):
    caller = PersistentCaller()
    try:
        caller.start(AsyncRequest(time.sleep, (0,), []))
        write = caller.start(AsyncRequest(time.sleep, (0,), []))
        assert write.wait(PATIENCE).failure == "it answered request 0 where 1 was waited for"
    finally:
        caller.close()


def leave_a_child_behind(pipe: str, pid: str) -> None:
    """It holds the worker's pipe, until the test lets go of its own."""
    if os.fork() == 0:
        Path(pid).write_text(str(os.getpid()))
        with Path(pipe).open("rb") as held:
            held.read()
        os._exit(0)
    until(lambda: Path(pid).exists() and Path(pid).read_text())
    os.kill(os.getpid(), signal.SIGKILL)


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not here",)


def test_a_workers_end_is_known_though_a_child_of_its_own_goes_on(
    persistent: PersistentCaller, tmp_path: Path
):
    pipe, pid = tmp_path / "pipe", tmp_path / "pid"
    os.mkfifo(pipe)
    holds = os.open(pipe, os.O_RDWR)
    try:
        write = persistent.start(AsyncRequest(leave_a_child_behind, (str(pipe), str(pid)), []))
        assert "killed by SIGKILL" in (write.wait(PATIENCE).failure or "")
        left = os.pidfd_open(int(pid.read_text()))
        assert not wait_readable(left, 0.0), "it goes on"
    finally:
        os.close(holds)
    assert wait_readable(left, PATIENCE)
    os.close(left)


def test_a_worker_says_what_it_cannot_read(persistent: PersistentCaller):
    write = persistent.start(AsyncRequest(partial(print, Unreadable()), (), []))
    assert "invalid literal for int()" in (write.wait(PATIENCE).failure or "")


def test_a_worker_that_is_stopped_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(callers, "ENDING_TIMEOUT", 0.2)
    caller = PersistentCaller()
    write = caller.start(AsyncRequest(time.sleep, (0,), []))
    assert write.wait(PATIENCE).failure is None
    os.kill(write.pid, signal.SIGSTOP)
    caller.close()


def write_niceness(path: str) -> None:
    Path(path).write_text(f"{os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)}")


def test_a_worker_takes_the_priority_that_it_is_given(tmp_path: Path):
    caller = PersistentCaller(Priority(cpu=19))
    write = caller.start(AsyncRequest(write_niceness, (str(tmp_path / "nice"),), []))
    assert write.wait(PATIENCE).failure is None
    assert (tmp_path / "nice").read_text() == f"{write.pid} 19"
    caller.close()


@pytest.fixture
def warm() -> Iterator[callers._Worker]:
    """A worker that was started before it is needed, of the weakest priority."""
    PersistentCaller.warm_up(Priority(cpu=19))
    worker = PersistentCaller._warm
    assert worker is not None
    yield worker
    PersistentCaller._warm = None
    worker.process.kill()
    worker.process.join()


def test_a_worker_that_was_started_before_is_taken_over(warm: callers._Worker, tmp_path: Path):
    PersistentCaller.warm_up(Priority(cpu=19))
    caller, other = PersistentCaller(Priority(cpu=19)), PersistentCaller()
    assert other.start(AsyncRequest(time.sleep, (0,), [])).pid != warm.pid, "it has another priority"
    write = caller.start(AsyncRequest(write_niceness, (str(tmp_path / "nice"),), []))
    assert write.pid == warm.pid
    assert write.wait(PATIENCE).failure is None
    assert (tmp_path / "nice").read_text() == f"{warm.pid} 19"
    assert PersistentCaller._warm is None
    caller.close()
    other.close()


def test_a_worker_that_died_before_it_was_needed_is_replaced(warm: callers._Worker):
    warm.process.kill()
    warm.process.join()
    PersistentCaller.warm_up(Priority(cpu=19))
    again = PersistentCaller._warm
    assert again is not None
    assert again.pid != warm.pid
    caller = PersistentCaller(Priority(cpu=19))
    assert caller.start(AsyncRequest(time.sleep, (0,), [])).pid == again.pid
    caller.close()


def test_a_forked_child_starts_a_worker_of_its_own(warm: callers._Worker, monkeypatch: pytest.MonkeyPatch):
    """Multiprocessing lets nobody but its parent ask after a process."""
    other = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: other)
    assert not warm.usable()
    started: list[Priority] = []
    monkeypatch.setattr(callers, "_Worker", started.append)
    PersistentCaller()._started()
    PersistentCaller.warm_up(Priority(cpu=3))
    assert started == [Priority(), Priority(cpu=3)]
