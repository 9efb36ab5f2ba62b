"""What real processes do with the coordinator's store. Each runs in a process of its own, for one rank."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

from lab.patience import PATIENCE
from tests.support.ranks import CONTEXT

TIMEOUT = timedelta(seconds=60)


def together(user: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Run one process for each rank; what they return, by rank."""
    with ProcessPoolExecutor(world_size, mp_context=CONTEXT) as pool:
        running = [pool.submit(user, rank, world_size, *arguments) for rank in range(world_size)]
        return [one.result(timeout=PATIENCE) for one in running]


def train(rank: int, world_size: int, endpoint: str, init_method: str | None, steps: int) -> list[float]:
    """DDP over gloo for some steps, twice, as after a restart in the process; the weights at the end."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from muster.worker import CoordinatorStore

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    for turn in range(2):
        if init_method is None:
            store = dist.PrefixStore(f"turn{turn}", CoordinatorStore(endpoint, "train", TIMEOUT))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
            del store
        else:
            dist.init_process_group(
                "gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=TIMEOUT
            )
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            parallel(torch.full((2, 4), float(rank + step))).sum().backward()
            optimizer.step()
        dist.barrier(group=dist.new_group(backend="gloo"))
        del parallel
        dist.destroy_process_group()
    return [float(weight) for weight in model.weight[0]]


def use_elastic(rank: int, world_size: int, endpoint: str) -> list[list[bytes]]:
    """The store functions of torch elastic, unchanged, and the one that stands in for its ``synchronize``."""
    from torch.distributed.elastic.utils import store as elastic

    from muster.worker import CoordinatorStore, synchronize

    store = CoordinatorStore(endpoint, "elastic", TIMEOUT)
    data = f"rank {rank}".encode()
    elastic.barrier(store, world_size, "begin", 60, rank)
    theirs = elastic.synchronize(store, data, rank, world_size, "both", 60)
    got = elastic.get_all(store, rank, "both", world_size) if rank == 0 else theirs
    ours = synchronize(data, rank, world_size, timeout=60.0, endpoint=endpoint, run_id="elastic")
    return [theirs, got, ours]


def use_in_a_forked_child(rank: int, world_size: int, endpoint: str) -> str:
    """What a forked child is told that uses its parent's store."""
    import os

    from muster.worker import CoordinatorStore

    store = CoordinatorStore(endpoint, "fork", TIMEOUT)
    store.set("parent", "1")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.get("parent")
        except Exception as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    store.get("parent")
    with os.fdopen(read) as report:
        return report.read()
