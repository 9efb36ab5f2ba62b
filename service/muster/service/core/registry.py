"""Which runs are known, and how a run is created. ``retention/reaper.py`` removes them."""

from muster.service.core.barriers.group import Group
from muster.service.core.barriers.payload_total import PayloadTotal
from muster.service.core.local.tier import LocalTier
from muster.service.core.membership.process import Process
from muster.service.core.rendezvous.rendezvous import Rendezvous
from muster.service.core.retention.reaper import RunReaper
from muster.service.core.run import Run
from muster.service.core.saves.saving import Saving
from muster.service.core.store import Waiter
from muster.service.core.timers import Timers
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.limits import ByteTotal, Limits
from muster.service.core.vocabulary.model import Instant
from muster.service.core.vocabulary.refusal import Reason, Refusal, limit_exceeded


class Registry:
    """Creates runs.

    Args:
        runs: all of the coordinator's, by id.
        limits: the bounds.
        timers: wakes the parts of a run.
        stored: bytes in the stores of all runs.
        gathered: payload bytes of all groups of all runs.
        reaper: makes room for a new run, if it can.
    """

    def __init__(
        self,
        runs: dict[str, Run],
        limits: Limits,
        timers: Timers[Group | Process | Rendezvous | Saving | Waiter | LocalTier],
        stored: ByteTotal,
        gathered: PayloadTotal,
        reaper: RunReaper,
    ) -> None:
        self._runs = runs
        self._limits = limits
        self._timers = timers
        self._stored = stored
        self._gathered = gathered
        self._reaper = reaper

    def check_room(self, run_id: str, now: Instant) -> None:
        """Refuse a run that would be one too many.

        Raises:
            Refusal: LIMIT_EXCEEDED.
        """
        known, most = len(self._runs), self._limits.max_runs
        if run_id not in self._runs and known >= most and self._reaper.find_reclaimable(now) is None:
            raise limit_exceeded(
                "max_runs",
                most,
                f"{known} runs are known already, and none has been closed and out of use for ten minutes",
            )

    def find(self, run_id: str, generation: int, now: Instant) -> Run:
        """Return the run of this id, or a new one that is not registered yet."""
        return self._runs.get(run_id) or self.new(run_id, generation, now)

    def find_known(self, run_id: str) -> Run | None:
        """Return the run of this id; None if it is unknown."""
        return self._runs.get(run_id)

    def known(self, run_id: str) -> Run:
        """Return the run of this id.

        Raises:
            Refusal: RUN_NOT_FOUND.
        """
        run = self._runs.get(run_id)
        if run is None:
            raise Refusal(
                Reason.RUN_NOT_FOUND,
                f'no run "{report.shown(run_id)}" is known to this coordinator. '
                "List the runs with: muster get runs",
            )
        return run

    def new(self, run_id: str, generation: int, now: Instant) -> Run:
        """Return a new run that is not registered yet."""
        totals = self._stored, self._gathered
        return Run(run_id, self._limits, self._timers, generation, now, *totals)

    def begin(self, run_id: str, generation: int, now: Instant, effects: Effects) -> Run:
        """Return the run of this id, and register it if it is new."""
        run = self.find(run_id, generation, now)
        self.register(run, now, effects)
        return run

    def register(self, run: Run, now: Instant, effects: Effects) -> None:
        """Register a run if it is new; it may replace a closed run that is unused."""
        if run.run_id in self._runs:
            return
        most = self._limits.max_runs
        if len(self._runs) >= most and (finished := self._reaper.find_reclaimable(now)) is not None:
            self._reaper.forget(finished, effects, report.made_room(finished.run_id, most))
        self._runs[run.run_id] = run
        run.write_record(now, effects)
