"""Which process speaks gRPC, as its forked children see it."""

import gc
import os
import threading
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from muster.worker.errors import MusterError
from muster.worker.transport import fork_guard
from muster.worker.transport.fork_guard import Claim, check, start_thread

look = fork_guard._grpc_runs


@pytest.fixture(autouse=True)
def grpc_runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the guard sees of gRPC's threads, look by look; the last is what it sees from then on."""
    seen = [False]
    monkeypatch.setattr(fork_guard, "_claims", [])
    monkeypatch.setattr(fork_guard, "_last", None)
    monkeypatch.setattr(fork_guard, "_ending", [])
    monkeypatch.setattr(fork_guard, "_in_vain", False)
    monkeypatch.setattr(fork_guard, "_grpc_runs", lambda: seen.pop(0) if len(seen) > 1 else seen[0])
    monkeypatch.setattr(fork_guard, "PATIENCE", 60.0)
    return seen


def fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as the child."""
    fork_guard._settle()
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)


def test_a_process_may_claim_as_often_as_it_speaks():
    with Claim("a store"), Claim("a store"), Claim("a session"):
        check()
    assert fork_guard._claims == []


def test_a_child_is_told_what_its_parent_holds(monkeypatch: pytest.MonkeyPatch):
    parent = os.getpid()
    first, second = Claim("a node's place"), Claim("a store")
    first.give_back()
    first.give_back()
    fork(monkeypatch)
    with pytest.raises(MusterError, match=f"forked from process {parent}, which holds a store"):
        Claim("a session")
    second.give_back()
    with pytest.raises(MusterError, match="which holds a store"):
        check()


def test_a_child_may_speak_when_all_was_given_back(monkeypatch: pytest.MonkeyPatch):
    Claim("a store").give_back()
    fork(monkeypatch)
    held = Claim("a store")
    fork(monkeypatch)
    with pytest.raises(MusterError, match="which holds a store"):
        check()
    assert held.what == "a store"


def test_a_fork_waits_until_grpc_has_ended(monkeypatch: pytest.MonkeyPatch, grpc_runs: list[bool]):
    grpc_runs[:] = [True, True, False]
    Claim("a store").give_back()
    fork(monkeypatch)
    check()
    assert grpc_runs == [False]


def test_a_child_is_told_when_grpc_does_not_end(monkeypatch: pytest.MonkeyPatch, grpc_runs: list[bool]):
    """Others of the process may use it as well."""
    grpc_runs[:] = [True]
    monkeypatch.setattr(fork_guard, "PATIENCE", 0.0)
    Claim("a store").give_back()
    fork(monkeypatch)
    with pytest.raises(MusterError, match="which holds open channels of gRPC"):
        check()


def test_only_the_first_fork_waits_for_grpc_that_others_use(
    monkeypatch: pytest.MonkeyPatch, grpc_runs: list[bool]
):
    monkeypatch.setattr(fork_guard, "PATIENCE", 0.0)
    grpc_runs[:] = [True]
    Claim("a store").give_back()
    fork_guard._settle()
    monkeypatch.setattr(fork_guard, "PATIENCE", 60.0)
    Claim("another store").give_back()
    fork_guard._settle()
    grpc_runs[:] = [False]
    fork(monkeypatch)
    check()
    assert not fork_guard._in_vain


def test_garbage_is_collected_when_the_last_is_given_back_and_never_before_a_fork(
    monkeypatch: pytest.MonkeyPatch, grpc_runs: list[bool]
):
    collected: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    first, second = Claim("a session"), Claim("a session")
    grpc_runs[:] = [True]
    first.give_back()
    fork_guard.collect()
    assert collected == []
    second.give_back()
    fork_guard.collect()
    assert collected == [True]
    grpc_runs[:] = [True, False]
    fork(monkeypatch)
    assert collected == [True]


def test_a_fork_of_a_process_that_never_spoke_looks_at_nothing(
    monkeypatch: pytest.MonkeyPatch, grpc_runs: list[bool]
):
    grpc_runs[:] = [True, False]
    fork(monkeypatch)
    check()
    assert grpc_runs == [True, False]


def test_a_thread_holds_its_claim_while_it_runs():
    held: list[str] = []
    thread = start_thread("a session", "speaks", lambda: held.extend(one.what for one in fork_guard._claims))
    thread.join(PATIENCE)
    assert (thread.name, held, fork_guard._claims) == ("speaks", ["a session"], [])


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
    fork_guard._settle()
    assert fork_guard._ending == []
    fork(monkeypatch)
    with pytest.raises(MusterError, match="which holds a node's place"):
        check()
    over.set()
    thread.join(PATIENCE)


def test_a_thread_that_cannot_start_holds_nothing(monkeypatch: pytest.MonkeyPatch):
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread("a session", "speaks", check)
    assert fork_guard._claims == []


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        (["python", "pt_main_thread"], False),
        (["python", "event_engine"], True),
        (["python", "grpc_global_tim"], True),
    ],
)
def test_grpc_is_known_by_the_names_of_its_threads(tmp_path: Path, names: list[str], runs: bool):
    for number, name in enumerate(names):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "comm").write_text(f"{name}\n")
    (tmp_path / "ended").mkdir()
    assert look(tmp_path) is runs


def test_where_threads_cannot_be_seen_grpc_is_taken_to_run(tmp_path: Path):
    assert look(tmp_path / "no proc")
