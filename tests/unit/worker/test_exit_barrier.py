"""torch's exit barrier of a stopped run: it waits for the nodes that remain, and for no other."""

import threading

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.utils import store as torch_store

from lab.patience import PATIENCE
from muster.worker import exit_barrier
from muster.worker.errors import ConnectError
from muster.worker.exit_barrier import ExitBarrier
from tests.support.expect import some


def test_keys_are_those_of_torch():
    assert exit_barrier.KEY == api._TERMINAL_STATE_SYNC_ID
    assert exit_barrier.ARRIVED == exit_barrier.KEY + torch_store._NUM_MEMBERS
    assert exit_barrier.RELEASED == exit_barrier.KEY + torch_store._LAST_MEMBER_CHECKIN


def test_barrier_is_released_when_all_remaining_nodes_wait():
    whole = HashStore()
    store = PrefixStore("round", whole)
    waits = threading.Thread(target=torch_store.barrier, args=(store, 3, exit_barrier.KEY, PATIENCE))
    waits.start()
    barrier = ExitBarrier(whole)
    barrier.release_without(1, 3, "round")
    torch_store.barrier(store, 3, exit_barrier.KEY, PATIENCE)
    waits.join(PATIENCE)
    assert not waits.is_alive()


def test_barrier_waits_for_a_remaining_node_and_hears_of_more_that_have_gone():
    store = HashStore()
    barrier = ExitBarrier(store)
    barrier.release_without(1, 3, "round")
    store.add(f"round/{exit_barrier.ARRIVED}", 1)
    thread = some(barrier._thread)
    assert not store.check([f"round/{exit_barrier.RELEASED}"])
    barrier.release_without(2, 3, "round")
    assert barrier._thread is thread
    thread.join(PATIENCE)
    assert store.check([f"round/{exit_barrier.RELEASED}"])


def test_agent_that_ends_looks_no_longer():
    store = HashStore()
    barrier = ExitBarrier(store)
    barrier.release_without(1, 3, "round")
    barrier.end()
    some(barrier._thread).join(PATIENCE)
    assert not store.check([f"round/{exit_barrier.RELEASED}"])


def test_lost_coordinator_ends_the_attempt_to_release():
    class Lost(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise ConnectError("lost")

    barrier = ExitBarrier(Lost())
    barrier.release_without(1, 3, "round")
    some(barrier._thread).join(PATIENCE)
    assert not some(barrier._thread).is_alive()
