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
from muster.service.core.vocabulary.effects import Notice, RoundRecord
from muster.service.core.vocabulary.model import Decision, Outcome

LogFormat = Literal["console", "json"]
MAX_WAITING_LINES = 10_000


def _loss_for_people(lines: int) -> str:
    return f"({lines} log lines were dropped: nobody read them)"


def _loss_for_collectors(lines: int) -> str:
    return json.dumps({"event": "log.dropped", "level": "warning", "lines": lines})


class LineWriter:
    """Writes lines to stderr on a thread of its own.

    A log reader that stops reading must not stop the event loop: past ``MAX_WAITING_LINES`` lines are
    dropped and counted. A closed stderr is silently given up; the service matters more than its log.

    Args:
        loss: the line that tells how many lines were dropped.
    """

    def __init__(self, loss: Callable[[int], str] = _loss_for_people) -> None:
        self._loss = loss
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="muster-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def msg(self, line: str) -> None:
        """Hand over one line; never blocks."""
        if self._lines.qsize() < MAX_WAITING_LINES:
            self._lines.put(line)
        else:
            self._dropped += 1

    debug = info = warning = error = critical = msg

    def close(self) -> None:
        """Write what waits, for a second at most."""
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
    """Write to stderr past Python's buffer, which Python flushes at its end: a full pipe would hold it up."""
    try:
        handle = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        print(text, end="", file=sys.stderr, flush=True)  # It is not a file.
        return
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(handle, data) :]


class _LibraryHandler(logging.Handler):
    """Puts what libraries log into the same stream and form."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            reason = record.getMessage()
        except Exception as error:  # The library's mistake, which must not become ours.
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
        # What Python itself would print is no JSON.
        sys.excepthook = _log_uncaught
        sys.unraisablehook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    # It logs a traceback for every malformed request, which is a matter between it and its client.
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
    """Whether gRPC's line is more than that a client gave its call up just as it was answered.

    That is logged as an error with a traceback, of a call that everyone has forgotten.
    """
    return not str(record.msg).startswith("ExecuteBatchError raised in core")


def _printable(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Make control characters visible: what callers send may end here, and here may be a terminal.

    Only a traceback keeps its lines; elsewhere a line break would be a line of the log that never was.
    """
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            text = report.printable(value)
            event[key] = text if key == "exception" else text.replace("\n", "\\n")
    return event


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None
) -> None:
    """An exception that nobody caught, as a line of the log."""
    structlog.get_logger().critical(
        "uncaught", reason=f"{kind.__name__}: {error}", exc_info=(kind, error, traceback)
    )


def failed(reason: str) -> None:
    """The coordinator cannot start, or cannot go on."""
    structlog.get_logger().critical("failed", reason=reason)


class EventLog:
    """One line for every decision and notice."""

    def __init__(self) -> None:
        self._log: Any = structlog.get_logger()

    def decided(self, decision: Decision) -> None:
        """A barrier was decided; its sentence is the one that every rank gets."""
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
        """Its notice, which names the nodes, is what is logged."""

    def noticed(self, notice: Notice) -> None:
        """Something that an operator may want to know."""
        self._log.info(notice.event, run=notice.run_id, reason=notice.message)

    def forgotten(self, run_id: str) -> None:
        """Its notice is what is logged."""

    def committed(self, seconds: float) -> None:
        """Commits are counted, not logged."""


def _lines(message: str) -> list[str]:
    return [line.strip() for line in message.splitlines()]
