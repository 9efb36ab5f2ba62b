"""Run a coordinator: alone on its state, or as one of several."""

import asyncio
import gc
import signal

import structlog

from muster.client.tracing import open_export
from muster.service.app import coordinator, replica
from muster.service.app.context import AppContext
from muster.service.app.ports import check_coordinator_exposed, open_security
from muster.service.config import Config
from muster.service.etcd.location import SCHEME
from muster.service.rpc.server import METHODS
from muster.service.storage.location import engine_for
from muster.service.telemetry.metrics import Metrics
from muster.service.version import VERSION

GARBAGE_THRESHOLD = 50_000
"""For ``gc.set_threshold``. An arrival lives until its barrier is decided, and its reference count frees it.
With CPython's default of 700 new objects, the collector scanned all arrivals of a large barrier again and
again. That took a sixth of the time at 1,024 ranks, and a third at 16,384."""
FULL_COLLECTION_SECONDS = 3600.0
"""Seconds between full collections."""


async def serve(config: Config) -> None:
    """Run a coordinator until SIGTERM or SIGINT.

    Raises:
        StartError: a port is open to strangers or cannot be bound; or a certificate or the tokens file
            cannot be used.
        StorageError: the state cannot be opened, read or written; or another replica may lead.
    """
    check_coordinator_exposed(config)
    # Before the modules are frozen, and long before this replica leads: the import takes a moment.
    log = structlog.get_logger()
    spans = open_export(
        "muster-coordinator", VERSION, lambda reason: log.warning("traces.unavailable", reason=reason)
    )
    loop = asyncio.get_running_loop()
    tune_garbage_collector(loop)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    context = AppContext(config, open_security(config.security), Metrics(), stop, spans)
    for method, kind in METHODS.items():
        context.metrics.expect(kind, method)
    if context.security.tls is not None:
        context.metrics.show_certificate_expiry(context.security.tls)
    if context.security.files:
        context.metrics.show_reloads(context.security.files)
    if spans is not None:
        context.metrics.link_traces()
    try:
        if config.state.startswith(SCHEME):
            await replica.run(context)
        else:
            await coordinator.run(context, engine_for(config.state))
    finally:
        if spans is not None:
            await asyncio.to_thread(spans.close)


def tune_garbage_collector(loop: asyncio.AbstractEventLoop) -> None:
    """Make the garbage collector run seldom, and scan only new objects. A full collection comes each hour.

    A collection stops all decisions. Scanning the modules took most of a pause of 0.2 s at the start of a
    large job. With 1,000 runs and a job of 16,384 ranks, a collection of generation 1 took 0.28 s, and a full
    one 0.35 s. Reference counts free what streams and barriers leave. So there is little to find: five small
    objects of gRPC for each call, which are garbage as soon as the call begins.

    Args:
        loop: runs the full collections.
    """
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)
    # An incremental collector, as of CPython 3.14.0, has no third threshold. It scans older objects in parts.
    if gc.get_threshold()[2]:
        gc.callbacks.append(freeze_survivors)
        loop.call_later(FULL_COLLECTION_SECONDS, collect_fully, loop)


def freeze_survivors(phase: str, _: dict[str, int]) -> None:
    """Let the next collection scan only newer objects. It is of generation 0, since this resets all counts.

    Args:
        phase: ``start`` or ``stop``, see :data:`gc.callbacks`.
    """
    if phase == "stop":
        gc.freeze()


def collect_fully(loop: asyncio.AbstractEventLoop) -> None:
    """Collect cycles of frozen objects, too, now and every hour.

    Args:
        loop: runs the next collection.
    """
    gc.unfreeze()
    gc.collect()
    loop.call_later(FULL_COLLECTION_SECONDS, collect_fully, loop)
