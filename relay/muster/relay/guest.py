"""A stream from below: a worker's, or that of another relay.

To a worker it is the coordinator's own: one Hello, and a Welcome. Another relay's processes enter and part.
Each process sits on a line of its run; pure, as the line is.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from muster.client.calls import PROTOCOL_VERSION
from muster.relay import refusals
from muster.relay.line import Line
from muster.v1 import session_pb2 as pb

MOST_ENTRIES = 65_536
"""In a repeated field: the coordinator ends a stream that sends more, and a line is shared."""
MOST_EARLY = 4 << 20
"""Bytes that a guest may say before it was welcomed, which are held in memory; a session says nothing."""
MOST_NAME = 1024
"""Letters of an incarnation or a host; the coordinator takes a quarter of it."""
MOST_REASON = 65_536
"""Letters of a goodbye's reason."""
MESSAGE_HEADROOM = 1 << 20
"""Bytes of a message beyond the payloads in it, as the coordinator has it."""


class Sink(Protocol):
    """Where a guest's messages go."""

    def send(self, data: bytes, own: bytes = b"") -> None:
        """Send one message; must not block.

        Args:
            data: the part that other streams may share.
            own: the part that follows on this stream alone.
        """
        ...

    def end(self, refusal: pb.Refusal | None) -> None:
        """End the stream once all is sent; with this status, if it is one."""
        ...


class House(Protocol):
    """Where guests find their lines."""

    version: str

    def addresses(self) -> Sequence[str]:
        """Of the coordinators that the relay speaks to: for those whose relay dies."""
        ...

    def seat(self, run_id: str, generation: int, process: pb.Process) -> Line:
        """The line on which a process is to speak."""
        ...

    def line_of(self, run_id: str, generation: int) -> Line:
        """Any line of a run's generation."""
        ...


@dataclass(slots=True)
class _Question:
    """What a guest has asked, until all of the answer is there; answers go out in the order of these."""

    answer: Callable[[], None]
    waits: int
    """For how many parts of the answer."""


@dataclass(frozen=True, slots=True, eq=False)
class _Seat:
    """Where a process of this guest speaks, or asks to."""

    line: Line
    entry: pb.Entry
    """What the coordinator answers; the seat is this process's own by it."""


