"""The same scenarios on torch's ``tcp_store`` barrier and on ours: theirs goes wrong, ours does not.

Each scenario is one function over a "rank", run once for each implementation. Ranks are threads here:
torch's client and ours both let go of the interpreter while they wait.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch.distributed as dist
import torch.distributed.elastic.utils.store as store_util
from torch.distributed import DistStoreError
from torch.distributed.checkpoint._experimental.barriers import TCPStoreBarrier

from lab.processes.coordinator import Coordinator, free_port
from muster.worker import BarrierError, GrpcBarrier
from muster.worker.groups.group import Shape
from muster.worker.session.session import Session, SessionConfig
from tests.support.expect import of_kind

pytestmark = [
    pytest.mark.also_through_relay,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


class Meets(Protocol):
    """One rank's barrier."""

    def __call__(self, timeout: float) -> None: ...


World = Callable[[int, int, str], Meets]
"""(rank, world size, prefix) -> the rank's barrier."""


@contextmanager
def torch_world() -> Iterator[World]:
    """torch's store barrier, as its checkpointers call it, on one TCPStore."""
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    sequences: dict[tuple[int, str], int] = {}

    def rank_of(rank: int, world_size: int, prefix: str) -> Meets:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

        def meet(timeout: float) -> None:
            sequence = sequences.setdefault((rank, prefix), 0)
            store_util.barrier(store, world_size, f"{prefix}{sequence}", barrier_timeout=timeout)
            # As in TCPStoreBarrier: the number rises only when the barrier was passed.
            sequences[rank, prefix] = sequence + 1

        return meet

    yield rank_of
    del server


@pytest.fixture
def muster_world(coordinator: Coordinator) -> World:
    def rank_of(rank: int, world_size: int, prefix: str) -> Meets:
        barrier = GrpcBarrier(rank, world_size, prefix, coordinator.endpoint, 20, 20, run_id="diff")
        return lambda timeout: barrier.execute_barrier(timeout)

    return rank_of


def passed(meet: Meets, timeout: float) -> bool:
    """Whether the rank was let through."""
    try:
        meet(timeout)
    except DistStoreError:
        return False
    return True


def together(*calls: Callable[[], bool]) -> list[bool]:
    """Run calls at the same time."""
    results = [False] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ---------------------------------------------------------------------- the scenarios


def retry_after_a_timeout(world: World) -> list[bool]:
    """Rank 0 of 2 times out and tries again; rank 1 never comes."""
    meet = world(0, 2, "retry")
    return [passed(meet, 0.5), passed(meet, 0.5)]


def latecomer_after_a_timeout(world: World) -> list[bool]:
    """Rank 0 of 2 times out; then rank 1 comes."""
    early, late = world(0, 2, "late"), world(1, 2, "late")
    return [passed(early, 0.5), passed(late, 0.5)]


def prefixes_that_run_together(world: World) -> list[bool]:
    """ "a" at its 12th barrier and "a1" at its second, one rank of two each: neither may pass."""
    both = [world(rank, 2, "a") for rank in (0, 1)]
    for _ in range(11):
        assert all(together(*(lambda meet=meet: passed(meet, 5.0) for meet in both)))
    others = [world(rank, 2, "a1") for rank in (0, 1)]
    assert all(together(*(lambda meet=meet: passed(meet, 5.0) for meet in others)))
    return together(lambda: passed(both[0], 1.0), lambda: passed(others[1], 1.0))


def test_a_retry_after_a_timeout_releases_theirs_falsely_and_not_ours(muster_world: World):
    with torch_world() as theirs:
        assert retry_after_a_timeout(theirs) == [False, True], "rank 1 was never there"
    assert retry_after_a_timeout(muster_world) == [False, False]


def test_a_latecomer_passes_theirs_that_the_waiter_saw_fail_and_not_ours(muster_world: World):
    with torch_world() as theirs:
        assert latecomer_after_a_timeout(theirs) == [False, True], "one barrier, two outcomes"
    assert latecomer_after_a_timeout(muster_world) == [False, False]


def test_prefixes_run_together_in_theirs_and_not_in_ours(muster_world: World):
    with torch_world() as theirs:
        assert prefixes_that_run_together(theirs) == [True, True], '"a" + "11" is "a1" + "1"'
    assert prefixes_that_run_together(muster_world) == [False, False]


# ---------------------------------------------------------------------- timeouts


