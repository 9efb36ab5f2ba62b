"""Feeds events to the core, commits its records and delivers its messages.

Invariant 2 (durable before delivered) holds because only this module delivers, and always in these steps:

1. The driver takes events in batches, in the order of their arrival.
2. It commits the records of a batch at once, all or nothing.
3. Only then it delivers the batch's messages, reports its decisions and answers its queries.
4. Meanwhile the next batch gathers. The driver commits it after delivering the batch before.
5. If a commit fails, the driver delivers nothing more and the coordinator stops: the messages are not on
   disk, and a restarted coordinator may decide otherwise.
6. If a step of the core or an answer raises, the driver commits and delivers nothing of its batch, which has
   half of a step. A commit in flight belongs to an earlier batch, and that one is delivered.
7. The driver delivers and answers only while no other replica can lead. Otherwise the leader's state may
   already differ, even where no commit is needed.
"""

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from muster.service.clock import Clock
from muster.service.core.coordinator import Coordinator
from muster.service.core.elapsed import RECONNECT_GRACE
from muster.service.core.retention.retention import FOR_EVER, Retention
from muster.service.core.vocabulary.effects import NO_RANKS, Effects, Message, Notice, ProbeRequest
from muster.service.core.vocabulary.events import Event, Tick
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, Instant, SessionId
from muster.service.core.vocabulary.records import RoundRecord, StoredRecord
from muster.service.core.vocabulary.refusal import Refusal
from muster.service.draining import DRAINING
from muster.service.storage import codec
from muster.service.storage.engine import Engine, StorageError

T = TypeVar("T")

LATE = 1.0
"""Seconds. If a timer fires later than that, this process stood still."""
MAX_PUT_OFF = 3
"""Limit of postponed ticks, so that time passes even in a process that is always late."""
COMMITS_REMEMBERED = 128
"""Number of commits from which the present commit time is computed."""


class Sink(Protocol):
    """Receives the messages of one session."""

    def deliver(self, outgoing: "Outgoing", ranks: AbstractSet[int] = NO_RANKS) -> None:
        """Take a message, for these ranks of the session or for all; must not block."""
        ...


class Outgoing:
    """One message to any number of sessions, encoded at most once.

    Args:
        message: the message.
        encode: puts the message on the wire.
    """

    def __init__(self, message: Message, encode: Callable[[Message], bytes]) -> None:
        self.message = message
        self._encode = encode

    @cached_property
    def data(self) -> bytes:
        """The bytes of the message on the wire."""
        return self._encode(self.message)


class Observer(Protocol):
    """Is told after the commit what happened."""

    def decided(self, decision: Decision) -> None:
        """Take note of the decision of a barrier."""
        ...

    def round_completed(self, record: RoundRecord) -> None:
        """Take note of a complete rendezvous round."""
        ...

    def noticed(self, notice: Notice) -> None:
        """Take note of an event that an operator may want to know."""
        ...

    def forgotten(self, run_id: str) -> None:
        """Take note that a run was removed."""
        ...

    def committed(self, seconds: float) -> None:
        """Take note that a batch of records is durable."""
        ...


@dataclass(frozen=True, slots=True)
class _Query:
    ask: Callable[[Coordinator, Instant], Any]
    answer: "asyncio.Future[Any]"


@dataclass(slots=True)
class _Batch:
    effects: Effects = field(default_factory=Effects)
    answers: list[Callable[[], None]] = field(default_factory=list)
    wakes_watchers: bool = False
    """Whether the batch has an event. A query changes nothing, so it must not wake other watchers."""

    @property
    def empty(self) -> bool:
        effects = self.effects
        said = effects.deliveries or effects.notices or effects.probes
        return not (effects.records or said or self.answers or self.wakes_watchers)


