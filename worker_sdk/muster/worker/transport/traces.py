"""The export of this process's spans, opened at the first span if the environment asks for it."""

import atexit
import logging
import os
import threading
from functools import partial

from muster.client.span_export import SpanExport
from muster.client.tracing import is_wanted, open_export
from muster.worker.errors import MusterError
from muster.worker.transport.fork_guard import GrpcUsage
from muster.worker.version import VERSION

logger = logging.getLogger(__name__)

SERVICE = "muster-worker"

_opening = threading.Lock()
_opened: dict[int, SpanExport | None] = {}
"""The export by process id, because a forked child has a copy of its parent's."""


def span_export() -> SpanExport | None:
    """Return the export of this process; None if tracing is off, or not possible here.

    The first call imports OpenTelemetry, which takes a moment.
    """
    if not is_wanted():
        return None
    with _opening:
        process = os.getpid()
        if process not in _opened:
            _opened[process] = _open()
        return _opened[process]


def _open() -> SpanExport | None:
    try:
        # A child that is forked from now on must not use gRPC: the exporter's channel is open.
        usage = GrpcUsage("the export of traces")
    except MusterError as error:
        logger.warning("there will be no traces of this process: %s", error)
        return None
    export = open_export(SERVICE, VERSION, partial(logger.warning, "%s"))
    if export is None:
        usage.end()
    else:
        atexit.register(export.close)
    return export


def _renew_lock() -> None:
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
