"""torch's exit barrier of a stopped run: it waits for the nodes that remain, and for no other."""

import threading
import time

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.utils import store as torch_store

from lab.patience import PATIENCE
from muster.worker import exit_barrier
from muster.worker.errors import ConnectError
from muster.worker.exit_barrier import release_without


def test_keys_are_those_of_torch():
    assert exit_barrier.KEY == api._TERMINAL_STATE_SYNC_ID
    assert exit_barrier.ARRIVED == exit_barrier.KEY + torch_store._NUM_MEMBERS
    assert exit_barrier.RELEASED == exit_barrier.KEY + torch_store._LAST_MEMBER_CHECKIN


def test_barrier_is_released_when_all_remaining_nodes_wait():
    store = HashStore()
    waits = threading.Thread(target=torch_store.barrier, args=(store, 3, exit_barrier.KEY, PATIENCE))
    waits.start()
    release = threading.Thread(target=release_without, args=(1, 3, store))
    release.start()
    torch_store.barrier(store, 3, exit_barrier.KEY, PATIENCE)
    waits.join(PATIENCE)
    release.join(PATIENCE)
    assert not waits.is_alive()
    assert not release.is_alive()


def test_barrier_is_not_released_while_a_remaining_node_works(monkeypatch: pytest.MonkeyPatch):
    store = HashStore()
    store.add(exit_barrier.ARRIVED, 1)
    looks: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: len(looks) * exit_barrier.TIMEOUT / 3)
    monkeypatch.setattr(time, "sleep", looks.append)
    release_without(1, 3, store)
    assert len(looks) >= 2
    assert not store.check([exit_barrier.RELEASED])


def test_lost_coordinator_ends_the_attempt_to_release():
    class Lost(HashStore):
        def add(self, key: str, amount: int) -> int:
            raise ConnectError("lost")

    release_without(1, 3, Lost())
