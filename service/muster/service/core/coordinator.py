"""The entrance of the core: events and the time go in, effects come out.

Only :meth:`Coordinator.step` changes the state. The core owns no clock: the driver asks
:meth:`Coordinator.next_deadline`, and submits a ``Tick`` at that time.
"""

from collections.abc import Iterable

from muster.client.save_votes import PREFIX
from muster.service.core.barriers import observations
from muster.service.core.barriers.group import Group
from muster.service.core.barriers.payload_total import PayloadTotal
from muster.service.core.barriers.refusals import not_joined
from muster.service.core.checks import Checks, invalid
from muster.service.core.local.tier import LocalTier
from muster.service.core.local_requests import LocalRequests
from muster.service.core.membership.process import Process
from muster.service.core.node_eviction import evict_node
from muster.service.core.registry import Registry
from muster.service.core.rendezvous.nodes import Node
from muster.service.core.rendezvous.rendezvous import Rendezvous
from muster.service.core.restoring import restore_runs
from muster.service.core.retention.reaper import RunReaper, forgotten
from muster.service.core.retention.retention import FOR_EVER, Retention
from muster.service.core.retention.unused_payloads import UnusedPayloads
from muster.service.core.run import Run
from muster.service.core.save_requests import SaveRequests
from muster.service.core.saves.saving import Saving
from muster.service.core.sessions import Sessions
from muster.service.core.store import Store, Waiter
from muster.service.core.timers import Timers
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import (
    NO_RANKS,
    Delivery,
    Effects,
    Evicted,
    GroupJoined,
    NodeLeft,
    Refused,
    RunClosed,
    RunForgotten,
)
from muster.service.core.vocabulary.events import (
    Abort,
    AddProcesses,
    Arrive,
    ArriveOnce,
    CancelSave,
    CloseRun,
    Disconnected,
    DrainNode,
    Event,
    Evict,
    EvictNode,
    Forget,
    Goodbye,
    Hello,
    JoinGroup,
    JoinRendezvous,
    LeaveRendezvous,
    ProbeResults,
    RemoveProcesses,
    RequestSave,
    Stepped,
    StoreRequest,
    Tick,
)
from muster.service.core.vocabulary.limits import ByteTotal, Limits
from muster.service.core.vocabulary.local import (
    CommitLocal,
    ConnectKeeper,
    Recover,
    ReportKeeper,
    RequestPermit,
)
from muster.service.core.vocabulary.model import Instant, MemberState, SessionId
from muster.service.core.vocabulary.operations import Change, Waiting
from muster.service.core.vocabulary.records import Record
from muster.service.core.vocabulary.refusal import Reason, Refusal, limit_exceeded


