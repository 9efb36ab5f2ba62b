"""The barriers that stand in where this torch has no experimental registry of its own."""

import inspect
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lab.patience import PATIENCE
from muster.worker import barriers
from muster.worker import fallback_barriers as fallback

TIMEOUT_SECS = 1


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def store_barrier(rank, port, prefix="a", world_size=2, timeout_secs=TIMEOUT_SECS):
    arguments = {
        "global_rank": rank,
        "global_world_size": world_size,
        "barrier_prefix": prefix,
        "timeout_barrier_init_secs": 30,
        "use_checkpoint_barrier_tcpstore_libuv": True,
        "tcpstore_port": port,
        "master_address": "127.0.0.1",
        "timeout_secs": timeout_secs,
    }
    config = fallback.BarrierConfig(barrier_type="tcp_store", barrier_args=arguments)
    return fallback.create_barrier_from_config(config)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(max_workers=4) as pool:
        yield pool


@pytest.fixture
def join(threads):
    """Build the barriers of (rank, prefix) at one store, side by side since rank 0 waits for rank 1."""
    port = free_port()

    def build(*members, timeout_secs=TIMEOUT_SECS):
        building = [
            threads.submit(store_barrier, rank, port, prefix, timeout_secs=timeout_secs)
            for rank, prefix in members
        ]
        return [one.result() for one in building]

    return build


def execute(threads, *several):
    """Execute the barriers side by side; what each came to."""
    running = [threads.submit(one.execute_barrier) for one in several]
    return [one.exception() for one in running]


class TestRegistry:
    def test_registry_offers_torchs_types(self):
        expected = {"dist_barrier": fallback.DistBarrier, "tcp_store": fallback.TCPStoreBarrier}

        assert expected == fallback.BARRIER_REGISTRY

    def test_registered_class_is_built_with_the_configured_arguments(self, monkeypatch):
        monkeypatch.setattr(fallback, "BARRIER_REGISTRY", {})

        @fallback.register_barrier
        class Door(fallback.Barrier):
            barrier_type = "door"

            def __init__(self, width):
                self.width = width

            def execute_barrier(self):
                pass

        built = fallback.create_barrier_from_config(fallback.BarrierConfig("door", {"width": 3}))

        assert isinstance(built, Door)
        assert built.width == 3

    def test_class_without_a_type_is_not_registered(self, monkeypatch):
        monkeypatch.setattr(fallback, "BARRIER_REGISTRY", {})

        assert fallback.register_barrier(int) is int
        assert fallback.BARRIER_REGISTRY == {}

    def test_config_without_a_type_builds_no_barrier(self):
        assert fallback.create_barrier_from_config(fallback.BarrierConfig()) is None

    def test_unknown_type_is_refused_with_the_known_ones(self):
        with pytest.raises(
            ValueError, match=r'"dor" is not known; registered are: dist_barrier, tcp_store\.'
        ):
            fallback.create_barrier_from_config(fallback.BarrierConfig("dor"))

    def test_barrier_without_execute_barrier_cannot_be_built(self):
        class Nothing(fallback.Barrier):
            pass

        with pytest.raises(TypeError, match="execute_barrier"):
            Nothing()  # type: ignore[abstract]

    def test_types_accept_torchs_arguments(self):
        for name in ("DistBarrier", "TCPStoreBarrier"):
            ours, theirs = getattr(fallback, name), getattr(barriers, name)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


class TestTCPStoreBarrier:
    def test_all_ranks_are_released_repeatedly(self, join, threads):
        several = join((0, "a"), (1, "a"), timeout_secs=30)

        for _ in range(12):
            assert execute(threads, *several) == [None, None]

    def test_world_of_one_rank_does_not_wait(self):
        barrier = store_barrier(0, free_port(), world_size=1)

        barrier.execute_barrier()
        barrier.execute_barrier()

    def test_no_rank_is_released_before_the_last_arrives(self, join, threads):
        early, late = join((0, "a"), (1, "a"), timeout_secs=30)
        waiting = threads.submit(early.execute_barrier)

        time.sleep(0.2)
        assert not waiting.done()
        late.execute_barrier()
        waiting.result(timeout=PATIENCE)

    def test_missing_rank_costs_timeout_secs_instead_of_torchs_300(self, join):
        waiting, _absent = join((0, "a"), (1, "a"))
        started = time.monotonic()

        with pytest.raises(dist.DistStoreError, match="timeout after 1000ms"):
            waiting.execute_barrier()
        assert TIMEOUT_SECS <= time.monotonic() - started < 30

    def test_prefix_and_sequence_are_kept_apart_in_keys(self, join, threads):
        host, guest = join((0, "a"), (1, "a"))
        one, other = join((1, "a1"), (1, "a1"))
        for _ in range(11):
            assert execute(threads, host, guest) == [None, None]
        assert execute(threads, one, other) == [None, None]

        outcomes = execute(threads, host, one)

        assert [type(outcome) for outcome in outcomes] == [dist.DistStoreError] * 2


class TestDistBarrier:
    def test_dist_barrier_needs_a_process_group(self):
        with pytest.raises(AssertionError, match="init_process_group"):
            fallback.create_barrier_from_config(fallback.BarrierConfig("dist_barrier"))

    def test_dist_barrier_uses_the_process_group(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            barrier = fallback.create_barrier_from_config(fallback.BarrierConfig("dist_barrier"))
            assert barrier is not None
            barrier.execute_barrier()
        finally:
            dist.destroy_process_group()


WITHOUT_TORCHS_BARRIERS = """
import sys
sys.modules["torch.distributed.checkpoint._experimental.barriers"] = None

import muster.worker
from muster.worker import barriers, fallback_barriers

assert barriers.BARRIER_REGISTRY == {
    "dist_barrier": fallback_barriers.DistBarrier,
    "tcp_store": fallback_barriers.TCPStoreBarrier,
    "grpc": muster.worker.GrpcBarrier,
}
assert issubclass(muster.worker.GrpcBarrier, fallback_barriers.Barrier)
assert muster.worker.create_barrier_from_config is fallback_barriers.create_barrier_from_config
config = barriers.BarrierConfig("grpc", {"global_rank": 2, "global_world_size": 2})
try:
    barriers.create_barrier_from_config(config)
except ValueError as error:
    print(error)
"""


class TestATorchWithoutThem:
    def test_torch_without_barriers_gets_all_three_types(self):
        command = [sys.executable, "-c", WITHOUT_TORCHS_BARRIERS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)

        assert done.returncode == 0, done.stderr
        assert done.stdout == "global_rank = 2: it must be below the world size, 2.\n"
