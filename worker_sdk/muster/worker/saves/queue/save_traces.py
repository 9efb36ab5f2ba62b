"""Exports the spans of the saves of one queue. Nothing here may fail a save."""

import logging
import time

from muster.worker import environment
from muster.worker.barriers import GrpcBarrier
from muster.worker.saves.local_barrier import LocalBarrier
from muster.worker.saves.queue.calls import Call
from muster.worker.saves.queue.save_spans import Rank, SaveSpans
from muster.worker.transport.traces import span_export

logger = logging.getLogger(__name__)


class SaveTraces:
    """Exports the spans of saves.

    Args:
        barrier: its group belongs to the rank that saves.
    """

    def __init__(self, barrier: GrpcBarrier | LocalBarrier) -> None:
        # A job without a coordinator counts from 0 at every start: its traces would mix.
        # Opened now, because an import must not delay a save, nor be under way when a child is forked.
        self._export = None if isinstance(barrier, LocalBarrier) else span_export()
        self._rank = Rank(barrier.run_id, barrier.generation, barrier.rank, environment.host_name())

    def decided(self, call: Call) -> None:
        """Export the spans of a save until its decision, on the thread that waits for decisions."""
        try:
            if self._export is not None and call.decision is not None:
                for span in self._spans(call).decided(call):
                    self._export.add(span)
        except Exception:
            logger.warning("%s: its spans are lost", call.name, exc_info=True)

    def finalized(self, call: Call, began: float, ended: float) -> None:
        """Export the span of the finalize functions.

        Args:
            call: the save.
            began: when they began, on the monotonic clock.
            ended: when they ended.
        """
        try:
            if self._export is not None and call.decision is not None:
                self._export.add(self._spans(call).finalized(began, ended))
        except Exception:
            logger.warning("%s: its spans are lost", call.name, exc_info=True)

    def _spans(self, call: Call) -> SaveSpans:
        assert call.decision is not None
        return SaveSpans(self._rank, call.decision, call.name, time.time() - time.monotonic())