class Driver:
    """Owns the core, its storage and its timer, on one event loop.

    Args:
        engine: an engine that has not been opened.
        clock: tells the time.
        observer: is told of decisions.
        encode: puts a message on the wire.
        session_ttl: seconds that a process may take to come back after its stream was lost.
        reset_grace: the same, if the connection of a process or a node itself ended.
        limits: the coordinator's bounds.
        retention: for how long unused runs are kept.
        decode: decodes the engine's rows.

    Raises:
        StorageError: the state cannot be opened or read.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Clock,
        observer: Observer,
        encode: Callable[[Message], bytes],
        session_ttl: float,
        reset_grace: float = 3.0,
        limits: Limits,
        retention: Retention = FOR_EVER,
        decode: Callable[[Iterable[tuple[bytes, bytes]]], Iterable[StoredRecord]] = codec.decode_all,
    ) -> None:
        epoch = engine.open()
        self.coordinator = Coordinator(
            session_ttl=session_ttl,
            reset_grace=reset_grace,
            limits=limits,
            retention=retention,
            epoch=epoch,
        )
        try:
            with _gc_paused():
                self.coordinator.restore(decode(engine.scan()), clock.now())
        except KeyError as error:
            raise StorageError(
                f"the stored state is not whole: rows speak of {error}, which has no row of its own. "
                "It was damaged; restore a backup, or give --state another path."
            ) from error
        self._engine = engine
        self._clock = clock
        self._observer = observer
        self._encode = encode
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="muster-storage")
        self._loop = asyncio.get_running_loop()
        self._inbox: list[Event | _Query] = []
        self._pump_scheduled = False
        self._batch = _Batch()
        self._committing_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._no_tick_before = float("-inf")
        """After a pause of this process: the time until which queued input is read first."""
        self._put_off = 0
        """How often the next tick was postponed."""
        self._serves = False
        self._sinks: dict[SessionId, Sink] = {}
        self._last_session = 0
        self._watchers: set[asyncio.Event] = set()
        self.commit_seconds = deque([engine.opening_seconds], maxlen=COMMITS_REMEMBERED)
        """Durations of the last commits; the first one is that of the epoch."""
        self.probe: Callable[[ProbeRequest], None] = _ignore_probe
        """Asks processes what they are doing. The inspector sets it."""
        self.retired = False
        """Whether the coordinator is about to stop, and accepts no more events."""
        self._idle = asyncio.Event()
        """Set while no commit is in flight."""
        self._idle.set()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Ends with the exception that stopped the driver; stays pending otherwise."""

    # ------------------------------------------------------------------ in

    def serve(self) -> None:
        """Start the time of restored members, because clients can reach the coordinator from now on.

        The first event or query starts it as well.
        """
        self._serves = True
        now = self._clock.now()
        self.coordinator.serve(now)
        self._arm_timer(now)

    def connect(self, sink: Sink) -> SessionId:
        """Give a new stream or call its id. Its messages go to ``sink`` until :meth:`disconnect`.

        Raises:
            Refusal: COORDINATOR_DRAINING, once the driver retires.
        """
        self._check_retired()
        self._last_session += 1
        self._sinks[self._last_session] = sink
        return self._last_session

    def disconnect(self, session: SessionId) -> None:
        """Deliver nothing more to this session. Submit ``Disconnected`` as well if it said hello."""
        self._sinks.pop(session, None)

    def submit(self, event: Event) -> None:
        """Queue an event. The driver takes events in order."""
        self._enqueue(event)

    def tell(self, session: SessionId, message: Message, ranks: AbstractSet[int] = NO_RANKS) -> None:
        """Send a message that has no effect on the state, without waiting for queued events.

        Args:
            session: the receiver; nothing happens if it has ended.
            message: the message.
            ranks: the ranks of a relay that the message is for.
        """
        sink = self._sinks.get(session)
        if sink is None or self.failed.done():
            return
        try:
            self._engine.check_lead()
        except StorageError as error:
            self._fail(error)
            return
        sink.deliver(Outgoing(message, self._encode), ranks)

    async def query(self, ask: Callable[[Coordinator, Instant], T]) -> T:
        """Read the state in order with the events. The answer waits until the state that it shows is durable.

        Raises:
            Refusal: as ``ask`` raises it; or COORDINATOR_DRAINING, once the driver retires.
        """
        self._check_retired()
        answer: asyncio.Future[T] = self._loop.create_future()
        self._enqueue(_Query(ask, answer))
        return await answer

    def commit_age(self) -> float:
        """Return the seconds since the commit in flight began; 0: no commit is in flight."""
        since = self._committing_since
        return 0.0 if since is None else self._clock.now().monotonic - since

    def watch(self) -> asyncio.Event:
        """Return an event that is set whenever the state may have changed. End with :meth:`unwatch`."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        """Stop setting an event of :meth:`watch`."""
        self._watchers.discard(event)

    def retire(self) -> None:
        """Accept no more events, and let no more time pass.

        Clients are asked to connect to the next coordinator. This one must not take them for dead meanwhile.
        """
        self.retired = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for watcher in self._watchers:
            watcher.set()

    async def wait_drained(self) -> None:
        """Wait until all accepted events are processed, so that another coordinator may decide."""
        while not self.failed.done() and (self._pump_scheduled or not self._idle.is_set()):
            await asyncio.sleep(0)
            await self._idle.wait()

    def _check_retired(self) -> None:
        if self.retired:
            raise DRAINING

    def _enqueue(self, item: Event | _Query) -> None:
        if self.retired:
            return
        self._inbox.append(item)
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    # ------------------------------------------------------------------ through

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self.failed.done():
            return
        stepped = False
        try:
            if not self._serves:
                self.serve()
            now = self._clock.now()
            inbox, self._inbox = self._inbox, []
            for item in inbox:
                if type(item) is _Query:
                    self._batch.answers.append(_answer(item, self.coordinator, now))
                else:
                    self.coordinator.step(item, now, self._batch.effects)  # type: ignore[arg-type]
                    stepped = True
            if stepped and self._watchers:
                self._batch.wakes_watchers = True
            self._flush()
            self._arm_timer(now)
        except Exception as error:
            self._fail(error)

    def _flush(self) -> None:
        if self.failed.done() or self._committing_since is not None or self._batch.empty:
            return
        batch, self._batch = self._batch, _Batch()
        if not batch.effects.records:
            self._deliver(batch)
            return
        encoded = codec.encode_all(batch.effects.records)
        started = self._clock.now().monotonic
        if not self._engine.blocking:
            self._engine.commit(encoded.writes, encoded.cleared)
            self._committed(batch, started)
            return
        self._committing_since = started
        self._idle.clear()
        commit = self._loop.run_in_executor(
            self._writer, self._engine.commit, encoded.writes, encoded.cleared
        )

        def done(commit: asyncio.Future[None]) -> None:
            self._committing_since = None
            self._idle.set()
            error = commit.exception()
            try:
                if error is not None:
                    raise error
                self._committed(batch, started)
                self._flush()
            except Exception as error:
                self._fail(error)

        commit.add_done_callback(done)

    def _committed(self, batch: _Batch, started: float) -> None:
        seconds = self._clock.now().monotonic - started
        self.commit_seconds.append(seconds)
        self._observer.committed(seconds)
        self._deliver(batch)

    def _deliver(self, batch: _Batch) -> None:
        self._engine.check_lead()
        sinks = self._sinks
        for audience, message in batch.effects.deliveries:
            outgoing = Outgoing(message, self._encode)
            for session, ranks in audience.items():
                sink = sinks.get(session)
                if sink is not None:
                    sink.deliver(outgoing, ranks)
        for decision in batch.effects.decisions:
            self._observer.decided(decision)
        for record in batch.effects.rounds:
            self._observer.round_completed(record)
        for notice in batch.effects.notices:
            self._observer.noticed(notice)
        for run_id in batch.effects.forgotten:
            self._observer.forgotten(run_id)
        for request in batch.effects.probes:
            self.probe(request)
        for answer in batch.answers:
            answer()
        if batch.wakes_watchers:
            for watcher in self._watchers:
                watcher.set()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    # ------------------------------------------------------------------ time

    def _arm_timer(self, now: Instant) -> None:
        deadline = self.coordinator.next_deadline()
        if self.retired or deadline is None:
            return
        deadline = max(deadline, self._no_tick_before)
        if deadline >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        delay = max(0.0, deadline - now.monotonic)
        self._timer = self._loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        now = self._clock.now()
        late = now.monotonic - self._timer_at
        self._timer = None
        self._timer_at = float("inf")
        if late > LATE and self._put_off < MAX_PUT_OFF:
            # This process stood still (SIGSTOP, a frozen cgroup). Arrivals and returning members that came
            # meanwhile are not read yet. Their time must not end before they are read.
            self._put_off += 1
            self._no_tick_before = now.monotonic + RECONNECT_GRACE
            try:
                self._arm_timer(now)
            except Exception as error:
                self._fail(error)
            return
        self._put_off = 0
        self._enqueue(Tick())

    # ------------------------------------------------------------------ end

    async def close(self) -> None:
        """Finish the commit in flight and close the storage."""
        if self._timer is not None:
            self._timer.cancel()
        await self._idle.wait()
        self._writer.shutdown()
        self._engine.close()
        if not self.failed.done():
            self.failed.cancel()


def _ignore_probe(_: ProbeRequest) -> None:
    """Ignore a request to ask processes."""


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause garbage collection, which would scan all restored objects again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _answer(query: _Query, coordinator: Coordinator, now: Instant) -> Callable[[], None]:
    """Read the state now, in order with the events, and return a function that answers later."""
    answer = query.answer
    try:
        value = query.ask(coordinator, now)
    except Refusal as refusal:
        error = refusal
        return lambda: None if answer.done() else answer.set_exception(error)
    return lambda: None if answer.done() else answer.set_result(value)
