"""Requests for saves: of one run, or of all runs on a node that is drained."""

import math
from dataclasses import replace

from muster.service.core.checks import Checks
from muster.service.core.membership import refusals
from muster.service.core.registry import Registry
from muster.service.core.retention.reaper import RunReaper
from muster.service.core.run import Run
from muster.service.core.saves.notices import key_on_node
from muster.service.core.vocabulary.effects import DrainedRun, Effects, NodeDrained, Refused, SaveRequested
from muster.service.core.vocabulary.events import CancelSave, DrainNode, RequestSave
from muster.service.core.vocabulary.model import Instant, Save
from muster.service.core.vocabulary.refusal import Refusal


class SaveRequests:
    """Carries out requests for saves, of one run or of all runs on a node.

    Args:
        registry: knows the runs.
        reaper: learns that a run was used.
        checks: the checks of requests.
    """

    def __init__(self, registry: Registry, reaper: RunReaper, checks: Checks) -> None:
        self._registry = registry
        self._reaper = reaper
        self._checks = checks
        self._complete_at = -math.inf
        """Until when ranks of an earlier coordinator may connect, on the monotonic clock."""

    def serve(self, now: Instant, session_ttl: float) -> None:
        """Start to serve. Ranks of an earlier coordinator have the session TTL, in seconds, to come back."""
        self._complete_at = now.monotonic + session_ttl

    def handle(self, event: RequestSave | CancelSave | DrainNode, now: Instant, effects: Effects) -> None:
        """Carry out a request, or refuse it."""
        answer: SaveRequested | NodeDrained | Refused
        try:
            match event:
                case RequestSave():
                    answer = self.request(event, now, effects)
                case CancelSave():
                    answer = self.withdraw(event, now, effects)
                case DrainNode():
                    answer = self.drain(event, now, effects)
        except Refusal as refusal:
            answer = Refused(refusal)
        effects.send(event.session, answer)

    def request(self, event: RequestSave, now: Instant, effects: Effects) -> SaveRequested:
        """Ask all ranks of a run for a save.

        Raises:
            Refusal: INVALID_ARGUMENT, RUN_NOT_FOUND, or NO_MEMBERS: nobody could save; or STALE_GENERATION: a
                process of an older generation asks.
        """
        self._checks.save_request(event)
        run = self._registry.known(event.run_id)
        was_asked = self._request(run, event, now, effects)
        return SaveRequested(_newest(run), was_asked)

    def withdraw(self, event: CancelSave, now: Instant, effects: Effects) -> SaveRequested:
        """Withdraw the pending request of a run.

        Raises:
            Refusal: INVALID_ARGUMENT, RUN_NOT_FOUND or NO_SAVE_ASKED.
        """
        self._checks.reason(event.reason)
        run = self._registry.known(event.run_id)
        withdrawn = run.saving.withdraw(event.reason, now, effects)
        self._reaper.mark_used(run, now, effects)
        return SaveRequested(withdrawn)

    def drain(self, event: DrainNode, now: Instant, effects: Effects) -> NodeDrained:
        """Ask each run that has a process or an agent on a node for a save, or one of these runs.

        Raises:
            Refusal: INVALID_ARGUMENT; or RANKS_RECONNECT: this coordinator has just started, so that ranks of
                the node may not have connected yet.
        """
        self._checks.save_request(event)
        self._checks.name("node_name", event.node_name)
        if event.only_run:
            self._checks.name("run_id", event.only_run)
        drained: list[DrainedRun] = []
        for run_id in event.run_ids:
            if event.only_run not in ("", run_id):
                continue
            run = self._registry.find_known(run_id)
            if run is None or not run.is_on_node(event.node_name):
                continue
            ask = RequestSave(
                event.session,
                run_id,
                event.stop,
                event.by,
                event.reason,
                deadline=event.deadline,
                notice=key_on_node(event.notice, event.node_name),
            )
            was_asked = self._request(run, ask, now, effects)
            if run.saving.save is not None:
                drained.append(DrainedRun(run_id, run.saving.save, was_asked))
        if not drained and now.monotonic < self._complete_at:
            raise refusals.ranks_reconnect(event.node_name, self._complete_at - now.monotonic)
        return NodeDrained(tuple(drained))

    def _request(self, run: Run, ask: RequestSave, now: Instant, effects: Effects) -> bool:
        """Request a save of one run. Returns whether an earlier request covers this one."""
        self._reaper.mark_used(run, now, effects)
        if ask.generation is not None and ask.generation < run.generation:
            # The signal to this rank may be its agent's, which has ended its workers for the newer round.
            raise refusals.stale_generation(run.run_id, ask.generation, run.generation)
        if run.stopping.covers_requests:
            run.saving.heed(ask.notice, stop=ask.stop, effects=effects)
            return True
        if run.roster.deserted and not len(run.rendezvous):
            raise refusals.no_members(run.run_id)
        if ask.known is not None and _restarts_workers(run, now):
            # The signal is the agent's, which restarts its workers for other nodes, or without lost ones.
            ask = replace(ask, stop=False)
        return run.saving.request(ask, run.stopping.coming_generation, now, effects)


def _restarts_workers(run: Run, now: Instant) -> bool:
    """Return whether agents may be ending workers of a run now to start them again."""
    after_loss = run.closed is None and run.rendezvous.losses.agents_restart(now.monotonic)
    return run.rendezvous.restarts or after_loss


def _newest(run: Run) -> Save:
    save = run.saving.save
    assert save is not None
    return save
