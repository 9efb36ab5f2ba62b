"""What a job does with the SDK, whichever version of it: run by tests/integration/operation/test_releases.py.

Usage: release_user.py ENDPOINT. Two of them are a run of two nodes with one rank each. What each saw is
printed as JSON. Only what a release offers to users is imported.
"""

import json
import sys
from datetime import timedelta
from importlib.metadata import version

from torch.distributed.elastic.rendezvous import RendezvousParameters

import muster.worker
from muster.worker import BarrierError, CoordinatorStore, GrpcBarrier
from muster.worker.rendezvous import create_handler

RUN = "job1"
PATIENCE = 240
"""Seconds that one waits for the other, which may still import torch."""


def main() -> None:
    """Meet, take part in all kinds of barriers, use the store."""
    endpoint = sys.argv[1]
    parameters = RendezvousParameters(
        "muster", endpoint, RUN, min_nodes=2, max_nodes=2, join_timeout=PATIENCE
    )
    place = create_handler(parameters).next_rendezvous()
    rank = place.rank

    barrier = GrpcBarrier(
        rank, 2, "checkpoint", endpoint, PATIENCE, PATIENCE, run_id=RUN, host=f"node-{rank}"
    )
    barrier.execute_barrier()
    gathered = barrier.gather(f"from {rank}".encode())
    aborted = barrier.abort("disk full").message if rank else failure_of(barrier)
    # Rank 1 begins when rank 0 has given up, and hears what was decided.
    store = CoordinatorStore(endpoint, RUN, timedelta(seconds=PATIENCE))
    late = GrpcBarrier(rank, 2, "late", endpoint, PATIENCE, PATIENCE if rank else 0.5, run_id=RUN)
    if rank:
        store.wait(["given-up"])
    timed_out = failure_of(late)
    store.set("given-up", "yes")
    counted = store.add("count", 1)
    store.set(f"name-{rank}", f"node-{rank}")
    barrier.execute_barrier()

    seen = {
        "version": version("muster-coordinator"),
        "file": muster.worker.__file__,
        "rank": rank,
        "world_size": place.world_size,
        "gathered": [data.decode() for data in gathered],
        "aborted": aborted,
        "timed_out": timed_out,
        "counted": counted,
        "total": store.add("count", 0),
        "names": [data.decode() for data in store.multi_get(["name-0", "name-1"])],
        "sequence": barrier.sequence,
    }
    print(json.dumps(seen))
    muster.worker.close("done")


def failure_of(barrier: GrpcBarrier) -> str:
    """What a barrier comes to that fails."""
    try:
        barrier.execute_barrier()
    except BarrierError as error:
        return str(error)
    return "RELEASED"


if __name__ == "__main__":
    main()
