"""The way into the core: events and the time go in, effects come out.

The state is changed by :meth:`Coordinator.step` alone. It owns no clock: the driver asks
:meth:`Coordinator.next_deadline` and comes back with a ``Tick``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muster.service.core import report
from muster.service.core.effects import (
    Delivery,
    Effects,
    Evicted,
    EvictionRecord,
    GroupJoined,
    GroupRecord,
    NodeLeft,
    ParticipantRecord,
    Record,
    Refused,
    RoundRecord,
    RunClosed,
    RunForgotten,
    RunRecord,
    SpeakerRecord,
    StoreKeyRecord,
    StoreOperationRecord,
    Welcome,
)
from muster.service.core.events import (
    Abort,
    Arrive,
    ArriveOnce,
    CloseRun,
    Disconnected,
    Event,
    Evict,
    Forget,
    Goodbye,
    Hello,
    JoinGroup,
    JoinRendezvous,
    LeaveRendezvous,
    ProcessInfo,
    SessionId,
    StoreRequest,
    Tick,
)
from muster.service.core.forgetting import Forgetting, over
from muster.service.core.group import Group
from muster.service.core.limits import Limits
from muster.service.core.model import Closed, Decision, Instant, MemberState, Shape
from muster.service.core.operations import Change, Waiting
from muster.service.core.process import Process
from muster.service.core.refusal import Reason, Refusal, limit_exceeded
from muster.service.core.rendezvous import Node, Rendezvous
from muster.service.core.retention import FOR_EVER, Retention
from muster.service.core.run import Run
from muster.service.core.store import Store, Total, Waiter
from muster.service.core.timers import Timers

MOST_GENERATION = 2**31 - 1
"""Far beyond any count of restarts, and within every field that a generation or a round is stored in."""
EPOCH_SHIFT = 32
"""Ordinals are ``epoch << EPOCH_SHIFT | count``, so that a restarted coordinator never gives one again."""


@dataclass(frozen=True, slots=True)
class Session:
    """For whom one stream, or one unary call, speaks."""

    id: SessionId
    run: Run
    processes: dict[int, Process]
    """By rank."""


class Coordinator:
    """All runs, and the only way to change them.

    Args:
        session_ttl: seconds that a lost session may take to come back.
        limits: the bounds.
        retention: how long runs are kept that nobody uses.
        epoch: how often this coordinator's storage has been opened, from 1.
    """

    def __init__(
        self,
        *,
        session_ttl: float = 10.0,
        limits: Limits | None = None,
        retention: Retention = FOR_EVER,
        epoch: int = 1,
    ) -> None:
        self.session_ttl = session_ttl
        self.limits = limits or Limits()
        self.retention = retention
        self.epoch = epoch
        self.runs: dict[str, Run] = {}
        self.sessions: dict[SessionId, Session] = {}
        self.attendances: dict[SessionId, tuple[Run, Node]] = {}
        """The streams of nodes that have, or had, a place in a rendezvous."""
        self._waiting: dict[SessionId, Store] = {}
        """Calls that wait for keys, and where."""
        self._timers: Timers[Group | Process | Rendezvous | Waiter] = Timers()
        self.stored = Total()
        """In the stores of all runs."""
        self.forgetting = Forgetting(self.runs, retention, session_ttl)
        self._last_ordinal = epoch << EPOCH_SHIFT

    # ------------------------------------------------------------------ driving

    def step(self, event: Event, now: Instant, effects: Effects) -> None:
        """Take one event in.

        Args:
            event: what happened.
            now: when.
            effects: is added to: what to persist and then to deliver, in order.
        """
        if type(event) is Arrive:
            self._arrive(event, now, effects)
            return
        match event:
            case Hello():
                self._hello(event, now, effects)
            case JoinGroup():
                self._join(event, now, effects)
            case ArriveOnce():
                self._arrive_once(event, now, effects)
            case Goodbye():
                self._goodbye(event, now, effects)
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
            case Evict():
                self._evict(event, now, effects)
            case Forget():
                self._forget(event, now, effects)
            case StoreRequest():
                self._store(event, now, effects)
            case Tick():
                self._tick(now, effects)
            case _:
                raise TypeError(f"not an event: {event!r}")

    def next_deadline(self) -> float | None:
        """When the next ``Tick`` is wanted, on the monotonic clock; an early one does no harm."""
        times = self._timers.next_time(), self.forgetting.next_time()
        return min((time for time in times if time is not None), default=None)

    def restore(self, records: Iterable[Record], now: Instant) -> None:
        """Take the durable state back, once, before the first event.

        Every process that was there has the session TTL, counted from now, to come back.
        """
        kept: dict[type, list[Record]] = {}
        for record in records:
            kept.setdefault(type(record), []).append(record)
        for record in kept.get(RunRecord, []):
            assert isinstance(record, RunRecord)
            run = self._new_run(record.run_id, record.generation, now, record.closed)
            if record.active_at is not None:
                self.retention.restore(run, record.active_at, now)
            self.runs[record.run_id] = run
        self._restore_rendezvous(kept, now)
        for record in kept.get(EvictionRecord, []):
            assert isinstance(record, EvictionRecord)
            self.runs[record.run_id].evictions[record.rank] = record
        for record in kept.get(GroupRecord, []):
            assert isinstance(record, GroupRecord)
            run = self.runs[record.run_id]
            run.restore_group(record.prefix, record.generation, record.first_sequence)
        decisions = [d for d in kept.get(Decision, []) if isinstance(d, Decision)]
        for decision in sorted(decisions, key=lambda d: d.sequence):
            self.runs[decision.run_id].groups[decision.prefix].restore_decision(decision)
        for record in kept.get(SpeakerRecord, []):
            assert isinstance(record, SpeakerRecord)
            self._restore_speaker(record, now)
        for record in kept.get(StoreKeyRecord, []):
            assert isinstance(record, StoreKeyRecord)
            self.runs[record.run_id].store.restore_key(record)
        for record in kept.get(StoreOperationRecord, []):
            assert isinstance(record, StoreOperationRecord)
            self.runs[record.run_id].store.restore_operation(record)
        for run in self.runs.values():
            for process in run.roster:
                for group in run.groups.values():
                    group.refresh(process.rank)
        self.forgetting.restore(now)

    def _restore_rendezvous(self, kept: dict[type, list[Record]], now: Instant) -> None:
        rounds: dict[str, list[RoundRecord]] = {}
        for record in kept.get(RoundRecord, []):
            assert isinstance(record, RoundRecord)
            rounds.setdefault(record.run_id, []).append(record)
        participants: dict[str, list[ParticipantRecord]] = {}
        for record in kept.get(ParticipantRecord, []):
            assert isinstance(record, ParticipantRecord)
            participants.setdefault(record.run_id, []).append(record)
        for run_id in rounds.keys() | participants.keys():
            rendezvous = self.runs[run_id].rendezvous
            rendezvous.restore(rounds.get(run_id, []), participants.get(run_id, []), now)

    def _restore_speaker(self, record: SpeakerRecord, now: Instant) -> None:
        run = self.runs[record.run_id]
        group = run.groups[record.prefix]
        process = run.roster.find(record.rank, record.incarnation)
        if process is None:
            unary = record.state is MemberState.IDLE
            process = Process(
                run_id=record.run_id,
                rank=record.rank,
                incarnation=record.incarnation,
                ordinal=record.ordinal,
                host=record.host,
                pid=record.pid,
                generation=group.generation,
                unary=unary,
                session=None,
                state=MemberState.DISCONNECTED if unary else record.state,
                since=now.monotonic,
            )
            if group.generation == run.generation:
                run.roster.add(process)
                if process.state is MemberState.DISCONNECTED:
                    self._timers.arm(process, now.monotonic + self.session_ttl)
        group.restore_speaker(process, record.start_sequence, record.shape)

    # ------------------------------------------------------------------ sessions

    def _hello(self, event: Hello, now: Instant, effects: Effects) -> None:
        try:
            self._check_hello(event, now)
            session = self._let_in(event, now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal, final=True))
            return
        ordinals = tuple(process.ordinal for process in session.processes.values())
        effects.send(
            event.session,
            Welcome(self.epoch, self.session_ttl, self.limits.max_payload_bytes, ordinals),
        )
        if session.run.closed is not None:
            effects.send(event.session, session.run.closed)

    def _let_in(self, event: Hello, now: Instant, effects: Effects, unary: bool = False) -> Session:
        """Processes that were checked enter their run, which begins with them if nobody knew it."""
        run = self._run_for(event.run_id, event.generation, now, effects)
        run.admit(event.generation, now, effects)
        processes: dict[int, Process] = {}
        for info in event.processes:
            known = run.roster.find(info.rank, info.incarnation)
            if known is not None:
                self._end_old_session(known, effects)
            ordinal = self._ordinal(info)
            processes[info.rank] = run.enter(info, ordinal, event.session, unary, now, effects)
        session = self.sessions[event.session] = Session(event.session, run, processes)
        self.forgetting.used(run, now, effects)
        return session

    def _ordinal(self, info: ProcessInfo) -> int:
        """What an earlier Welcome gave to the process; a new one at its first hello.

        One of a later epoch was given by a coordinator whose state this one does not have: order anew.
        """
        known = 0 < info.ordinal <= self._last_ordinal
        ordinal = info.ordinal if known else self._last_ordinal + 1
        self._last_ordinal = max(self._last_ordinal, ordinal)
        return ordinal

    def _run_for(self, run_id: str, generation: int, now: Instant, effects: Effects) -> Run:
        """The run of this id, made if there is none."""
        run = self.runs.get(run_id) or self._new_run(run_id, generation, now)
        self._register(run, now, effects)
        return run

    def _register(self, run: Run, now: Instant, effects: Effects) -> None:
        """Know a run from here on, if it is a new one."""
        if run.run_id not in self.runs:
            if (
                len(self.runs) >= self.limits.max_runs
                and (finished := self.forgetting.finished(now)) is not None
            ):
                self.forgetting.forget(
                    finished, effects, report.made_room(finished.run_id, self.limits.max_runs)
                )
            self.runs[run.run_id] = run
            run.keep(now, effects)

    def _new_run(self, run_id: str, generation: int, now: Instant, closed: Closed | None = None) -> Run:
        return Run(run_id, self.limits, self._timers, generation, now, self.stored, closed)

    def _end_old_session(self, process: Process, effects: Effects) -> None:
        """A process connected again before its old stream was seen to break."""
        if process.session is not None:
            effects.send(process.session, Refused(_replaced(process), final=True))

    def _replaced_by(self, event: Hello) -> int:
        """How many open sessions end when this Hello is welcomed, since their processes moved to it."""
        run = self.runs.get(event.run_id)
        if run is None:
            return 0
        known = (run.roster.find(info.rank, info.incarnation) for info in event.processes)
        return len({p.session for p in known if p is not None and p.session is not None})

    def _goodbye(self, event: Goodbye, now: Instant, effects: Effects) -> None:
        session = self.sessions.pop(event.session, None)
        if session is None:
            return
        for process in self._still_its(session):
            process.leave(now.monotonic)
            session.run.gone(process, effects, event.reason)
        session.run.check(now, effects)
        self.forgetting.used(session.run, now, effects)

    def _disconnected(self, event: Disconnected, now: Instant, effects: Effects) -> None:
        if event.session in self.attendances:
            run, node = self.attendances.pop(event.session)
            run.rendezvous.disconnect(node, event.session, now)
            self.forgetting.used(run, now, effects)
        store = self._waiting.pop(event.session, None)
        if store is not None:
            store.forget(event.session)
            self.forgetting.used(self.runs.get(store.run_id), now, effects)
        session = self.sessions.pop(event.session, None)
        if session is None:
            return
        for process in self._still_its(session):
            process.disconnect(now.monotonic)
            self._timers.arm(process, now.monotonic + self.session_ttl)
        self.forgetting.used(session.run, now, effects)

    def _still_its(self, session: Session) -> list[Process]:
        """The session's processes that belong to the run and have not moved to another session."""
        return [p for p in session.processes.values() if p.session == session.id and session.run.owns(p)]

    def _tick(self, now: Instant, effects: Effects) -> None:
        runs: dict[str, Run] = {}
        groups: list[Group] = []
        for item in self._timers.pop_due(now.monotonic):
            if isinstance(item, Group):
                groups.append(item)
            elif isinstance(item, Rendezvous):
                item.on_time(now, effects)
                self.forgetting.review_in_time(self.runs.get(item.run_id))
            elif isinstance(item, Waiter):
                item.store.on_time(item, effects)
            elif (run := self._expire(item, now, effects)) is not None:
                runs[run.run_id] = run
        # All who died at once are known before a barrier fails, so that its report names them all.
        for run in runs.values():
            run.check(now, effects)
            self.forgetting.review_in_time(run)
        for group in groups:
            waited = group.open
            group.on_time(now, effects)
            if group.open is not waited:
                self.forgetting.used(self.runs.get(group.run_id), now, effects)
        self.forgetting.review(now, effects)

    def _expire(self, process: Process, now: Instant, effects: Effects) -> Run | None:
        """Give a process up whose session did not come back, if that is still so."""
        run = self.runs.get(process.run_id)
        if run is None or not run.owns(process) or process.state is not MemberState.DISCONNECTED:
            return None
        due = process.since + self.session_ttl
        if now.monotonic < due:
            self._timers.arm(process, due)
            return None
        process.expire()
        run.gone(process, effects)
        return run

    # ------------------------------------------------------------------ barriers

    def _join(self, event: JoinGroup, now: Instant, effects: Effects) -> None:
        try:
            session = self._session(event.session)
            shape = self._check_shape(event)
            self._check_count("ranks", event.ranks, session)
            processes = [self._process(session, rank) for rank in event.ranks or session.processes]
            positions = session.run.join(processes, event.prefix, shape, now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal, event.prefix))
            return
        effects.send(event.session, GroupJoined(event.prefix, positions))

    def _arrive_once(self, event: ArriveOnce, now: Instant, effects: Effects) -> None:
        hello = Hello(event.session, event.run_id, event.generation, (event.process,))
        try:
            self._check_hello(hello, now)
            shape = self._check_shape(event)
            self._check_timeout(event.timeout)
            known = self.runs.get(event.run_id) or self._new_run(event.run_id, event.generation, now)
            past = known.check_call(event, shape)
            if past is not None:
                effects.send(event.session, past)
                return
            session = self._let_in(hello, now, effects, unary=True)
            session.run.join(list(session.processes.values()), event.prefix, shape, now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal, event.prefix))
            # A net: what was checked is not refused later. Were it, its arrival must not count.
            self._disconnected(Disconnected(event.session), now, effects)
            return
        arrive = Arrive(event.session, event.prefix, event.sequence, event.timeout, (event.arrival,))
        self._arrive(arrive, now, effects)

    def _arrive(self, event: Arrive, now: Instant, effects: Effects) -> None:
        try:
            session = self._session(event.session)
            self._check_count("arrivals", event.arrivals, session)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal, event.prefix, event.sequence))
            return
        for arrival in event.arrivals:
            try:
                process = self._process(session, arrival.rank)
                group = session.run.groups.get(event.prefix)
                if group is None:
                    raise Refusal(
                        Reason.NOT_JOINED,
                        f'{process} arrived at group "{report.shown(event.prefix)}" of run '
                        f"{session.run.run_id} without having joined it. Send JoinGroup first.",
                    )
                self._check_timeout(event.timeout)
                after, waited = event.progress_after, event.waited
                group.arrive(process, event.sequence, event.timeout, arrival, now, effects, after, waited)
            except Refusal as refusal:
                effects.send(event.session, Refused(refusal, event.prefix, event.sequence, arrival.rank))

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
            self.forgetting.used(self.runs[event.run_id], now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal, event.prefix, event.sequence))
            return
        effects.send(event.session, decision)

    # ------------------------------------------------------------------ nodes, and the end of a run

    def _join_rendezvous(self, event: JoinRendezvous, now: Instant, effects: Effects) -> None:
        try:
            self._check_node(event, now)
            run = self.runs.get(event.run_id) or self._new_run(event.run_id, 0, now)
            node = run.join_rendezvous(event, now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal, final=True))
            return
        self._register(run, now, effects)
        self.attendances[event.session] = run, node
        self.forgetting.used(run, now, effects)

    def _leave_rendezvous(self, event: LeaveRendezvous, now: Instant, effects: Effects) -> None:
        run = self.runs.get(event.run_id)
        left = run is not None and run.rendezvous.leave(event.incarnation, event.reason, now, effects)
        self.forgetting.used(run, now, effects)
        effects.send(event.session, NodeLeft(left))

    def _close(self, event: CloseRun, now: Instant, effects: Effects) -> None:
        try:
            self._check_name("by", event.by)
            self._check_reason(event.reason)
            if event.create:
                self._check_run(event.run_id, now)
                run = self._run_for(event.run_id, 0, now, effects)
            else:
                run = self.run(event.run_id)
            was_closed = run.close(event, now, effects)
            assert run.closed is not None
            self.forgetting.used(run, now, effects)
            effects.send(event.session, RunClosed(run.closed, was_closed))
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal))

    def _evict(self, event: Evict, now: Instant, effects: Effects) -> None:
        try:
            self._check_reason(event.reason)
            run = self.run(event.run_id)
            run.evict(event.rank, event.reason, now, effects)
            self.forgetting.used(run, now, effects)
            effects.send(event.session, Evicted())
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal))

    def _forget(self, event: Forget, now: Instant, effects: Effects) -> None:
        try:
            run = self.run(event.run_id)
            if not event.force:
                self.forgetting.check_unused(run, now)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal))
            return
        streams = self._streams_of(run)
        for session in streams:
            self.sessions.pop(session, None)
            self.attendances.pop(session, None)
            self._waiting.pop(session, None)
        effects.deliveries.append(Delivery(streams, Refused(over(run), final=True)))
        self.forgetting.forget(run, effects, report.forgotten_on_demand(run.run_id))
        effects.send(event.session, RunForgotten())

    def _streams_of(self, run: Run) -> list[SessionId]:
        """Every stream, and every call that waits, that has to do with a run."""
        streams = [session.id for session in self.sessions.values() if session.run is run]
        streams += [session for session, (its, _) in self.attendances.items() if its is run]
        return streams + list(run.store.waiters)

    # ------------------------------------------------------------------ the store

    def _store(self, event: StoreRequest, now: Instant, effects: Effects) -> None:
        """An operation on a run's store; a run that nobody knew begins with it."""
        try:
            self._check_store_request(event, now)
            run = self.runs.get(event.run_id) or self._new_run(event.run_id, 0, now)
            run.store.carry_out(event.session, event.operation, now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal))
            return
        # A mere look at a run that nobody knew does not make one.
        if isinstance(event.operation, Change | Waiting):
            self._register(run, now, effects)
        if event.session in run.store.waiters:
            self._waiting[event.session] = run.store
        self.forgetting.used(run, now, effects)

    # ------------------------------------------------------------------ looking up

    def run(self, run_id: str) -> Run:
        """The run of this id.

        Raises:
            Refusal: RUN_NOT_FOUND.
        """
        run = self.runs.get(run_id)
        if run is None:
            raise Refusal(
                Reason.RUN_NOT_FOUND,
                f'no run "{report.shown(run_id)}" is known to this coordinator. '
                "List the runs with: muster get runs",
            )
        return run

    def group(self, run_id: str, prefix: str) -> Group:
        """The group of this run and prefix.

        Raises:
            Refusal: RUN_NOT_FOUND or BARRIER_NOT_FOUND.
        """
        run = self.run(run_id)
        group = run.groups.get(prefix)
        if group is None:
            known = ", ".join(f'"{name}"' for name in sorted(run.groups)[:10]) or "none yet"
            raise Refusal(
                Reason.BARRIER_NOT_FOUND,
                f'run {run_id} has no group "{report.shown(prefix)}"; it has {known}.',
            )
        return group

    def _session(self, session: SessionId) -> Session:
        found = self.sessions.get(session)
        if found is None:
            raise Refusal(
                Reason.HELLO_REQUIRED,
                "the first message of a session must be a Hello that was welcomed.",
            )
        return found

    def _process(self, session: Session, rank: int) -> Process:
        process = session.processes.get(rank)
        if process is None:
            raise Refusal(
                Reason.RANK_NOT_IN_SESSION,
                f"rank {rank} is not one of those that this session said hello for: "
                f"{report.ranges(session.processes)}. Name every rank in the Hello.",
            )
        if process.generation != session.run.generation:
            raise session.run.stale(process.generation)
        if process.session != session.id:
            raise _replaced(process)
        return process

    # ------------------------------------------------------------------ checking

    def _check_hello(self, event: Hello, now: Instant) -> None:
        if event.session in self.sessions:
            raise Refusal(Reason.HELLO_REPEATED, "this session has said hello already; open another one.")
        self._check_sessions(self._replaced_by(event))
        self._check_run(event.run_id, now)
        if event.generation > MOST_GENERATION:
            raise _invalid("generation", event.generation, f"it must be from 0 to {MOST_GENERATION}")
        if not event.processes:
            raise _invalid("processes", "empty", "a Hello names at least one process")
        ranks = {info.rank for info in event.processes}
        if len(ranks) < len(event.processes):
            raise _invalid("processes", report.ranges(ranks), "a rank may be named only once")
        for info in event.processes:
            self._check_rank(info.rank)
            self._check_name("incarnation", info.incarnation)
            self._check_name("host", info.host)
            if info.pid < 0:
                raise _invalid("pid", info.pid, "a process id is not negative")

        if event.run_id in self.runs:
            for info in event.processes:
                self.runs[event.run_id].check_newcomer(event.generation, info)
                self.runs[event.run_id].check_room(event.generation, info)

    def _check_node(self, event: JoinRendezvous, now: Instant) -> None:
        run = self.runs.get(event.run_id)
        known = run.rendezvous.find(event.node.incarnation) if run is not None else None
        self._check_sessions(known is not None and known.session is not None)
        # A place outlives its stream for the keep-alive timeout, so open streams alone do not bound them.
        places = len(run.rendezvous) if run is not None else 0
        if known is None and places >= self.limits.max_sessions:
            raise limit_exceeded(
                "max_sessions",
                self.limits.max_sessions,
                f"{places} nodes have a place in the rendezvous of run {event.run_id} already, those that "
                "are away among them",
            )
        self._check_run(event.run_id, now)
        self._check_name("incarnation", event.node.incarnation)
        self._check_name("address", event.node.address)
        if event.node.pid < 0:
            raise _invalid("pid", event.node.pid, "a process id is not negative")
        if event.attempt < 1:
            raise _invalid("attempt", event.attempt, "attempts are counted from 1")
        settings, most = event.settings, self.limits.max_world_size
        if not 1 <= settings.min_nodes <= most:
            raise _invalid("min_nodes", settings.min_nodes, f"it must be from 1 to {most}")
        if not settings.min_nodes <= settings.max_nodes <= most:
            raise _invalid(
                "max_nodes",
                settings.max_nodes,
                f"it must be from min_nodes, which is {settings.min_nodes}, to {most}",
            )
        self._check_timeout(settings.join_timeout, "join_timeout")
        self._check_timeout(settings.last_call_timeout, "last_call_timeout")
        self._check_timeout(settings.keep_alive_timeout, "keep_alive_timeout")

    def _check_sessions(self, replaced: int) -> None:
        """There must be room for one more stream; it may end some that are open."""
        most, count = self.limits.max_sessions, len(self.sessions) + len(self.attendances)
        if count - replaced >= most:
            raise limit_exceeded("max_sessions", most, f"{count} sessions are open")

    def _check_run(self, run_id: str, now: Instant) -> None:
        self._check_name("run_id", run_id)
        known = len(self.runs)
        if (
            run_id not in self.runs
            and known >= self.limits.max_runs
            and self.forgetting.finished(now) is None
        ):
            raise limit_exceeded(
                "max_runs",
                self.limits.max_runs,
                f"{known} runs are known already, and none has been closed and out of use for ten minutes",
            )

    def _check_reason(self, reason: str) -> None:
        size, most = len(reason.encode("utf-8", "replace")), self.limits.max_reason_bytes
        if size > most:
            raise _invalid("reason", f"{size:,} bytes", f"it may have {most:,}")

    def _check_store_request(self, event: StoreRequest, now: Instant) -> None:
        self._check_run(event.run_id, now)
        operation = event.operation
        if isinstance(operation, Waiting) and operation.timeout:
            self._check_timeout(operation.timeout)
        if isinstance(operation, Change) and operation.id is not None:
            self._check_name("operation.client", operation.id.client)
            if operation.id.number < 1:
                raise _invalid("operation.number", operation.id.number, "a client's operations count from 1")

    def _check_shape(self, event: JoinGroup | ArriveOnce) -> Shape:
        self._check_name("prefix", event.prefix)
        world_size, participants = event.world_size, event.participants
        if len(participants) > self.limits.max_world_size:
            given = f"{len(participants):,} ranks"
            raise _invalid("participants", given, f"there may be {self.limits.max_world_size:,}")
        if not 1 <= world_size <= self.limits.max_world_size:
            raise _invalid("world_size", world_size, f"it must be from 1 to {self.limits.max_world_size}")
        ordered = tuple(sorted(set(participants)))
        if len(ordered) < len(participants):
            raise _invalid("participants", list(participants)[:20], "a rank may be named only once")
        outside = [rank for rank in ordered if not 0 <= rank < world_size]
        if outside:
            raise _invalid("participants", outside[:20], f"ranks must be from 0 to {world_size - 1}")
        return Shape(world_size, () if len(ordered) == world_size else ordered)

    def _check_count(self, field: str, given: Sequence[object], session: Session) -> None:
        if len(given) > len(session.processes):
            raise _invalid(
                field, f"{len(given):,} ranks", f"this session speaks for {len(session.processes)}"
            )

    def _check_timeout(self, timeout: float, field: str = "timeout") -> None:
        most = self.limits.max_timeout_seconds
        if not 0 < timeout <= most:
            raise _invalid(field, f"{timeout:g} s", f"it must be above 0 and at most {most:g} s")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.limits.max_world_size:
            raise _invalid("rank", rank, f"it must be from 0 to {self.limits.max_world_size - 1}")

    def _check_name(self, field: str, value: str) -> None:
        size, most = len(value.encode("utf-8", "replace")), self.limits.max_name_bytes
        if not value:
            raise _invalid(field, '""', "it must not be empty")
        if size > most:
            raise _invalid(
                field,
                f'"{report.printable(value[:20])}…"',
                f"it has {size:,} bytes and may have {most}",
            )
        if not value.isprintable():
            raise _invalid(field, f'"{report.printable(value)}"', "control characters are not allowed")


def _replaced(process: Process) -> Refusal:
    return Refusal(Reason.SESSION_REPLACED, f"{process} has opened another session; this one is over.")


def _invalid(field: str, value: object, why: str) -> Refusal:
    return Refusal(Reason.INVALID_ARGUMENT, f"{field} = {value}: {why}.", field=field)
