"""Runs that were stopped to be resumed: all ranks saved at one step, and training ended on request.

A stopped run is neither finished nor failed. It stays stopped until a newer generation starts, or until the
job starts again in the same generation.
"""

from muster.service.core.membership.roster import Roster
from muster.service.core.rendezvous import refusals
from muster.service.core.rendezvous.rendezvous import Rendezvous
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Effects, Notice
from muster.service.core.vocabulary.events import JoinRendezvous
from muster.service.core.vocabulary.model import Instant, Save, Stopped


class Stopping:
    """How the newest generation of a run was stopped.

    Args:
        run_id: the run.
        roster: its processes.
        rendezvous: its nodes.
    """

    def __init__(self, run_id: str, roster: Roster, rendezvous: Rendezvous) -> None:
        self._run_id = run_id
        self._roster = roster
        self._rendezvous = rendezvous
        self.stored: Stopped | None = None
        """How a generation was stopped. It counts until a newer one starts."""

    @property
    def stopped(self) -> Stopped | None:
        """How the run was stopped; None if it runs, or nobody stopped it."""
        stopped = self.stored
        return stopped if stopped is not None and stopped.generation >= self._generation else None

    @property
    def _generation(self) -> int:
        """The newest generation: that of the processes, or that of the newest complete round."""
        rounds = self._rendezvous.rounds
        return max(self._roster.generation, rounds[-1].round if rounds else 0)

    @property
    def covers_requests(self) -> bool:
        """Whether the save that stopped the run is what a request asks for, as no job begins after it."""
        return self.stopped is not None and self.coming_generation <= self.stopped.generation

    @property
    def coming_generation(self) -> int:
        """The generation of which the present nodes and processes are, or will be."""
        forming = self._rendezvous.round if len(self._rendezvous) else 0
        return max(self._generation, forming)

    def stop(self, save: Save, now: Instant, effects: Effects) -> None:
        """Stop the run, because all ranks confirmed a save after which training ends."""
        assert save.step is not None
        stopped = Stopped(save.step, save.by, save.reason, now.wall, self._generation)
        self.stored = stopped
        self._rendezvous.stop(stopped, effects)
        effects.notices.append(Notice("run.stopped", self._run_id, report.run_stopped(self._run_id, stopped)))

    def restore_round(self) -> None:
        """Tell the restored rendezvous whether its round was stopped."""
        if self._rendezvous.complete:
            self._rendezvous.stopped = self.stopped

    def start_again(self) -> bool:
        """Forget that the run was stopped, because a new process of the job is there in the same generation.

        Returns:
            Whether it was stopped. A round that still runs means that the process belongs to the stopped job.
        """
        if self.stopped is None or self._rendezvous.stopped is not None:
            return False
        self.stored = None
        return True

    def refuse_old_agent(self, ask: JoinRendezvous, now: Instant, effects: Effects) -> None:
        """Refuse another attempt of an agent of the stopped job, and give its place up.

        A new agent, which makes its first attempt, is not refused: it starts the run again.

        Raises:
            Refusal: RUN_STOPPED.
        """
        stopped, incarnation = self.stopped, ask.node.incarnation
        if stopped is None or self._rendezvous.holds_round(incarnation, ask.attempt):
            return
        if ask.attempt > 1 or ask.round is not None:
            self._rendezvous.leave(incarnation, "its run was stopped", now, effects, over=True)
            raise refusals.run_stopped(self._run_id, stopped)
