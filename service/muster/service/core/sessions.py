"""Which processes each stream, and each unary call, speaks for.

A worker's stream speaks for the processes that its Hello names, until it ends. A relay's stream starts with
no process. Its processes enter and part one by one, and the end of one does not affect the others.
"""

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace

from muster.service.core.checks import Checks, invalid
from muster.service.core.membership.outage import Outages
from muster.service.core.membership.process import Process
from muster.service.core.membership.refusals import stale_generation
from muster.service.core.registry import Registry
from muster.service.core.retention.reaper import RunReaper
from muster.service.core.run import Run
from muster.service.core.timers import WakeUps
from muster.service.core.vocabulary.effects import (
    Effects,
    Entry,
    ProcessesAdded,
    ProcessesRemoved,
    Refused,
    Welcome,
)
from muster.service.core.vocabulary.events import (
    AddProcesses,
    Arrival,
    Disconnected,
    Goodbye,
    Hello,
    ProcessInfo,
    RemoveProcesses,
    Stepped,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Instant, SessionId, Step
from muster.service.core.vocabulary.refusal import Reason, Refusal, limit_exceeded
from muster.service.core.vocabulary.report import ranges

EPOCH_SHIFT = 32
"""Ordinals are ``epoch << EPOCH_SHIFT | count``, so that a restarted coordinator never gives one again."""


@dataclass(slots=True, eq=False)
class Session:
    """One stream, or one unary call."""

    id: SessionId
    run: Run
    """A relay's session may have an unregistered run, until its first process enters."""
    generation: int
    relay: str = ""
    """The name of the relay; empty: a worker's stream."""
    processes: dict[int, Process] = field(default_factory=dict)
    """By rank; on a relay's stream, only those that have not been detached."""


class Sessions:
    """Admits processes, and records their end.

    Args:
        registry: creates their runs.
        reaper: learns that a run is used.
        limits: the bounds.
        timers: wakes processes whose connection broke.
        ttl: seconds that they may take to come back.
        reset_grace: the same, if the connection of a process itself ended.
        epoch: how often a coordinator has opened this storage, from 1.
        nodes: the streams of nodes, which count towards the same bound.
    """

    def __init__(
        self,
        registry: Registry,
        reaper: RunReaper,
        limits: Limits,
        timers: WakeUps[Process],
        ttl: float,
        reset_grace: float,
        epoch: int,
        nodes: Sized,
    ) -> None:
        self.open: dict[SessionId, Session] = {}
        self.relayed = 0
        """How many processes speak through relays."""
        self._registry = registry
        self._reaper = reaper
        self._limits = limits
        self._checks = Checks(limits)
        self._timers = timers
        self._ttl = ttl
        self._reset_grace = reset_grace
        self.outages = Outages()
        """The lost connections."""
        self._epoch = epoch
        self._nodes = nodes
        self._last_ordinal = epoch << EPOCH_SHIFT

    def __len__(self) -> int:
        return len(self.open)

    # ------------------------------------------------------------------ streams

    def hello(self, event: Hello, now: Instant, effects: Effects) -> None:
        """Open a session for the processes of a Hello, or for a relay."""
        try:
            self.check_hello(event, now)
            session = self._open_relay_stream(event, now) if event.relay else self.admit(event, now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal, final=True))
            return
        ordinals = tuple(process.ordinal for process in session.processes.values())
        effects.send(event.session, Welcome(self._epoch, self._ttl, self._limits.max_payload_bytes, ordinals))
        if session.processes:
            self._send_run_state(session, (), now, effects)

    def check_hello(self, event: Hello, now: Instant) -> None:
        """Refuse a Hello before it changes anything.

        Raises:
            Refusal: as a check, or for one of its processes.
        """
        if event.session in self.open:
            raise Refusal(Reason.HELLO_REPEATED, "this session has said hello already; open another one.")
        run = self._registry.find(event.run_id, event.generation, now)
        self.check_room(_count_replaced(event, run))
        self._checks.name("run_id", event.run_id)
        if event.relay:
            self._check_relay_hello(event)
            return
        self._registry.check_room(event.run_id, now)
        self._checks.generation(event.generation)
        self._checks.processes(event.processes)
        for info in event.processes:
            run.check_newcomer(event.generation, info)
            run.check_room(event.generation, info)

    def _check_relay_hello(self, event: Hello) -> None:
        self._checks.name("relay", event.relay)
        self._checks.generation(event.generation)
        if event.processes:
            named = f"{len(event.processes):,} of them"
            raise invalid("processes", named, "a relay's Hello names none; AddProcesses names them")

    def check_room(self, replaced: int) -> None:
        """Refuse a stream beyond the bound; ``replaced`` open sessions end with it.

        Raises:
            Refusal: LIMIT_EXCEEDED.
        """
        most, count = self._limits.max_sessions, len(self.open) + len(self._nodes)
        if count - replaced >= most:
            raise limit_exceeded("max_sessions", most, f"{count} sessions are open")

    def _open_relay_stream(self, event: Hello, now: Instant) -> Session:
        run = self._registry.find(event.run_id, event.generation, now)
        relay_session = self.open[event.session] = Session(event.session, run, event.generation, event.relay)
        return relay_session

    def admit(self, event: Hello, now: Instant, effects: Effects, unary: bool = False) -> Session:
        """Admit checked processes to their run, which is created if it is new.

        Raises:
            Refusal: STALE_GENERATION.
        """
        run = self._registry.begin(event.run_id, event.generation, now, effects)
        run.admit_generation(event.generation, now, effects)
        session = Session(event.session, run, event.generation)
        for info in event.processes:
            self._add_process(session, info, now, effects, unary)
        self.open[event.session] = session
        self._reaper.mark_used(run, now, effects)
        return session

    def _add_process(
        self, session: Session, info: ProcessInfo, now: Instant, effects: Effects, unary: bool = False
    ) -> Process:
        known = session.run.roster.find(info.rank, info.incarnation)
        if known is not None and known.session not in (None, session.id):
            self._end_replaced_session(known, effects)
        ordinal = self._ordinal(info)
        process = session.run.add_process(info, ordinal, session.id, unary, now, effects, relay=session.relay)
        session.processes[info.rank] = process
        return process

    def _ordinal(self, info: ProcessInfo) -> int:
        """Return the ordinal that an earlier Welcome gave to the process, or a new one.

        An ordinal of a later epoch comes from a coordinator whose state was lost, so it is replaced.
        """
        known = 0 < info.ordinal <= self._last_ordinal
        ordinal = info.ordinal if known else self._last_ordinal + 1
        self._last_ordinal = max(self._last_ordinal, ordinal)
        return ordinal

    def _end_replaced_session(self, process: Process, effects: Effects) -> None:
        """End the old session of a process that reconnected; on a relay's stream, only its own part."""
        assert process.session is not None
        final = not process.relay
        rank = None if final else process.rank
        effects.send(process.session, Refused(_replaced(process), rank=rank, final=final))
        self.detach((process,))

    def goodbye(self, event: Goodbye, now: Instant, effects: Effects) -> None:
        """Record that all processes of a stream leave on purpose."""
        session = self._close(event.session)
        if session is not None:
            self._mark_left(session, session.processes.values(), event.reason, now, effects)

    def disconnected(self, event: Disconnected, now: Instant, effects: Effects) -> None:
        """Record that a stream broke. A relay's connection says nothing about the processes behind it."""
        session = self._close(event.session)
        if session is not None:
            grace = self._reset_grace if event.reset and not session.relay else self._ttl
            self._mark_disconnected(session, session.processes.values(), grace, now, effects)

    def end_all(self, run_id: str) -> list[SessionId]:
        """Close all sessions of a run, and return their streams."""
        ended = [session.id for session in self.open.values() if session.run.run_id == run_id]
        for session in ended:
            self._close(session)
        return ended

    def _close(self, stream: SessionId) -> Session | None:
        session = self.open.pop(stream, None)
        if session is not None and session.relay:
            self.relayed -= len(session.processes)
        return session

    # ------------------------------------------------------------------ relays

    def add_processes(self, event: AddProcesses, now: Instant, effects: Effects) -> None:
        """Add processes to a relay's stream. Each is checked as a Hello for it alone would be."""
        try:
            relay_session = self._relay_session(event.session)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal))
            return
        entries: dict[int, Entry] = {}
        answers = [self._entry(relay_session, info, entries, now, effects) for info in event.processes]
        effects.send(relay_session.id, ProcessesAdded(tuple(answers)))
        admitted = [rank for rank, entry in entries.items() if entry.refusal is None]
        if admitted:
            self._reaper.mark_used(relay_session.run, now, effects)
            self._send_run_state(relay_session, admitted, now, effects)

    @staticmethod
    def _send_run_state(session: Session, ranks: Iterable[int], now: Instant, effects: Effects) -> None:
        """Tell new processes that their run is closed, or that a save is requested."""
        for message in (session.run.closed, session.run.saving.asked(now)):
            if message is not None:
                effects.send(session.id, message, ranks)

    def _entry(
        self,
        relay_session: Session,
        info: ProcessInfo,
        before: dict[int, Entry],
        now: Instant,
        effects: Effects,
    ) -> Entry:
        """Add one process of an AddProcesses. ``before`` has the entries of the ranks named before it."""
        if info.rank in before:
            return Entry(refusal=invalid("processes", info.rank, "a rank may be named only once"))
        try:
            self._check_entry(relay_session, info, now)
            entry = Entry(self._admit_process(relay_session, info, now, effects).ordinal)
        except Refusal as refusal:
            entry = Entry(refusal=refusal)
        before[info.rank] = entry
        return entry

    def _check_entry(self, relay_session: Session, info: ProcessInfo, now: Instant) -> None:
        self._checks.process(info)
        self._registry.check_room(relay_session.run.run_id, now)
        run = self._registry.find(relay_session.run.run_id, relay_session.generation, now)
        run.check_newcomer(relay_session.generation, info)
        run.check_room(relay_session.generation, info)
        known = run.roster.find(info.rank, info.incarnation)
        most = self._limits.max_relayed_processes
        moves = known is not None and known.session is not None and bool(known.relay)
        if self.relayed - moves >= most:
            counted = f"{self.relayed} processes speak through relays"
            raise limit_exceeded("max_relayed_processes", most, counted)
        holder = relay_session.processes.get(info.rank)
        if holder is not None and holder is not known and run.is_current(holder):
            raise invalid(
                "rank",
                info.rank,
                f"{holder} speaks for it on this stream. Remove it first, or use another stream",
            )

    def _admit_process(
        self, relay_session: Session, info: ProcessInfo, now: Instant, effects: Effects
    ) -> Process:
        run = self._registry.begin(relay_session.run.run_id, relay_session.generation, now, effects)
        run.admit_generation(relay_session.generation, now, effects)
        if run is not relay_session.run:
            # The run was removed and created again: the processes here belong to the old one.
            for rank in list(relay_session.processes):
                self._detach_rank(relay_session, rank)
            relay_session.run = run
        more = info.rank not in relay_session.processes
        process = self._add_process(relay_session, info, now, effects)
        self.relayed += more
        return process

    def remove_processes(self, event: RemoveProcesses, now: Instant, effects: Effects) -> None:
        """Remove processes from a relay's stream; other ranks are ignored."""
        try:
            relay_session = self._relay_session(event.session)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal))
            return
        detached = [p for rank in event.ranks if (p := self._detach_rank(relay_session, rank)) is not None]
        if event.goodbye is None:
            self._mark_disconnected(relay_session, detached, self._ttl, now, effects)
        else:
            self._mark_left(relay_session, detached, event.goodbye, now, effects)
        effects.send(relay_session.id, ProcessesRemoved(event.ranks))

    def record_steps(self, event: Stepped, now: Instant, effects: Effects) -> None:
        """Record the training steps of processes; evicted ones are ignored."""
        try:
            session = self.of(event.session)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal))
            return
        for rank, number in event.steps:
            process = session.processes.get(rank)
            if process is not None and (process.step is None or process.step.number != number):
                process.step = Step(number, now.monotonic)

    def detach(self, processes: Iterable[Process]) -> None:
        """Remove evicted or replaced processes from their relays' streams."""
        for process in processes:
            if process.relay and process.session is not None:
                self._detach_rank(self.open[process.session], process.rank)

    def _detach_rank(self, relay_session: Session, rank: int) -> Process | None:
        process = relay_session.processes.pop(rank, None)
        self.relayed -= process is not None
        return process

    def _relay_session(self, stream: SessionId) -> Session:
        relay_session = self.of(stream)
        if not relay_session.relay:
            raise Refusal(
                Reason.INVALID_ARGUMENT,
                "AddProcesses and RemoveProcesses are for a relay, and the Hello of this session named none. "
                "Open a session with Hello.relay, or one of its own for each process.",
            )
        return relay_session

    # ------------------------------------------------------------------ going

    def _mark_left(
        self, session: Session, processes: Iterable[Process], reason: str, now: Instant, effects: Effects
    ) -> None:
        run = session.run
        leaving = list(processes)
        for process in _still_attached(session, leaving):
            process.leave(now.monotonic)
            run.mark_gone(process, effects, reason)
        if leaving:
            run.fail_barriers_of_gone_ranks(now, effects)
            self._reaper.mark_used(run, now, effects)

    def _mark_disconnected(
        self, session: Session, processes: Iterable[Process], grace: float, now: Instant, effects: Effects
    ) -> None:
        lost = list(processes)
        for process in _still_attached(session, lost):
            process.disconnect(now.monotonic, grace, self._ttl, self.outages.at(now.monotonic))
            self._timers.arm(process, process.back_by)
        if lost:
            self._reaper.mark_used(session.run, now, effects)

    # ------------------------------------------------------------------ looking up

    def of(self, stream: SessionId) -> Session:
        """Return the session of a stream.

        Raises:
            Refusal: HELLO_REQUIRED.
        """
        found = self.open.get(stream)
        if found is None:
            raise Refusal(
                Reason.HELLO_REQUIRED,
                "the first message of a session must be a Hello that was welcomed.",
            )
        return found

    def process(self, session: Session, rank: int) -> Process:
        """Return the process that speaks for a rank on a stream.

        Raises:
            Refusal: RANK_NOT_IN_SESSION, STALE_GENERATION or SESSION_REPLACED.
        """
        process = session.processes.get(rank)
        if process is None:
            raise _not_here(session, rank)
        if process.generation != session.run.generation:
            raise stale_generation(session.run.run_id, process.generation, session.run.generation)
        if process.session != session.id:
            raise _replaced(process)
        return process

    def refuse(self, stream: SessionId, refused: Refused, ranks: Iterable[int], effects: Effects) -> None:
        """Tell a stream that a whole request was refused; a relay's stream hears it for each named rank.

        A refusal of a rank without a prefix would evict it, so such a refusal names no rank.
        """
        session = self.open.get(stream)
        named = dict.fromkeys(ranks) if session is not None and session.relay and refused.prefix else None
        for rank in named or [None]:
            effects.send(stream, replace(refused, rank=rank))

    def check_count(self, session: Session, field: str, given: Sequence[int] | Sequence[Arrival]) -> None:
        """Refuse a message that would be answered more often than its session has ranks.

        A relay may name ranks that were evicted meanwhile, which must not affect the others.

        Raises:
            Refusal: INVALID_ARGUMENT.
        """
        if not session.relay:
            if len(given) > len(session.processes):
                speaks_for = f"this session speaks for {len(session.processes)}"
                raise invalid(field, f"{len(given):,} ranks", speaks_for)
        elif len({one if isinstance(one, int) else one.rank for one in given}) < len(given):
            raise invalid(field, f"{len(given):,} ranks", "a rank may be named only once")


def _still_attached(session: Session, processes: Iterable[Process]) -> list[Process]:
    """Return the processes that are still in the run and have not moved to another session."""
    return [p for p in processes if p.session == session.id and session.run.is_current(p)]


def _count_replaced(event: Hello, run: Run) -> int:
    """Return how many open sessions this Hello ends, because their processes move to it."""
    known = (run.roster.find(info.rank, info.incarnation) for info in event.processes)
    return len({p.session for p in known if p is not None and p.session is not None and not p.relay})


def _replaced(process: Process) -> Refusal:
    return Refusal(Reason.SESSION_REPLACED, f"{process} has opened another session; this one is over.")


def _not_here(session: Session, rank: int) -> Refusal:
    if session.relay:
        return Refusal(
            Reason.RANK_NOT_IN_SESSION,
            f"nobody speaks for rank {rank} on this stream, or no more. Send AddProcesses first.",
        )
    return Refusal(
        Reason.RANK_NOT_IN_SESSION,
        f"rank {rank} is not one of those that this session said hello for: "
        f"{ranges(session.processes)}. Name every rank in the Hello.",
    )