class Guest:
    """Who speaks on one stream from below.

    Args:
        house: finds lines.
        sink: the stream.
        check_run: raises ``Refused`` for a run that the stream may not be about.
    """

    def __init__(self, house: House, sink: Sink, check_run: Callable[[str], None]) -> None:
        self._house = house
        self._sink = sink
        self._check_run = check_run
        self._hello: pb.Hello | None = None
        self._visits: Line | None = None
        self._seats: dict[int, _Seat] = {}
        """By rank, of its newest process."""
        self._questions: deque[_Question] = deque()
        self._over = False
        self._early = 0
        """How much it has said before it was welcomed, which is held in memory meanwhile."""
        self._welcomed = False
        self._most = MOST_EARLY
        """Bytes of a message; what the coordinator takes from one rank, once it has said it."""

    @property
    def is_relay(self) -> bool:
        """Whether another relay speaks."""
        return self._hello is not None and bool(self._hello.relay)

    @property
    def lines(self) -> set[Line]:
        """Those on which its processes speak, or it asks."""
        visited = {self._visits} if self._visits is not None else set()
        return visited | {seat.line for seat in self._seats.values()}

    # ------------------------------------------------------------------ from below

    def hear(self, data: bytes) -> None:
        """Take what the stream says.

        Raises:
            Refused: the stream is to end with it.
        """
        if self._over:
            return
        if len(data) > self._most:
            raise refusals.too_large(len(data), self._most)
        if not self._welcomed:
            self._early += len(data)
            if self._early > MOST_EARLY:
                raise refusals.invalid(
                    "message", f"{self._early:,} bytes", "wait for the Welcome before so many"
                )
        try:
            request = pb.ConnectRequest.FromString(data)
        except DecodeError as error:
            raise refusals.not_a_message(data, error) from None
        kind = request.WhichOneof("message")
        if kind == "arrive":
            self._arrive(request.arrive)
        elif kind == "join_group":
            self._join(request.join_group)
        elif kind == "hello":
            self._say_hello(request.hello)
        elif kind == "enter":
            self._enter(request.enter)
        elif kind == "part":
            self._part(request.part)
        elif kind == "goodbye":
            self._goodbye(request.goodbye)
        elif kind == "inspected":
            self._inspected(request)
        elif kind == "steps":
            self._steps(request.steps)
        else:
            raise refusals.not_a_message(data, "it has no message, or one of a newer version")

    def lost(self) -> None:
        """The stream is over, and nobody has said why."""
        if self._over:
            return
        self._leave()

    def _say_hello(self, hello: pb.Hello) -> None:
        if self._hello is not None:
            raise refusals.hello_repeated()
        if hello.protocol_version != PROTOCOL_VERSION:
            raise refusals.other_protocol(hello.protocol_version, self._house.version, PROTOCOL_VERSION)
        self._check_run(hello.run_id)
        if hello.relay and hello.processes:
            raise refusals.invalid("processes", f"{len(hello.processes)} of them", "a relay's are to Enter")
        _check_processes(hello.processes)
        if not hello.relay:
            _check_ranks(hello.processes)
        self._hello = hello
        if hello.relay:
            self._visits = self._house.line_of(hello.run_id, hello.generation)
            self._visits.visit(self, self._welcome)
        else:
            self._seat(hello.processes, self._answer_hello)

    def _enter(self, enter: pb.Enter) -> None:
        self._check_relay("Enter")
        _check_processes(enter.processes)
        self._seat(enter.processes, self._answer_enter)

    def _seat(self, processes: Sequence[pb.Process], answer: Callable[[list[pb.Entry]], None]) -> None:
        """Give each process a place on a line, and answer when the coordinator has, for all of them."""
        assert self._hello is not None
        entries = [pb.Entry() for _ in processes]
        question = _Question(lambda: answer(entries), len(entries))
        self._questions.append(question)
        for process, entry in zip(processes, entries, strict=True):

            def entered(given: pb.Entry, rank: int = process.rank, entry: pb.Entry = entry) -> None:
                entry.CopyFrom(given)
                question.waits -= 1
                seat = self._seats.get(rank)
                if not given.ordinal and seat is not None and seat.entry is entry:
                    del self._seats[rank]
                self._answer()

            line = self._house.seat(self._hello.run_id, self._hello.generation, process)
            before = self._seats.get(process.rank)
            if before is not None and before.line is not line:
                before.line.part(self, [process.rank], None)
            self._seats[process.rank] = _Seat(line, entry)
            line.enter(self, process, entered)
        self._answer()

    def _join(self, group: pb.JoinGroup) -> None:
        self._check_hello("JoinGroup")
        _check_prefix(group.prefix)
        _at_most("participants", group.participants)
        _at_most("ranks", group.ranks)
        for line, ranks in self._by_line(group.ranks or list(self._seats), group.prefix, None).items():
            line.join(ranks, group)

    def _arrive(self, arrive: pb.Arrive) -> None:
        self._check_hello("Arrive")
        _check_prefix(arrive.prefix)
        arrivals = arrive.arrivals
        _at_most("arrivals", arrivals)
        if len({one.rank for one in arrivals}) < len(arrivals):
            raise refusals.invalid("arrivals", f"{len(arrivals):,} ranks", "a rank may be named only once")
        lines = self._by_line([one.rank for one in arrivals], arrive.prefix, arrive.sequence)
        for line, ranks in lines.items():
            its = arrivals if len(ranks) == len(arrivals) else [one for one in arrivals if one.rank in ranks]
            line.arrive(arrive, its)

    def _inspected(self, answer: pb.ConnectRequest) -> None:
        self._check_hello("Inspected")
        # Whoever speaks for the rank by now was asked by someone else: nobody waits for this one.
        if (seat := self._seats.get(answer.inspected.rank)) is not None:
            seat.line.inspected(answer)

    def _steps(self, steps: pb.Steps) -> None:
        self._check_hello("Steps")
        _at_most("steps", steps.steps)
        for one in steps.steps:
            if (seat := self._seats.get(one.rank)) is not None:
                seat.line.stepped(one)

    def _by_line(self, ranks: Iterable[int], prefix: str, sequence: int | None) -> dict[Line, list[int]]:
        """Where some ranks speak; who is none of this guest's is told so, whoever else speaks for it."""
        by_line: dict[Line, list[int]] = {}
        for rank in ranks:
            seat = self._seats.get(rank)
            if seat is not None:
                by_line.setdefault(seat.line, []).append(rank)
            else:
                self._send(pb.ConnectResponse(refusal=refusals.not_in_session(rank, prefix, sequence)))
        return by_line

    def _part(self, part: pb.Part) -> None:
        self._check_relay("Part")
        _at_most("ranks", part.ranks)
        parted = pb.ConnectResponse(parted=pb.Parted(ranks=part.ranks))
        goodbye = part.goodbye if part.HasField("goodbye") else None
        _check_reason(part.goodbye)
        self._ask_to_part(list(part.ranks), goodbye, lambda: self._send(parted))

    def _goodbye(self, goodbye: pb.Goodbye) -> None:
        self._check_hello("Goodbye")
        _check_reason(goodbye)
        self._ask_to_part(list(self._seats), goodbye, self._end_well)

    def _ask_to_part(self, ranks: list[int], goodbye: pb.Goodbye | None, answer: Callable[[], None]) -> None:
        by_line = self._give_up(ranks)
        question = _Question(answer, len(by_line))
        self._questions.append(question)

        def parted() -> None:
            question.waits -= 1
            self._answer()

        for line, its in by_line.items():
            line.part(self, its, goodbye, parted)
        self._answer()

    def _leave(self) -> None:
        """Nothing more is said or told: all its processes are lost to the lines."""
        self._over = True
        for line, its in self._give_up(list(self._seats)).items():
            line.part(self, its, None)
        if self._visits is not None:
            self._visits.leave_visit(self)

    def _give_up(self, ranks: Iterable[int]) -> dict[Line, list[int]]:
        by_line: dict[Line, list[int]] = {}
        for rank in ranks:
            seat = self._seats.pop(rank, None)
            if seat is not None:
                by_line.setdefault(seat.line, []).append(rank)
        return by_line

    def _check_hello(self, what: str) -> None:
        if self._hello is None:
            raise refusals.hello_required(f"the first message of this session was not a Hello: {what}")

    def _check_relay(self, what: str) -> None:
        self._check_hello(what)
        if not self.is_relay:
            raise refusals.invalid(
                "message", what, "only a relay's stream says it; name your processes in the Hello"
            )

    # ------------------------------------------------------------------ from above

    def told(self, data: bytes, own: bytes = b"") -> None:
        """See ``line.Guest``."""
        if not self._over:
            self._sink.send(data, own)

    def sent_away(self, rank: int, refusal: pb.Refusal) -> None:
        """One of its processes speaks no more: a worker's stream ends with it, another relay's goes on."""
        if self._seats.pop(rank, None) is None or self._over:
            return
        told = pb.Refusal()
        told.CopyFrom(refusal)
        if self.is_relay or self._seats:
            told.rank = rank
            self._send(pb.ConnectResponse(refusal=told))
        else:
            told.ClearField("rank")
            self.end(told, tell=True)

    def end(self, refusal: pb.Refusal, *, tell: bool = False) -> None:
        """The stream is over: its line was lost, or the coordinator ended what it is about.

        Args:
            refusal: why.
            tell: it is the coordinator's word to those who speak, and not only how the stream ends.
        """
        if self._over:
            return
        if tell:
            self._send(pb.ConnectResponse(refusal=refusal))
        self._leave()
        self._sink.end(refusal)

    def _end_well(self) -> None:
        if not self._over:
            self._leave()
            self._sink.end(None)

    # ------------------------------------------------------------------ answers

    def _answer(self) -> None:
        """Give the answers that are whole, in the order of the questions."""
        while self._questions and not self._questions[0].waits:
            self._questions.popleft().answer()

    def _answer_hello(self, entries: list[pb.Entry]) -> None:
        refused = next((entry for entry in entries if not entry.ordinal), None)
        if refused is not None:
            refusal = pb.Refusal()
            refusal.CopyFrom(refused.refusal)
            refusal.ClearField("rank")
            self.end(refusal, tell=True)
            return
        welcome = next(iter(self._seats.values())).line.welcome if self._seats else None
        if welcome is not None:
            self._welcome(welcome, [entry.ordinal for entry in entries])

    def _answer_enter(self, entries: list[pb.Entry]) -> None:
        self._send(pb.ConnectResponse(entered=pb.Entered(entries=entries)))

    def _welcome(self, given: pb.Welcome, ordinals: Sequence[int] = ()) -> None:
        self._welcomed, self._early = True, 0
        self._most = given.max_payload_bytes + MESSAGE_HEADROOM
        welcome = pb.Welcome()
        welcome.CopyFrom(given)
        welcome.ordinals[:] = ordinals
        if not welcome.replicas:
            welcome.replicas.extend(self._house.addresses())
        self._send(pb.ConnectResponse(welcome=welcome))

    def _send(self, response: pb.ConnectResponse) -> None:
        if not self._over:
            self._sink.send(response.SerializeToString())


