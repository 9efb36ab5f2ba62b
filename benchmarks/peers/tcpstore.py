"""TCPStore with the barrier of torch's own store utilities: one server, and a client for each rank.

A client and its server each look up the name of the connection's address, which is no part of what is
measured but takes seconds where a name server drops a query. So the server listens on an IPv4 socket, which
needs no look-up, the clients connect one after the other, and a query is given up after a second.
"""

import os
import signal
import socket
import sys
import threading
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.utils.store import barrier

from benchmarks.peers.base import BARRIER_TIMEOUT_S, Barrier, BlockingLoad, LoadSpec


def open_load(spec: LoadSpec) -> BlockingLoad:
    """Return ranks that hold a TCPStore client each; a client serves one call at a time."""
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    one_at_a_time = threading.Lock()

    def connect(rank: int) -> Barrier:
        timeout = timedelta(seconds=BARRIER_TIMEOUT_S)
        with one_at_a_time:
            store = TCPStore("127.0.0.1", spec.port, is_master=False, timeout=timeout, wait_for_workers=False)
        return lambda sequence: barrier(
            store, spec.world_size, f"checkpoint/{sequence}", barrier_timeout=BARRIER_TIMEOUT_S
        )

    return BlockingLoad(spec.ranks, connect)


def main() -> None:
    """Serve a store until killed; the arguments are the port and the number of ranks."""
    port = int(sys.argv[1])
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    signal.pause()
    del store


if __name__ == "__main__":
    main()