def test_torch_ignores_the_timeout_that_it_is_given(monkeypatch: pytest.MonkeyPatch):
    used: list[float] = []
    monkeypatch.setattr(store_util, "barrier", lambda **given: used.append(given.get("barrier_timeout", 300)))
    barrier = TCPStoreBarrier(0, 1, "p", 5, True, free_port(), "127.0.0.1", timeout_secs=7)
    barrier.execute_barrier()
    assert used == [300]


def test_ours_honours_the_timeout_that_it_is_given(coordinator: Coordinator):
    barrier = GrpcBarrier(0, 2, "p", coordinator.endpoint, 20, timeout_secs=1)
    with pytest.raises(DistStoreError, match=r"timed out after 1 s .*timeout"):
        barrier.execute_barrier()


def test_timeout_is_per_call_where_torchs_store_leaks_it(
    coordinator: Coordinator,
):
    store: Any = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    before = store.timeout
    with pytest.raises(DistStoreError):
        store_util.barrier(store, 2, "leak", barrier_timeout=0.2)
    assert store.timeout == timedelta(seconds=0.2) != before
    barrier = GrpcBarrier(0, 2, "leak", coordinator.endpoint, 20, timeout_secs=2)
    with pytest.raises(DistStoreError, match="timed out after 1 s"):
        barrier.execute_barrier(timeout_secs=1)
    with pytest.raises(DistStoreError, match="timed out after 2 s"):
        barrier.execute_barrier()


# ---------------------------------------------------------------------- who is missing


def torch_reports(world_size: int, present: list[int]) -> dict[int, str]:
    """What torch tells each present rank about the missing, with its tracing turned on."""
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    said: dict[int, str] = {}

    def run(rank: int) -> bool:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        try:
            store_util.barrier(store, world_size, "who", 2, rank=rank, trace_timeout=0.3)
        except DistStoreError as error:
            said[rank] = str(error)
        return True

    together(*(lambda rank=rank: run(rank) for rank in present))
    del server
    return said


def muster_reports(coordinator: Coordinator, world_size: int, present: list[int]) -> dict[int, list[int]]:
    """The missing ranks that each present rank is told."""
    reported: dict[int, list[int]] = {}
    barriers = {
        rank: GrpcBarrier(rank, world_size, "who", coordinator.endpoint, 20, 1, run_id="who")
        for rank in present
    }

    def run(rank: int) -> bool:
        try:
            barriers[rank].execute_barrier()
        except DistStoreError as error:
            reported[rank] = [one.rank for one in of_kind(BarrierError, error).missing]
        return True

    together(*(lambda rank=rank: run(rank) for rank in present))
    return reported


def test_the_missing_are_told_to_rank_0_alone_in_theirs_and_to_all_in_ours(
    coordinator: Coordinator,
):
    said = torch_reports(4, [0, 1, 2])
    assert "3" in said[0].partition("missing_ranks=")[2]
    assert all("check rank 0" in said[rank] for rank in (1, 2))
    assert muster_reports(coordinator, 4, [0, 1, 2]) == {rank: [3] for rank in (0, 1, 2)}


def test_tcp_store_names_at_most_16_missing_ranks_and_muster_all(coordinator: Coordinator):
    named = torch_reports(41, [0])[0].partition("missing_ranks=[")[2].partition("]")[0]
    assert len(named.split(", ")) == 16
    assert muster_reports(coordinator, 41, [0]) == {0: list(range(1, 41))}


def test_tcp_store_cannot_name_rank_0_and_muster_can(coordinator: Coordinator):
    said = torch_reports(3, [1, 2])
    assert all("missing_ranks" not in text for text in said.values())
    assert muster_reports(coordinator, 3, [1, 2]) == {1: [0], 2: [0]}


def test_two_objects_of_one_prefix_share_the_sequence(coordinator: Coordinator, tmp_path: Path):
    first = GrpcBarrier(0, 1, "shared", coordinator.endpoint, 20, 5, run_id="shared")
    second = GrpcBarrier(0, 1, "shared", coordinator.endpoint, 20, 5, run_id="shared")
    assert [first.vote().sequence, second.vote().sequence, first.vote().sequence] == [0, 1, 2]


def test_a_session_is_resumed_under_the_same_incarnation(coordinator: Coordinator):
    config = SessionConfig(
        endpoint=coordinator.endpoint,
        run_id="resume",
        generation=0,
        rank=0,
        host=socket.gethostname(),
    )
    session = Session(config)
    session.join("g", Shape(1), 20)
    assert session.barrier("g", 5).sequence == 0
    coordinator.restart()
    assert session.barrier("g", 20).sequence == 1
    session.close()
