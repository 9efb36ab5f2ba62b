"""One stream to the coordinator, and the processes that speak on it.

The stream folds what they send: newcomers, joins of one group, and arrivals at one barrier are one message
each. An answer names the ranks that it is for, and the stream delivers it to their processes. The timer and
the connection are passed in, so tests need neither a clock nor a socket. The stream holds no truth: if it
breaks, it ends the streams of all its processes, and these connect and send again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from muster.relay.folding import Fold, batches
from muster.relay.refusals import replaced, upstream_lost
from muster.relay.stats import RelayStats
from muster.serving.outbox import Outbox
from muster.v1 import session_pb2 as pb

STEPS_WINDOW = 1.0
"""Seconds that the training step of a process waits for those of the node's other ranks."""
FOLD_WINDOW = 0.01
"""Seconds that the first of a node's arrivals waits for the others. It delays no barrier, because a barrier
is released only with the node's last rank. A shorter window splits a node's message on a busy machine: 128
relays of 8 ranks on two cores forwarded 7.0 arrivals in a message with 2 ms, and 7.5 with 10 ms."""
MAX_NEWCOMERS_BYTES = 1 << 19
"""Bytes of the processes in one message that adds processes."""

CallLater = Callable[[float, Callable[[], None]], "Timer"]
"""Calls a function after so many seconds."""


class Timer(Protocol):
    """A call that is made later."""

    def cancel(self) -> None:
        """Do not make the call."""
        ...


class Downstream(Protocol):
    """The stream of a worker or of another relay, as an upstream stream sees it."""

    @property
    def is_relay(self) -> bool:
        """Whether it is the stream of another relay."""
        ...

    def deliver(self, data: bytes, own: bytes = b"") -> None:
        """Forward a message of the coordinator.

        Args:
            data: the part that is the same for other streams.
            own: the part that follows on this stream alone.
        """
        ...

    def remove_rank(self, rank: int, refusal: pb.Refusal) -> None:
        """Note that the coordinator has ended the session of one rank."""
        ...

    def end(self, refusal: pb.Refusal, *, announce: bool = False) -> None:
        """End the stream.

        Args:
            refusal: why.
            announce: also send the refusal as a message, because it is the coordinator's.
        """
        ...


@dataclass(slots=True, eq=False)
class ProcessSlot:
    """A process on an upstream stream, from its request to be added until it is removed."""

    downstream: Downstream
    process: pb.Process
    on_entry: list[Callable[[pb.Entry], None]]
    """Receive the coordinator's answer: several, if the process reconnected before it was sent."""
    admitted: bool = False
    """Whether the coordinator has admitted it. Earlier messages are for the previous process of its rank."""

    def answer(self, entry: pb.Entry) -> None:
        """Pass the coordinator's answer on."""
        for on_entry in self.on_entry:
            on_entry(entry)


@dataclass(slots=True)
class BarrierArrivals:
    """The ranks of the stream that have arrived at the newest barrier of a group."""

    sequence: int
    ranks: set[int]


