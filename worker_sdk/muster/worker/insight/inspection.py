"""A process's report of itself for people. Nothing depends on it."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from muster.v1 import insight_pb2 as pb
from muster.worker.insight import process, saves, stacks

logger = logging.getLogger(__name__)

INSPECT = "MUSTER_INSPECT"
"""The variable by which a user refuses reports."""
OFF = ("off", "0", "false", "no")
"""The values that refuse."""

_Place = tuple[tuple[tuple[str, str, int], ...], int]
"""File, function and line of each reported frame, and the number of the others."""


class Inspection:
    """Answers the questions to a session, on one thread, and waits for no other thread.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = clock()
        self._used = process.cpu_seconds()
        self._place: _Place | None = None
        """Where the main thread stood at the last question; None if unknown."""
        self._still_since = self._asked

    def report(
        self, waits_at: Sequence[str], last_arrival: float | None, *, all_threads: bool = True
    ) -> pb.Report:
        """Answer a question. A part that fails is left out; nothing is raised.

        Args:
            waits_at: the barriers that the process waits at, for people.
            last_arrival: when it last arrived at a barrier, on the clock; None if it never did.
            all_threads: whether to report all threads, or the main thread alone.
        """
        if _declined():
            return pb.Report(declined=True)
        report = pb.Report()
        now = self._clock()
        with _or_without("barriers"):
            report.waits_at.extend(waits_at)
            if last_arrival is not None:
                report.since_arrival_ms = _milliseconds(now - last_arrival)
        with _or_without("threads"):
            self._add_threads(report, now, all_threads)
        with _or_without("processor time"):
            self._add_processor_time(report, now)
        with _or_without("memory"):
            report.resident_bytes = process.resident_bytes()
        with _or_without("saves"):
            for pid in saves.under_way():
                report.saves.add(pid=pid, state=process.child_state(pid))
        return report

    def _add_threads(self, report: pb.Report, now: float, all_threads: bool) -> None:
        before, self._place = self._place, None
        threads, report.threads_left_out = stacks.threads(stacks.MAX_THREADS if all_threads else 1)
        report.threads.extend(threads)
        main = threads[0]
        self._place = (
            tuple((frame.file, frame.function, frame.line) for frame in main.frames),
            main.frames_left_out,
        )
        if self._place != before:
            self._still_since = now
        report.still_ms = _milliseconds(now - self._still_since)

    def _add_processor_time(self, report: pb.Report, now: float) -> None:
        used = process.cpu_seconds()
        report.cpu_ms = _milliseconds(used - self._used)
        report.cpu_over_ms = _milliseconds(now - self._asked)
        self._used, self._asked = used, now


def _declined(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(INSPECT, "").strip().lower() in OFF


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


@contextlib.contextmanager
def _or_without(what: str) -> Iterator[None]:
    """Leave a part out if it fails, and go on with the rest."""
    try:
        yield
    except Exception:
        logger.debug("an inspection could not find out about %s", what, exc_info=True)
