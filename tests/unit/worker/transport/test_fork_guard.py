"""Which process speaks gRPC, as its forked children see it."""

import gc
import os
import threading
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from muster.worker.errors import MusterError
from muster.worker.transport import fork_guard
from muster.worker.transport.fork_guard import GrpcUsage, check, start_thread

look = fork_guard._grpc_runs


@pytest.fixture(autouse=True)
def grpc_runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the guard sees of gRPC's threads, look by look; the last is what it sees from then on."""
    seen = [False]
    monkeypatch.setattr(fork_guard, "_usages", [])
    monkeypatch.setattr(fork_guard, "_last", None)
    monkeypatch.setattr(fork_guard, "_ending", [])
    monkeypatch.setattr(fork_guard, "_in_vain", False)
    monkeypatch.setattr(fork_guard, "_grpc_runs", lambda: seen.pop(0) if len(seen) > 1 else seen[0])
    monkeypatch.setattr(fork_guard, "PATIENCE", 60.0)
    return seen


def fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as the child."""
    fork_guard._await_end()
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)


def test_process_may_register_several_usages():
    with GrpcUsage("a store"), GrpcUsage("a store"), GrpcUsage("a session"):
        check()
    assert fork_guard._usages == []


def test_child_gets_an_error_that_names_the_parents_usage(monkeypatch: pytest.MonkeyPatch):
    parent = os.getpid()
    first, second = GrpcUsage("a node's place"), GrpcUsage("a store")
    first.end()
    first.end()
    fork(monkeypatch)
    with pytest.raises(MusterError, match=f"forked from process {parent}, which holds a store"):
        GrpcUsage("a session")
    second.end()
    with pytest.raises(MusterError, match="which holds a store"):
        check()


def test_child_may_use_grpc_when_its_parent_has_ended_all_usage(monkeypatch: pytest.MonkeyPatch):
    GrpcUsage("a store").end()
    fork(monkeypatch)
    held = GrpcUsage("a store")
    fork(monkeypatch)
    with pytest.raises(MusterError, match="which holds a store"):
        check()
    assert held.what == "a store"


def test_fork_waits_until_grpc_has_ended(monkeypatch: pytest.MonkeyPatch, grpc_runs: list[bool]):
    grpc_runs[:] = [True, True, False]
    GrpcUsage("a store").end()
    fork(monkeypatch)
    check()
    assert grpc_runs == [False]


def test_child_gets_an_error_if_grpc_does_not_end(monkeypatch: pytest.MonkeyPatch, grpc_runs: list[bool]):
    """Others of the process may use it as well."""
    grpc_runs[:] = [True]
    monkeypatch.setattr(fork_guard, "PATIENCE", 0.0)
    GrpcUsage("a store").end()
    fork(monkeypatch)
    with pytest.raises(MusterError, match="which holds open channels of gRPC"):
        check()


def test_only_the_first_fork_waits_for_grpc_that_others_use(
    monkeypatch: pytest.MonkeyPatch, grpc_runs: list[bool]
):
    monkeypatch.setattr(fork_guard, "PATIENCE", 0.0)
    grpc_runs[:] = [True]
    GrpcUsage("a store").end()
    fork_guard._await_end()
    monkeypatch.setattr(fork_guard, "PATIENCE", 60.0)
    GrpcUsage("another store").end()
    fork_guard._await_end()
    grpc_runs[:] = [False]
    fork(monkeypatch)
    check()
    assert not fork_guard._in_vain


def test_garbage_is_collected_after_the_last_usage_not_before_a_fork(
    monkeypatch: pytest.MonkeyPatch, grpc_runs: list[bool]
):
    collected: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    first, second = GrpcUsage("a session"), GrpcUsage("a session")
    grpc_runs[:] = [True]
    first.end()
    fork_guard.collect()
    assert collected == []
    second.end()
    fork_guard.collect()
    assert collected == [True]
    grpc_runs[:] = [True, False]
    fork(monkeypatch)
    assert collected == [True]


def test_fork_of_a_process_without_grpc_checks_no_threads(
    monkeypatch: pytest.MonkeyPatch, grpc_runs: list[bool]
):
    grpc_runs[:] = [True, False]
    fork(monkeypatch)
    check()
    assert grpc_runs == [True, False]


def test_thread_registers_its_usage_while_it_runs():
    held: list[str] = []
    thread = start_thread("a session", "speaks", lambda: held.extend(one.what for one in fork_guard._usages))
    thread.join(PATIENCE)
    assert (thread.name, held, fork_guard._usages) == ("speaks", ["a session"], [])


def test_fork_waits_for_thread_that_was_told_to_end(monkeypatch: pytest.MonkeyPatch):
    forks = threading.Event()

    def end() -> None:
        forks.wait(PATIENCE)

    thread = start_thread("a node's place", "ends", end)
    fork_guard.await_before_fork(thread)
    join = thread.join

    def joined(seconds: float | None = None) -> None:
        forks.set()
        join(seconds)

    monkeypatch.setattr(thread, "join", joined)
    fork(monkeypatch)
    check()
    assert not thread.is_alive()


def test_fork_waits_once_and_for_a_while_for_thread_that_does_not_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fork_guard, "PATIENCE", 0.0)
    over = threading.Event()

    def go_on() -> None:
        over.wait(PATIENCE)

    thread = start_thread("a node's place", "goes on", go_on)
    fork_guard.await_before_fork(thread)
    fork_guard._await_end()
    assert fork_guard._ending == []
    fork(monkeypatch)
    with pytest.raises(MusterError, match="which holds a node's place"):
        check()
    over.set()
    thread.join(PATIENCE)


def test_thread_that_cannot_start_leaves_no_usage(monkeypatch: pytest.MonkeyPatch):
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread("a session", "speaks", check)
    assert fork_guard._usages == []


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        (["python", "pt_main_thread"], False),
        (["python", "event_engine"], True),
        (["python", "grpc_global_tim"], True),
    ],
)
def test_grpc_is_recognized_by_its_threads_names(tmp_path: Path, names: list[str], runs: bool):
    for number, name in enumerate(names):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "comm").write_text(f"{name}\n")
    (tmp_path / "ended").mkdir()
    assert look(tmp_path) is runs


def test_grpc_is_assumed_to_run_if_threads_cannot_be_listed(tmp_path: Path):
    assert look(tmp_path / "no proc")