class UpstreamStream:
    """A stream to the coordinator that speaks for many processes.

    Args:
        run_id: the run of all its processes.
        generation: their generation.
        outbox: takes the messages to the coordinator.
        call_later: starts a timer.
        on_closed: is called once, when the stream accepts no more processes.
        stats: what is measured.
        fold_window: seconds that the first arrival waits for those of the same node.
    """

    def __init__(
        self,
        run_id: str,
        generation: int,
        *,
        outbox: Outbox,
        call_later: CallLater,
        on_closed: Callable[["UpstreamStream"], None],
        stats: RelayStats,
        fold_window: float = FOLD_WINDOW,
    ) -> None:
        self.run_id = run_id
        self.generation = generation
        self.outbox = outbox
        self.welcome: pb.Welcome | None = None
        self.closed = False
        """Whether it accepts no more processes: the last one has left."""
        self.ended = False
        """Whether the connection is lost or refused."""
        self._call_later = call_later
        self._on_closed = on_closed
        self._stats = stats
        self._fold_window = fold_window
        self._timer: Timer | None = None
        self._slots: dict[int, ProcessSlot] = {}
        """By rank."""
        self._awaiting_welcome: dict[Downstream, Callable[[pb.Welcome], None]] = {}
        """Relays that wait for the welcome, and have no process yet."""
        self._newcomers: list[ProcessSlot] = []
        """Processes that have not been sent to the coordinator yet."""
        self._unanswered_additions: deque[list[ProcessSlot]] = deque()
        """The processes of each message that the coordinator has not answered yet."""
        self._unanswered_removals: deque[tuple[Downstream, Callable[[], None] | None]] = deque()
        """The sender of each removal that is not answered yet, and what follows for it."""
        self._fold = Fold(stats)
        self._joined: dict[str, set[int]] = {}
        """By group: the ranks that have joined it."""
        self._arrived: dict[str, BarrierArrivals] = {}
        """By group."""
        self._steps: dict[int, pb.RankStep] = {}
        """By rank: the newest training step that the coordinator has not been sent."""
        self._steps_timer_runs = False

    # ------------------------------------------------------------------ slots

    def has_process(self, process: pb.Process) -> bool:
        """Return whether this very process has a slot here."""
        slot = self._slots.get(process.rank)
        return slot is not None and slot.process.incarnation == process.incarnation

    def is_free(self, rank: int) -> bool:
        """Return whether no process of a rank has a slot here."""
        return rank not in self._slots

    def await_welcome(self, downstream: Downstream, on_welcome: Callable[[pb.Welcome], None]) -> None:
        """Wait for the coordinator's welcome, without a process."""
        if self.welcome is not None:
            on_welcome(self.welcome)
        else:
            self._awaiting_welcome[downstream] = on_welcome

    def stop_waiting(self, downstream: Downstream) -> None:
        """Wait for the welcome no longer."""
        self._awaiting_welcome.pop(downstream, None)
        self._close_if_empty()

    # ------------------------------------------------------------------ from below

    def add_process(
        self, downstream: Downstream, process: pb.Process, on_entry: Callable[[pb.Entry], None]
    ) -> None:
        """Ask the coordinator to admit a process. An earlier stream of the same rank ends.

        Args:
            downstream: the stream that speaks for it.
            process: the process.
            on_entry: receives the answer.
        """
        old = self._release(process.rank)
        slot = self._slots[process.rank] = ProcessSlot(downstream, process, [on_entry])
        if old is not None:
            if old in self._newcomers:
                self._newcomers.remove(old)
                slot.on_entry[:0] = old.on_entry
            if old.downstream is not downstream:
                old.downstream.remove_rank(process.rank, replaced(process))
        self._newcomers.append(slot)
        self._start_timer()

    def join(self, ranks: Iterable[int], group: pb.JoinGroup) -> None:
        """Let ranks join a group."""
        self._fold.join(ranks, group)
        self._start_timer()

    def arrive(self, arrive: pb.Arrive, arrivals: Sequence[pb.Arrival]) -> None:
        """Let ranks arrive at a barrier.

        The message is sent when all of the stream's ranks that joined the group are there, or after the fold
        window. A vote to fail and a repeated arrival are sent at once.

        Args:
            arrive: the barrier and the times.
            arrivals: the ranks.
        """
        prefix, sequence = arrive.prefix, arrive.sequence
        if self._fold.repeats(arrive, arrivals):
            self.flush()
        self._fold.arrive(arrive, arrivals)
        joined = self._joined.get(prefix)
        if joined is None:
            # After a reconnect, the stream knows no members of the group that it could wait for.
            self.flush()
            return
        arrived = self._arrived.get(prefix)
        if arrived is None or arrived.sequence != sequence:
            arrived = self._arrived[prefix] = BarrierArrivals(sequence, set())
        arrived.ranks.update(arrival.rank for arrival in arrivals)
        has_failure = any(arrival.HasField("failure") for arrival in arrivals)
        if has_failure or arrive.waited_ms or arrived.ranks >= joined:
            self.flush()
        else:
            self._start_timer()

    def report_step(self, step: pb.RankStep) -> None:
        """Report a rank's training step, together with those of the node's other ranks."""
        if not self._steps_timer_runs:
            self._steps_timer_runs = True
            self._call_later(STEPS_WINDOW, self._send_steps)
        self._steps[step.rank] = step

    def _send_steps(self) -> None:
        self._steps_timer_runs = False
        steps, self._steps = self._steps, {}
        if steps and self.welcome is not None and not self.ended and not self.closed:
            self._send(pb.ConnectRequest(steps=pb.Steps(steps=steps.values())))

    def send_inspected(self, answer: pb.ConnectRequest) -> None:
        """Send what a process is doing; it does not wait for folded messages."""
        if self.welcome is not None and not self.ended:
            self._send(answer)

    def remove_processes(
        self,
        downstream: Downstream,
        ranks: Iterable[int],
        goodbye: pb.Goodbye | None,
        on_removed: Callable[[], None] | None = None,
    ) -> None:
        """Stop speaking for processes of a downstream stream.

        Args:
            downstream: their stream.
            ranks: their ranks.
            goodbye: they left for good; None: their connection was lost.
            on_removed: is called when the coordinator has made the consequences durable.
        """
        # What they sent before counts, as it would on a stream of their own.
        self.flush()
        released = (self._release(rank) for rank in ranks if self._belongs_to(downstream, rank))
        slots = [slot for slot in released if slot is not None]
        unsent = [slot for slot in slots if slot in self._newcomers]
        for slot in unsent:
            self._newcomers.remove(slot)
            slot.answer(pb.Entry(refusal=upstream_lost("the process left before it was admitted")))
        sent = [slot.process.rank for slot in slots if slot not in unsent]
        if sent and not self.ended:
            self._unanswered_removals.append((downstream, on_removed))
            self._send(pb.ConnectRequest(remove_processes=pb.RemoveProcesses(ranks=sent, goodbye=goodbye)))
        elif on_removed is not None:
            on_removed()
        self._close_if_empty()

    def _belongs_to(self, downstream: Downstream, rank: int) -> bool:
        slot = self._slots.get(rank)
        return slot is not None and slot.downstream is downstream

    def flush(self) -> None:
        """Send the folded messages now."""
        self._cancel_timer()
        if self.welcome is None or self.ended:
            return
        if self._newcomers:
            newcomers, self._newcomers = self._newcomers, []
            for batch in batches(newcomers, lambda slot: slot.process.ByteSize(), MAX_NEWCOMERS_BYTES):
                self._unanswered_additions.append(batch)
                self._send(
                    pb.ConnectRequest(
                        add_processes=pb.AddProcesses(processes=[slot.process for slot in batch])
                    )
                )
        for request in self._fold.take(self.welcome.max_payload_bytes):
            self._send(request)

    def _send(self, request: pb.ConnectRequest) -> None:
        self.outbox.put(request.SerializeToString())

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self._call_later(self._fold_window, self.flush)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------------ from above

    def receive(self, data: bytes) -> None:
        """Handle a message of the coordinator."""
        if self.ended:
            return
        try:
            response = pb.ConnectResponse.FromString(data)
        except DecodeError as error:
            self.end(upstream_lost(f"its message is not one of muster.v1: {error}"))
            return
        kind = response.WhichOneof("message")
        if kind in ("decision", "progress", "closed", "inspect", "save_asked"):
            self._deliver(response, data)
        elif kind == "group_joined":
            self._group_joined(response.group_joined)
        elif kind == "refusal":
            self._refused(response.refusal, data)
        elif kind == "processes_added":
            self._processes_added(response.processes_added)
        elif kind == "processes_removed":
            self._processes_removed()
        elif kind == "welcome":
            self._welcomed(response.welcome)
        elif kind == "drain":
            self.end(upstream_lost("it is stopping"))

    def _deliver(self, response: pb.ConnectResponse, data: bytes) -> None:
        """Deliver a message to the ranks that it names, once to each stream; without names, to all.

        A worker gets the coordinator's own bytes. Another relay gets its own ranks behind bytes that all
        relays share, so a large message is in memory once.
        """
        named: dict[Downstream, list[int]] = {}
        for rank in response.ranks or list(self._slots):
            slot = self._slots.get(rank)
            if slot is not None and slot.admitted:
                named.setdefault(slot.downstream, []).append(rank)
        response.ClearField("ranks")
        shared = response.SerializeToString() if any(stream.is_relay for stream in named) else data
        for downstream, ranks in named.items():
            if downstream.is_relay:
                downstream.deliver(shared, pb.ConnectResponse(ranks=ranks).SerializeToString())
            else:
                downstream.deliver(data)

    def _welcomed(self, welcome: pb.Welcome) -> None:
        self.welcome = welcome
        awaiting, self._awaiting_welcome = self._awaiting_welcome, {}
        for on_welcome in awaiting.values():
            on_welcome(welcome)
        self.flush()

    def _processes_added(self, added: pb.ProcessesAdded) -> None:
        if not self._unanswered_additions or len(self._unanswered_additions[0]) != len(added.entries):
            self.end(upstream_lost("it answered for other processes than those that it was asked for"))
            return
        for slot, entry in zip(self._unanswered_additions.popleft(), added.entries, strict=True):
            rank = slot.process.rank
            # If the process has left meanwhile, its removal is on its way to the coordinator.
            if self._slots.get(rank) is slot:
                if entry.ordinal:
                    slot.admitted = True
                    self._stats.processes += 1
                else:
                    self._release(rank)
            slot.answer(entry)
        self._close_if_empty()

    def _group_joined(self, joined: pb.GroupJoined) -> None:
        by_stream: dict[Downstream, list[pb.Position]] = {}
        for position in joined.positions:
            slot = self._slots.get(position.rank)
            if slot is not None and slot.admitted:
                self._joined.setdefault(joined.prefix, set()).add(position.rank)
                by_stream.setdefault(slot.downstream, []).append(position)
        for downstream, positions in by_stream.items():
            message = pb.GroupJoined(prefix=joined.prefix, positions=positions)
            downstream.deliver(pb.ConnectResponse(group_joined=message).SerializeToString())

    def _refused(self, refusal: pb.Refusal, data: bytes) -> None:
        if not refusal.HasField("rank"):
            # The coordinator refused the stream's Hello, or its run was forgotten.
            self.end(refusal, announce=True)
            return
        slot = self._slots.get(refusal.rank)
        if slot is None or not slot.admitted:
            return
        if refusal.prefix:
            slot.downstream.deliver(data)
            return
        self._release(refusal.rank)
        slot.downstream.remove_rank(refusal.rank, refusal)
        self._close_if_empty()

    def _processes_removed(self) -> None:
        if not self._unanswered_removals:
            self.end(upstream_lost("it answered a request that was not sent"))
            return
        _, on_removed = self._unanswered_removals.popleft()
        if on_removed is not None:
            on_removed()

    # ------------------------------------------------------------------ the end

    def end(self, refusal: pb.Refusal, *, announce: bool = False) -> None:
        """End the streams of all processes; these must connect again.

        Args:
            refusal: why.
            announce: also send the refusal as a message, because it is the coordinator's.
        """
        if self.ended:
            return
        streams = [*self._awaiting_welcome, *(slot.downstream for slot in self._slots.values())]
        # The coordinator may not have received these goodbyes, so their senders must repeat them.
        streams += [
            downstream for downstream, on_removed in self._unanswered_removals if on_removed is not None
        ]
        self.ended = True
        self._awaiting_welcome.clear()
        for rank in list(self._slots):
            self._release(rank)
        self._newcomers.clear()
        self._close()
        for downstream in dict.fromkeys(streams):
            downstream.end(refusal, announce=announce)

    def _close_if_empty(self) -> None:
        """Say goodbye after the last process has left: the coordinator reads all earlier messages first."""
        if self._slots or self._awaiting_welcome or self.closed or self.ended:
            return
        if self.welcome is None:
            self.ended = True
        else:
            self._send(
                pb.ConnectRequest(goodbye=pb.Goodbye(reason="no process speaks through this relay any more"))
            )
        self._close()

    def _close(self) -> None:
        self._cancel_timer()
        if not self.closed:
            self.closed = True
            self._on_closed(self)

    def _release(self, rank: int) -> ProcessSlot | None:
        """Free the slot of a rank. The next process of the rank must join and arrive by itself."""
        slot = self._slots.pop(rank, None)
        if slot is not None:
            self._stats.processes -= slot.admitted
            for joined in self._joined.values():
                joined.discard(rank)
            for arrived in self._arrived.values():
                arrived.ranks.discard(rank)
            self._fold.drop(rank)
            self._steps.pop(rank, None)
        return slot