def _check_processes(processes: Sequence[pb.Process]) -> None:
    """What would be too large for the coordinator's stream together with others is refused for itself."""
    _at_most("processes", processes)
    for process in processes:
        for name, value in (("incarnation", process.incarnation), ("host", process.host)):
            if len(value) > MOST_NAME:
                raise refusals.invalid(name, f"{len(value):,} letters", f"it may have {MOST_NAME:,}")


def _check_reason(goodbye: pb.Goodbye) -> None:
    if len(goodbye.reason) > MOST_REASON:
        raise refusals.invalid("reason", f"{len(goodbye.reason):,} letters", f"it may have {MOST_REASON:,}")


def _check_prefix(prefix: str) -> None:
    """What names no group is answered to nobody in particular, so the line would be over for all."""
    if not prefix:
        raise refusals.invalid("prefix", '""', "it must not be empty")


def _at_most(field: str, values: Sequence[object]) -> None:
    if len(values) > MOST_ENTRIES:
        raise refusals.invalid(field, f"{len(values):,} entries", f"a message may have {MOST_ENTRIES:,}")


def _check_ranks(processes: Sequence[pb.Process]) -> None:
    if not processes:
        raise refusals.invalid("processes", "empty", "a Hello names at least one process")
    if len({process.rank for process in processes}) < len(processes):
        ranks = ", ".join(str(process.rank) for process in processes[:20])
        raise refusals.invalid("processes", ranks, "a rank may be named only once")