class Coordinator:
    """All runs, and the only way to change them.

    Args:
        session_ttl: seconds that a process may take to come back after its stream was lost.
        reset_grace: the same, if the connection itself ended.
        limits: the bounds.
        retention: how long unused runs are kept.
        epoch: how often a coordinator has opened this storage, from 1.
    """

    def __init__(
        self,
        *,
        session_ttl: float = 10.0,
        reset_grace: float = 3.0,
        limits: Limits | None = None,
        retention: Retention = FOR_EVER,
        epoch: int = 1,
    ) -> None:
        self.session_ttl = session_ttl
        self._grace = min(reset_grace, session_ttl)
        self.limits = limits or Limits()
        self.retention = retention
        self.epoch = epoch
        self.runs: dict[str, Run] = {}
        self.node_streams: dict[SessionId, tuple[Run, Node]] = {}
        """Open streams of nodes, each with the run and node that it belongs to."""
        self._waiting: dict[SessionId, Store] = {}
        """Calls that wait for keys, each with its store."""
        self._timers: Timers[Group | Process | Rendezvous | Saving | Waiter | LocalTier] = Timers()
        self.stored = ByteTotal()
        """Bytes in the stores of all runs."""
        self.reaper = RunReaper(self.runs, retention, session_ttl)
        self.gathered = PayloadTotal(UnusedPayloads(self.runs, self.reaper).drop)
        self._checks = Checks(self.limits)
        self._registry = Registry(
            self.runs, self.limits, self._timers, self.stored, self.gathered, self.reaper
        )
        self._save_requests = SaveRequests(self._registry, self.reaper, self._checks)
        self.sessions = Sessions(
            self._registry,
            self.reaper,
            self.limits,
            self._timers,
            session_ttl,
            self._grace,
            epoch,
            self.node_streams,
        )
        self._local = LocalRequests(self._registry, self.reaper, self._checks, self.limits, self.sessions)

    # ------------------------------------------------------------------ driving

    def step(self, event: Event, now: Instant, effects: Effects) -> None:
        """Apply one event.

        Args:
            event: what happened.
            now: the current time.
            effects: receives what to persist and then to deliver, in order.
        """
        if type(event) is Arrive:
            self._arrive(event, now, effects)
            return
        match event:
            case Hello():
                self.sessions.hello(event, now, effects)
            case AddProcesses():
                self.sessions.add_processes(event, now, effects)
            case RemoveProcesses():
                self.sessions.remove_processes(event, now, effects)
            case JoinGroup():
                self._join(event, now, effects)
            case ArriveOnce():
                self._arrive_once(event, now, effects)
            case Goodbye():
                self.sessions.goodbye(event, now, effects)
            case Disconnected():
                self._disconnected(event, now, effects)
            case Abort():
                self._abort(event, now, effects)
            case JoinRendezvous():
                self._join_rendezvous(event, now, effects)
            case LeaveRendezvous():
                self._leave_rendezvous(event, now, effects)
            case CloseRun():
                self._close(event, now, effects)
            case Evict() | EvictNode():
                self._evict(event, now, effects)
            case Forget():
                self._forget(event, now, effects)
            case RequestSave() | CancelSave() | DrainNode():
                self._save_requests.handle(event, now, effects)
            case ConnectKeeper() | ReportKeeper() | CommitLocal() | RequestPermit() | Recover():
                self._local.handle(event, now, effects)
            case StoreRequest():
                self._store(event, now, effects)
            case Stepped():
                self.sessions.record_steps(event, now, effects)
            case ProbeResults():
                if (run := self.runs.get(event.run_id)) is not None:
                    observations.record_observations(run.roster, event, now.monotonic)
            case Tick():
                self._tick(now, effects)
            case _:
                raise TypeError(f"not an event: {event!r}")

    def next_deadline(self) -> float | None:
        """Return when the next ``Tick`` is due, on the monotonic clock. An early tick does no harm."""
        times = self._timers.next_time(), self.reaper.next_time()
        return min((time for time in times if time is not None), default=None)

    def restore(self, records: Iterable[Record], now: Instant) -> None:
        """Restore the durable state, once, before :meth:`serve`.

        Args:
            records: the state, in any order.
            now: the current time.
        """
        restore_runs(records, self.runs, self._registry, self.retention, now)
        self.reaper.restore(now)

    def serve(self, now: Instant) -> None:
        """Start to serve: callers can reach the coordinator from now on.

        Restored processes have the session TTL to come back, and nodes their keep-alive timeout, from now on.
        """
        ttl, outage = self.session_ttl, self.sessions.outages.at(now.monotonic)
        for run in self.runs.values():
            for process in run.roster:
                if process.state is MemberState.DISCONNECTED:
                    process.disconnect(now.monotonic, ttl, ttl, outage)
                    self._timers.arm(process, process.back_by)
            run.rendezvous.serve(now)
        self.reaper.serve(now)
        if self.runs:
            self._save_requests.serve(now, self.session_ttl)

    # ------------------------------------------------------------------ streams and time

    def _disconnected(self, event: Disconnected, now: Instant, effects: Effects) -> None:
        if event.session in self.node_streams:
            run, node = self.node_streams.pop(event.session)
            run.rendezvous.disconnect(node, event, self._grace, now)
            self.reaper.mark_used(run, now, effects)
        store = self._waiting.pop(event.session, None)
        if store is not None:
            store.forget(event.session)
            self.reaper.mark_used(self.runs.get(store.run_id), now, effects)
        self._local.disconnected(event.session, now, effects)
        self.sessions.disconnected(event, now, effects)

    def _tick(self, now: Instant, effects: Effects) -> None:
        runs: dict[str, Run] = {}
        groups: list[Group] = []
        for item in self._timers.pop_due(now.monotonic):
            if isinstance(item, Group):
                groups.append(item)
            elif isinstance(item, Rendezvous):
                item.on_time(now, effects)
                self.reaper.review_in_time(self.runs.get(item.run_id))
            elif isinstance(item, Waiter):
                item.store.on_time(item, effects)
            elif isinstance(item, Saving | LocalTier):
                item.on_time(now, effects)
            elif (run := self._process_on_time(item, now, effects)) is not None:
                runs[run.run_id] = run
        # Expire all processes before a barrier fails, so that its report names all of them.
        for run in runs.values():
            run.fail_barriers_of_gone_ranks(now, effects)
            self.reaper.review_in_time(run)
        for group in groups:
            waited = group.open
            group.on_time(now, effects)
            if group.open is not waited:
                self.reaper.mark_used(self.runs.get(group.run_id), now, effects)
        self.reaper.review(now, effects)

    def _process_on_time(self, process: Process, now: Instant, effects: Effects) -> Run | None:
        """Expire a late process, and end its succession window. Return its run, if it must be checked."""
        run = self.runs.get(process.run_id)
        if run is None or not run.is_current(process):
            return None
        changed = False
        if process.successor_until is not None:
            if now.monotonic < process.successor_until:
                self._timers.arm(process, process.successor_until)
            else:
                run.end_heir(process)
                changed = True
        if process.state is MemberState.DISCONNECTED:
            if now.monotonic < process.back_by:
                self._timers.arm(process, process.back_by)
            else:
                process.expire()
                run.mark_gone(process, effects)
                changed = True
        return run if changed else None

    # ------------------------------------------------------------------ barriers

    def _join(self, event: JoinGroup, now: Instant, effects: Effects) -> None:
        try:
            session = self.sessions.of(event.session)
            shape = self._checks.shape(event)
            self.sessions.check_count(session, "ranks", event.ranks)
            if not (event.ranks or session.processes):
                raise invalid("ranks", "empty", "nobody speaks on this stream; send AddProcesses first")
        except Refusal as refusal:
            self.sessions.refuse(event.session, Refused(refusal, event.prefix), event.ranks, effects)
            return
        positions: list[tuple[int, int]] = []
        for rank in event.ranks or tuple(session.processes):
            try:
                process = self.sessions.process(session, rank)
                positions.append((rank, session.run.join(process, event.prefix, shape, now, effects)))
            except Refusal as refusal:
                effects.send(event.session, Refused(refusal, event.prefix, rank=rank))
        if positions:
            effects.send(event.session, GroupJoined(event.prefix, tuple(positions)))

    def _arrive_once(self, event: ArriveOnce, now: Instant, effects: Effects) -> None:
        hello = Hello(event.session, event.run_id, event.generation, (event.process,))
        try:
            self.sessions.check_hello(hello, now)
            shape = self._checks.shape(event)
            self._checks.timeout(event.timeout)
            self._checks.write_report(event.arrival.report)
            past = self._registry.find(event.run_id, event.generation, now).check_unary_arrival(event, shape)
            if past is not None:
                effects.send(event.session, past)
                return
            session = self.sessions.admit(hello, now, effects, unary=True)
            session.run.join(session.processes[event.process.rank], event.prefix, shape, now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal, event.prefix))
            # The checks above cover every refusal. If one slips through, the arrival must not count.
            self._disconnected(Disconnected(event.session), now, effects)
            return
        arrive = Arrive(event.session, event.prefix, event.sequence, event.timeout, (event.arrival,))
        self._arrive(arrive, now, effects)

    def _arrive(self, event: Arrive, now: Instant, effects: Effects) -> None:
        try:
            session = self.sessions.of(event.session)
            self.sessions.check_count(session, "arrivals", event.arrivals)
            if not event.prefix:
                raise invalid("prefix", '""', "it must not be empty")
        except Refusal as refusal:
            ranks = [arrival.rank for arrival in event.arrivals]
            refused = Refused(refusal, event.prefix, event.sequence)
            self.sessions.refuse(event.session, refused, ranks, effects)
            return
        for arrival in event.arrivals:
            try:
                process = self.sessions.process(session, arrival.rank)
                group = session.run.groups.get(event.prefix)
                if group is None:
                    raise not_joined(session.run.run_id, report.shown(event.prefix), process)
                self._checks.timeout(event.timeout)
                self._checks.write_report(arrival.report)
                after, waited = event.progress_after, event.waited
                group.arrive(process, event.sequence, event.timeout, arrival, now, effects, after, waited)
            except Refusal as refusal:
                effects.send(event.session, Refused(refusal, event.prefix, event.sequence, arrival.rank))
        if event.prefix == PREFIX and self.runs.get(session.run.run_id) is session.run:
            session.run.apply_save_decision(now, effects)

    def _abort(self, event: Abort, now: Instant, effects: Effects) -> None:
        try:
            group = self.group(event.run_id, event.prefix)
            barrier = group.open
            if barrier is None or event.sequence not in (None, barrier.sequence):
                wanted = "" if event.sequence is None else f" #{event.sequence}"
                raise Refusal(
                    Reason.NO_OPEN_BARRIER,
                    f'group "{event.prefix}" of run {event.run_id} has no open barrier{wanted}; its '
                    f"next is #{group.next_sequence}. Nothing was aborted.",
                    next_sequence=group.next_sequence,
                )
            decision = group.abort(event.reason or "by an operator", now, effects)
            assert decision is not None
            self.reaper.mark_used(self.runs[event.run_id], now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal, event.prefix, event.sequence))
            return
        effects.send(event.session, decision)

    # ------------------------------------------------------------------ nodes, and actions of operators

    def _join_rendezvous(self, event: JoinRendezvous, now: Instant, effects: Effects) -> None:
        try:
            self._check_node(event, now)
            run = self._registry.find(event.run_id, 0, now)
            node = run.join_rendezvous(event, now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal, final=True))
            return
        self._registry.register(run, now, effects)
        self.node_streams[event.session] = run, node
        self.reaper.mark_used(run, now, effects)

    def _check_node(self, event: JoinRendezvous, now: Instant) -> None:
        run = self.runs.get(event.run_id)
        known = run.rendezvous.find(event.node.incarnation) if run is not None else None
        self.sessions.check_room(known is not None and known.session is not None)
        # A place outlives its stream for the keep-alive timeout, so it needs a bound of its own.
        places = len(run.rendezvous) if run is not None else 0
        if known is None and places >= self.limits.max_sessions:
            raise limit_exceeded(
                "max_sessions",
                self.limits.max_sessions,
                f"{places} nodes have a place in the rendezvous of run {event.run_id} already, those that "
                "are away among them",
            )
        self._checks.name("run_id", event.run_id)
        self._registry.check_room(event.run_id, now)
        self._checks.node(event)

    def _leave_rendezvous(self, event: LeaveRendezvous, now: Instant, effects: Effects) -> None:
        run = self.runs.get(event.run_id)
        left = run is not None and run.rendezvous.leave(
            event.incarnation, event.reason, now, effects, over=run.closed is not None
        )
        self.reaper.mark_used(run, now, effects)
        effects.send(event.session, NodeLeft(left))

    def _close(self, event: CloseRun, now: Instant, effects: Effects) -> None:
        try:
            self._checks.name("by", event.by)
            self._checks.reason(event.reason)
            if event.create:
                self._checks.name("run_id", event.run_id)
                self._registry.check_room(event.run_id, now)
                run = self._registry.begin(event.run_id, 0, now, effects)
            else:
                run = self.run(event.run_id)
            was_closed = run.close(event, now, effects)
            self.reaper.mark_used(run, now, effects)
            effects.send(event.session, RunClosed(run.closed, was_closed, run.stopping.stopped))
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal))

    def _evict(self, event: Evict | EvictNode, now: Instant, effects: Effects) -> None:
        try:
            self._checks.reason(event.reason)
            run = self.run(event.run_id)
            if isinstance(event, EvictNode):
                evict_node(run, event, self._checks, now, effects)
            else:
                self.sessions.detach(run.find_evictable(event.rank))
                run.evict(event.rank, event.reason, now, effects)
            self.reaper.mark_used(run, now, effects)
            effects.send(event.session, Evicted())
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal))

    def _forget(self, event: Forget, now: Instant, effects: Effects) -> None:
        try:
            run = self.run(event.run_id)
            if not event.force:
                self.reaper.check_unused(run, now)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal))
            return
        streams = self.sessions.end_all(run.run_id)
        streams += [session for session, (its, _) in self.node_streams.items() if its is run]
        streams += [*run.store.waiters, *self._local.forget(run.local)]
        for session in streams:
            self.node_streams.pop(session, None)
            self._waiting.pop(session, None)
        effects.deliveries.append(
            Delivery(dict.fromkeys(streams, NO_RANKS), Refused(forgotten(run), final=True))
        )
        self.reaper.forget(run, effects, report.forgotten_on_demand(run.run_id))
        effects.send(event.session, RunForgotten())

    # ------------------------------------------------------------------ the store

    def _store(self, event: StoreRequest, now: Instant, effects: Effects) -> None:
        """Carry out an operation on a run's store; a change or a wait creates an unknown run."""
        try:
            self._checks.name("run_id", event.run_id)
            self._registry.check_room(event.run_id, now)
            self._checks.operation(event.operation)
            run = self._registry.find(event.run_id, 0, now)
            run.store.carry_out(event.session, event.operation, now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal))
            return
        # A query of an unknown run does not create it.
        if isinstance(event.operation, Change | Waiting):
            self._registry.register(run, now, effects)
        if event.session in run.store.waiters:
            self._waiting[event.session] = run.store
        self.reaper.mark_used(run, now, effects)

    # ------------------------------------------------------------------ looking up

    def run(self, run_id: str) -> Run:
        """Return the run of this id.

        Raises:
            Refusal: RUN_NOT_FOUND.
        """
        return self._registry.known(run_id)

    def group(self, run_id: str, prefix: str) -> Group:
        """Return the group of this run and prefix.

        Raises:
            Refusal: RUN_NOT_FOUND or BARRIER_NOT_FOUND.
        """
        return self.run(run_id).find_group(prefix)
