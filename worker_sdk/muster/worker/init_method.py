"""``init_process_group(init_method="muster://…")``: the ranks meet at the coordinator; none hosts a store.

The full form is ``muster://host:port/run_id?rank=0&world_size=2``; for replicas it is
``muster://a:7550,b:7550/run_id``. Missing parts come from the environment, so ``muster://`` is enough under
torchrun. :mod:`_muster_torch_autoload` makes it known.
"""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from torch.distributed import PrefixStore, Store

from muster.worker import environment
from muster.worker.group_barrier import GroupBarrier
from muster.worker.store import DEFAULT_TIMEOUT, CoordinatorStore

PREFIX = "init_process_group"
"""Prefix of the barriers' group, and of the ranks' keys."""


def meet(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:  # noqa: ANN401
    """Wait until all ranks are there, and yield a store for them alone; torch's rendezvous handler.

    Args:
        url: in the form above.
        timeout: limit for the other ranks, and the store's timeout.

    Yields:
        The store, the rank and the world size.

    Raises:
        BarrierError: not all ranks came; ``.missing`` names the others.
        ConnectError: the coordinator could not be reached in time.
        RefusedError: the coordinator refused this process.
        ValueError: the URL or the environment is not usable.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if not query.keys() <= {"rank", "world_size"}:
        raise ValueError(f"{url}: only rank and world_size may stand behind the question mark.")
    environ = {**os.environ, **{name.upper(): value for name, value in query.items()}}
    rank, world_size = environment.rank(None, environ), environment.world_size(None, environ)
    store = CoordinatorStore(parts.netloc, unquote(parts.path.removeprefix("/")), timeout)
    seconds = timeout.total_seconds()
    barrier = GroupBarrier(rank, world_size, PREFIX, store.endpoint, seconds, seconds, store.run_id)
    # A barrier's number is never used again, so keys of earlier lives of the job do not interfere.
    prefix = f"{PREFIX}/{barrier.sequence}"
    barrier.execute_barrier()
    yield PrefixStore(prefix, store), rank, world_size
