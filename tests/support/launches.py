"""Elastic launches by which one process, and children that it forks, run one job after the other."""

import multiprocessing
import os
import re
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection

from lab.patience import PATIENCE


def work() -> int:
    """What a worker does, in a fork of the agent."""
    return int(os.environ["RANK"])


def launch(endpoint: str) -> str:
    """Run a job of two workers that are forked."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=uuid.uuid4().hex,
        rdzv_backend="muster",
        rdzv_endpoint=endpoint,
        local_addr="127.0.0.1",
        start_method="fork",
        monitor_interval=0.1,
    )
    return f"launched {len(elastic_launch(config, work)())} workers"


def drop_a_handler(endpoint: str, *, in_a_cycle: bool) -> None:
    """Hold a node's place, and drop it without a word."""
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

    from muster.worker.rendezvous import create_handler

    handler = create_handler(RendezvousParameters("muster", endpoint, uuid.uuid4().hex, 1, 1, "127.0.0.1"))
    handler.next_rendezvous()
    if in_a_cycle:
        handler.itself = handler  # type: ignore[attr-defined]


def in_a_child(launched: Callable[[str], str], endpoint: str) -> str:
    """What a forked child says of its launch."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe()
    child = context.Process(target=_tell, args=(its, launched, endpoint))
    child.start()
    try:
        return str(mine.recv()) if mine.poll(PATIENCE) else "it hangs"
    finally:
        child.kill()
        child.join()


def _tell(pipe: Connection, launched: Callable[[str], str], endpoint: str) -> None:
    try:
        pipe.send(launched(endpoint))
    except Exception as error:
        words = str(error).replace(str(os.getpid()), "2").replace(str(os.getppid()), "1")
        pipe.send(re.split(": ", words)[0])


def in_turn(rank: int, world_size: int, endpoint: str) -> list[str]:
    """Launch, then fork a child that launches, and so on; at last beside a store that is in use."""
    from muster.worker import CoordinatorStore

    found = []
    for _ in range(2):
        found.append(f"the process {launch(endpoint)}")
        found.append(f"its child {in_a_child(launch, endpoint)}")
    for in_a_cycle in (False, True):
        drop_a_handler(endpoint, in_a_cycle=in_a_cycle)
        found.append(f"its child {in_a_child(launch, endpoint)}")
    store = CoordinatorStore(endpoint, "in use")
    found.append(in_a_child(launch, endpoint))
    store.close()
    return found
