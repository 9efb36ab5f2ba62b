"""The queue of spans: bounded, never waiting, and over in time."""

import os
import sys
import threading
import time
from collections.abc import Sequence

import pytest

from muster.client import span_export
from muster.client.span_export import MAX_BATCH, MAX_WAITING_SPANS, SpanExport
from muster.client.spans import Span
from muster.client.tracing import ENDPOINT, open_export


class BlockedExporter:
    """Blocks in each call until it is shut down, or for ever."""

    def __init__(self, *, obeys: bool = True) -> None:
        self.obeys = obeys
        self.called = threading.Event()
        self.release = threading.Event()
        self.batches: list[Sequence[Span]] = []

    def export(self, spans: Sequence[Span]) -> None:
        self.batches.append(spans)
        self.called.set()
        self.release.wait()

    def shutdown(self) -> None:
        if self.obeys:
            self.release.set()


class KeptExporter:
    """Keeps what it gets; its first call fails."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Span]] = []

    def export(self, spans: Sequence[Span]) -> None:
        self.batches.append(spans)
        if len(self.batches) == 1:
            raise OSError("no receiver")

    def shutdown(self) -> None:
        pass


def span(number: int) -> Span:
    return Span(trace=1, span=number, parent=None, name="write", start=0.0, end=1.0)


def test_close_exports_all_that_waits_in_batches_even_after_a_failure():
    exporter = KeptExporter()
    export = SpanExport(exporter)
    for number in range(MAX_BATCH + 3):
        export.add(span(number))
    export.close()
    assert [one.span for batch in exporter.batches for one in batch] == list(range(MAX_BATCH + 3))
    assert max(map(len, exporter.batches)) <= MAX_BATCH


def test_spans_are_dropped_when_the_queue_is_full(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(span_export, "GATHER_SECONDS", 0.0)
    exporter = BlockedExporter()
    export = SpanExport(exporter)
    export.add(span(0))
    assert exporter.called.wait(30)
    for number in range(2 * MAX_WAITING_SPANS):
        export.add(span(number))
    exporter.release.set()
    export.close()
    assert sum(map(len, exporter.batches)) == MAX_WAITING_SPANS + 1


@pytest.mark.parametrize("obeys", [True, False])
def test_close_ends_within_a_second_when_the_exporter_blocks(obeys: bool):
    exporter = BlockedExporter(obeys=obeys)
    export = SpanExport(exporter)
    export.add(span(0))
    began = time.monotonic()
    export.close()
    took = time.monotonic() - began
    exporter.release.set()
    assert span_export.FLUSH_SECONDS <= took < 10  # The bound is 1 s; the machine may be slow.


def test_forked_child_drops_its_spans():
    exporter = KeptExporter()
    export = SpanExport(exporter)
    child = os.fork()
    if child == 0:
        export.add(span(1))
        export.close()
        os._exit(export._queue.qsize())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    export.close()
    assert exporter.batches == []


def test_nothing_is_opened_or_imported_when_tracing_is_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ENDPOINT, raising=False)
    monkeypatch.setitem(sys.modules, "muster.client.otlp", None)  # Its import would raise.
    warnings: list[str] = []
    assert open_export("muster", "1", warnings.append) is None
    assert warnings == []


def test_one_warning_says_how_to_install_opentelemetry(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4317")
    monkeypatch.setitem(sys.modules, "muster.client.otlp", None)
    warnings: list[str] = []
    assert open_export("muster", "1", warnings.append) is None
    (warning,) = warnings
    assert 'pip install "muster-coordinator[otel]"' in warning
