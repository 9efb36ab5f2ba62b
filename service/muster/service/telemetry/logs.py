"""Structured logs that can neither stall nor crash the coordinator."""

import atexit
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, MutableMapping
from types import TracebackType
from typing import Any, Literal

import structlog

from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Notice
from muster.service.core.vocabulary.model import Decision, Outcome
from muster.service.core.vocabulary.records import RoundRecord

LogFormat = Literal["console", "json"]
MAX_WAITING_LINES = 10_000


def _loss_for_people(lines: int) -> str:
    return f"({lines} log lines were dropped: nobody read them)"


def _loss_for_collectors(lines: int) -> str:
    return json.dumps({"event": "log.dropped", "level": "warning", "lines": lines})


class LineWriter:
    """Writes lines to stderr on a thread of its own.

    A log reader that stops reading must not stop the event loop. Beyond ``MAX_WAITING_LINES``, lines are
    dropped and counted. A closed stderr is ignored: the service matters more than its log.

    Args:
        loss: makes the line that reports how many lines were dropped.
    """

    def __init__(self, loss: Callable[[int], str] = _loss_for_people) -> None:
        self._loss = loss
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="muster-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def msg(self, line: str) -> None:
        """Queue one line. This never blocks."""
        if self._lines.qsize() < MAX_WAITING_LINES:
            self._lines.put(line)
        else:
            self._dropped += 1

    debug = info = warning = error = critical = msg

    def close(self) -> None:
        """Write the queued lines, for up to 1 s."""
        self._lines.put(None)
        self._thread.join(timeout=1)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                line = f"{self._loss(dropped)}\n{line}"
            try:
                _write(f"{line}\n")
            except (OSError, ValueError):
                continue


def _write(text: str) -> None:
    """Write to stderr without Python's buffer: a full pipe would block its flush at exit."""
    try:
        handle = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        print(text, end="", file=sys.stderr, flush=True)  # Stderr is not a file.
        return
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(handle, data) :]


class _LibraryHandler(logging.Handler):
    """Writes the logs of libraries to the same stream, in the same format."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            reason = record.getMessage()
        except Exception as error:  # A mistake of the library must not end our thread.
            reason = f"{record.msg!r} with {record.args!r}: {error}"
        log = structlog.get_logger()
        log.log(record.levelno, record.name, reason=reason, exc_info=record.exc_info)


def configure(log_format: LogFormat) -> None:
    """Set structlog up for this process.

    Args:
        log_format: ``console`` for people, ``json`` for collectors.
    """
    as_json = log_format == "json"
    writer = LineWriter(_loss_for_collectors if as_json else _loss_for_people)
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=20)
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_LibraryHandler()], force=True)
    logging.captureWarnings(True)
    if as_json:
        # Python itself would print these, but not as JSON.
        sys.excepthook = _log_uncaught
        sys.unraisablehook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    # It logs a traceback for every malformed request, which is no fault of the coordinator.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_a_fault)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _printable,
            renderer,
        ],
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=True,
    )


def _is_a_fault(record: logging.LogRecord) -> bool:
    """Return False for gRPC's report that a client cancelled a call while it was answered.

    gRPC logs that as an error with a traceback, but it harms nothing.
    """
    return not str(record.msg).startswith("ExecuteBatchError raised in core")


def _printable(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Make control characters visible: callers send some of this text, and the log may go to a terminal.

    Only a traceback keeps its line breaks. Elsewhere a line break could forge a line of the log.
    """
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            text = report.printable(value)
            event[key] = text if key == "exception" else text.replace("\n", "\\n")
    return event


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None
) -> None:
    """Log an uncaught exception."""
    structlog.get_logger().critical(
        "uncaught", reason=f"{kind.__name__}: {error}", exc_info=(kind, error, traceback)
    )


def failed(reason: str) -> None:
    """Log that the coordinator cannot start or continue."""
    structlog.get_logger().critical("failed", reason=reason)


class EventLog:
    """Logs one line for every decision and notice."""

    def __init__(self) -> None:
        self._log: Any = structlog.get_logger()

    def decided(self, decision: Decision) -> None:
        """Log a decision, with the sentence that every rank gets."""
        released = decision.outcome is Outcome.RELEASED
        log = self._log.info if released else self._log.warning
        log(
            "barrier.decided",
            outcome=decision.outcome.name,
            run=decision.run_id,
            prefix=decision.prefix,
            sequence=decision.sequence,
            reason=decision.message if released else " | ".join(_lines(decision.message)),
        )

    def round_completed(self, record: RoundRecord) -> None:
        """Log nothing: the notice of the round, which names the nodes, is logged."""

    def noticed(self, notice: Notice) -> None:
        """Log a notice for operators."""
        self._log.info(notice.event, run=notice.run_id, reason=notice.message)

    def forgotten(self, run_id: str) -> None:
        """Log nothing: the notice is logged."""

    def committed(self, seconds: float) -> None:
        """Log nothing: commits are counted."""


def _lines(message: str) -> list[str]:
    return [line.strip() for line in message.splitlines()]
