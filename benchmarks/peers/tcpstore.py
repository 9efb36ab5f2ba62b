"""TCPStore with the barrier of torch's own store utilities: a server of its own, and a client for each rank."""

import signal
import sys
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.utils.store import barrier

from benchmarks.peers.base import BARRIER_TIMEOUT_S, Barrier, BlockingLoad, LoadSpec


def open_load(spec: LoadSpec) -> BlockingLoad:
    """Return ranks that hold a TCPStore client each; a client serves one call at a time, so none is shared."""

    def connect(rank: int) -> Barrier:
        timeout = timedelta(seconds=BARRIER_TIMEOUT_S)
        store = TCPStore("127.0.0.1", spec.port, is_master=False, timeout=timeout, wait_for_workers=False)
        return lambda sequence: barrier(
            store, spec.world_size, f"checkpoint/{sequence}", barrier_timeout=BARRIER_TIMEOUT_S
        )

    return BlockingLoad(spec.ranks, connect)


def main() -> None:
    """Serve a store until killed; the arguments are the port and the number of ranks."""
    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    signal.pause()
    del store


if __name__ == "__main__":
    main()
