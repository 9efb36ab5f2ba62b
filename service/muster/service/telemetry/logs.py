"""Structured logs that can neither stall nor crash the coordinator."""

import atexit
import logging
import queue
import sys
import threading
from typing import Any, Literal

import structlog

from muster.service.core.effects import Notice, RoundRecord
from muster.service.core.model import Decision, Outcome

LogFormat = Literal["console", "json"]
MAX_WAITING_LINES = 10_000


class LineWriter:
    """Writes lines to stderr on a thread of its own.

    A log reader that stops reading must not stop the event loop: past ``MAX_WAITING_LINES`` lines are
    dropped and counted. A closed stderr is silently given up; the service matters more than its log.
    """

    def __init__(self) -> None:
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
                line = f"({dropped} log lines were dropped: nobody read them)\n{line}"
            try:
                print(line, file=sys.stderr, flush=self._lines.empty())
            except (OSError, ValueError):
                continue


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
    writer = LineWriter()
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=20)
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_LibraryHandler()], force=True)
    # It logs a traceback for every malformed request, which is a matter between it and its client.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=True,
    )


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
