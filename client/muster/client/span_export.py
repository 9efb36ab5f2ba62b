"""Hands finished spans to a thread that exports them, and never waits for it.

OpenTelemetry's own batch processor starts its thread again in each forked child. A child of a training
process must not do that, because gRPC does not work across a fork. The thread here stays with its process.
"""

import os
import queue
import threading

from muster.client.spans import Exporter, Span

MAX_WAITING_SPANS = 2_048
"""Spans that wait for the exporter; further ones are dropped. OpenTelemetry's default."""
MAX_BATCH = 512
"""Spans of one call of the exporter. OpenTelemetry's default."""
GATHER_SECONDS = 1.0
"""How long the thread waits after a first span for more of its batch."""
FLUSH_SECONDS = 0.8
"""How long :meth:`SpanExport.close` waits for the queued spans."""
CANCEL_SECONDS = 0.2
"""How long it then waits for the cancelled call."""


class SpanExport:
    """Exports spans on a thread of its own.

    Args:
        exporter: sends the spans. Its errors are ignored: traces matter less than training.
    """

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._queue: queue.SimpleQueue[Span | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._export_all, name="muster-traces", daemon=True)
        self._thread.start()

    def add(self, span: Span) -> None:
        """Queue a span. This never blocks; a full queue, a closed export and a forked child drop it."""
        if (
            self._queue.qsize() < MAX_WAITING_SPANS
            and not self._closing.is_set()
            and self._process == os.getpid()
        ):
            self._queue.put(span)

    def close(self) -> None:
        """Export what is queued and end the thread, within ``FLUSH_SECONDS + CANCEL_SECONDS``."""
        if self._process != os.getpid() or self._closing.is_set():
            return
        self._closing.set()
        self._queue.put(None)
        self._thread.join(FLUSH_SECONDS)
        if self._thread.is_alive():
            self._exporter.shutdown()
            self._thread.join(CANCEL_SECONDS)

    def _export_all(self) -> None:
        ended = False
        while not ended and (first := self._queue.get()) is not None:
            self._closing.wait(GATHER_SECONDS)
            batch = [first]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                span = self._queue.get()
                if span is None:
                    ended = True
                    break
                batch.append(span)
            try:
                self._exporter.export(batch)
            except Exception:
                continue
        self._exporter.shutdown()
