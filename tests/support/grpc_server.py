"""A gRPC server of a test's own, in this process."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from lab.patience import PATIENCE


@contextmanager
def serving(
    servicer: Any = None,
    *add: Callable[[Any, grpc.Server], None],
    handlers: Sequence[grpc.GenericRpcHandler] = (),
    threads: int = 4,
) -> Iterator[str]:
    """Serve on a free port, whose address this yields.

    Args:
        servicer: has the methods.
        add: the generated functions that add them to a server.
        handlers: further methods.
        threads: how many calls run at a time.
    """
    server = grpc.server(ThreadPoolExecutor(threads), handlers=list(handlers))
    for one in add:
        one(servicer, server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield endpoint
    finally:
        assert server.stop(0).wait(PATIENCE)
