"""torch's exit barrier of a stopped run: it waits for the nodes that remain, and for no other."""

import threading

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.utils import store as torch_store

from lab.patience import PATIENCE, until
from muster.worker import exit_barrier
from muster.worker.errors import ConnectError
from muster.worker.exit_barrier import ExitBarrier
from tests.support.expect import some

ROUND = "round"


def test_keys_are_those_of_torch():
    assert exit_barrier.KEY == api._TERMINAL_STATE_SYNC_ID
    assert exit_barrier.ARRIVED == exit_barrier.KEY + torch_store._NUM_MEMBERS
    assert exit_barrier.RELEASED == exit_barrier.KEY + torch_store._LAST_MEMBER_CHECKIN


class Agent:
    """One of the agents that meet over a store.

    Args:
        store: the store.
        world_size: the number of nodes of the round.
    """

    def __init__(self, store: HashStore, world_size: int) -> None:
        self._store = store
        self._world_size = world_size
        self.waits = threading.Event()
        self.barrier = ExitBarrier(store, self.waits)

    def hear(self, gone: int) -> None:
        self.barrier.release_without(gone, self._world_size, ROUND)

    def arrive(self) -> None:
        self._store.add(f"{ROUND}/{exit_barrier.ARRIVED}", 1)
        self.waits.set()

    def die(self) -> None:
        """Its counts stay in the store."""
        self.barrier.end()
        self.join()

    def join(self) -> None:
        thread = some(self.barrier._thread)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def agents(number: int, world_size: int) -> tuple[HashStore, list[Agent]]:
    store = HashStore()
    return store, [Agent(store, world_size) for _ in range(number)]


def counted(store: HashStore, gone: int) -> int:
    key = f"{ROUND}/{exit_barrier.REMAINING}{gone}"
    return int(store.get(key)) if store.check([key]) else 0


def released(store: HashStore) -> bool:
    return store.check([f"{ROUND}/{exit_barrier.RELEASED}"])


def test_torchs_barrier_is_released_when_all_remaining_nodes_wait():
    store, pair = agents(2, 3)
    threads = []
    for agent in pair:
        agent.hear(1)
        arguments = (PrefixStore(ROUND, store), 3, exit_barrier.KEY, PATIENCE)
        threads.append(threading.Thread(target=torch_store.barrier, args=arguments))
        threads[-1].start()
        assert threads[0].is_alive()
        agent.waits.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_barrier_waits_for_a_remaining_node_and_hears_of_more_that_have_gone():
    store, (agent,) = agents(1, 3)
    agent.hear(1)
    agent.arrive()
    thread = agent.barrier._thread
    until(lambda: counted(store, 1) == 1)
    assert not released(store)
    agent.hear(2)
    assert agent.barrier._thread is thread
    agent.join()
    assert released(store)


def test_agent_that_is_killed_while_it_waits_does_not_stand_for_another():
    store, (killed, early, late) = agents(3, 4)
    for agent in (killed, early, late):
        agent.hear(1)
    killed.arrive()
    early.arrive()
    until(lambda: counted(store, 1) == 2)
    killed.die()
    for agent in (early, late):
        agent.hear(2)
    # Two agents have arrived, and two remain; but one of those is not here.
    until(lambda: counted(store, 2) == 1)
    assert not released(store)
    late.arrive()
    for agent in (early, late):
        agent.join()
    assert released(store)


def test_agent_that_ends_looks_no_longer():
    store, (agent,) = agents(1, 2)
    agent.hear(1)
    agent.die()
    agent.arrive()
    assert not released(store)


def test_lost_coordinator_ends_the_attempt_to_release():
    class Lost(HashStore):
        def add(self, key: str, value: int) -> int:
            raise ConnectError("lost")

    agent = Agent(Lost(), 3)
    agent.waits.set()
    agent.hear(1)
    agent.join()
