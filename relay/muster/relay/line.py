"""One stream to the coordinator, and the processes that speak on it.

What they say is folded: arrivals at one barrier are one message, and so are joins of one group, and
newcomers. What comes back names the ranks that it is for, and is given to whoever speaks for them. Pure: the
stream and the clock are handed in. Nothing here is the truth: a line that breaks ends the streams of all who
speak on it, who then connect again and say again what is open.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError

from muster.relay.counts import Counts
from muster.relay.refusals import replaced, upstream_lost
from muster.v1 import session_pb2 as pb

Item = TypeVar("Item")

STEPS_PATIENCE = 1.0
"""Seconds that a process's training step waits for those of the node's other ranks."""
PATIENCE = 0.01
"""Seconds that the first of a node's arrivals waits for the others. No barrier is released later for it,
since none is without the node's last rank; a shorter one splits a node's message on a busy machine: 128
relays of 8 ranks on two cores handed on 7.0 arrivals in a message with 2 ms, and 7.5 with 10."""

MOST_ENTER = 1 << 19
"""Bytes of the processes of one Enter."""

After = Callable[[float, Callable[[], None]], "Timer"]
"""Calls something after so many seconds."""


class Timer(Protocol):
    """A call that is to be made later."""

    def cancel(self) -> None:
        """Do not make it."""
        ...


class Guest(Protocol):
    """Who speaks on a line: the stream of a worker, or of another relay."""

    @property
    def is_relay(self) -> bool:
        """Whether it is another relay's."""
        ...

    def told(self, data: bytes, own: bytes = b"") -> None:
        """Pass a message of the coordinator on.

        Args:
            data: the part that is the same for other guests.
            own: the part that follows for this guest alone.
        """
        ...

    def sent_away(self, rank: int, refusal: pb.Refusal) -> None:
        """One of its processes speaks no more, by the coordinator's word."""
        ...

    def end(self, refusal: pb.Refusal, *, tell: bool = False) -> None:
        """Its stream is over.

        Args:
            refusal: why.
            tell: it is the coordinator's word to those who speak, and not only how the stream ends.
        """
        ...


@dataclass(slots=True, eq=False)
class Place:
    """A process on a line, from when it asks to enter until it parts."""

    guest: Guest
    process: pb.Process
    entered: list[Callable[[pb.Entry], None]]
    """What to do with the coordinator's answer: more than once, if it came again before it was named."""
    speaks: bool = False
    """Whether the coordinator has let it in; what came before that is for whoever had its rank before."""

    def answer(self, entry: pb.Entry) -> None:
        """The coordinator has answered."""
        for entered in self.entered:
            entered(entry)


@dataclass(slots=True)
class Held:
    """Arrivals at one barrier that are kept back for a moment."""

    message: pb.Arrive
    ranks: set[int]


@dataclass(slots=True)
class Turn:
    """Who of the line has arrived at the newest barrier of a group."""

    sequence: int
    arrived: set[int]


class Line:
    """A stream to the coordinator that speaks for many.

    Args:
        run_id: the run of all who speak on it.
        generation: their generation.
        say: sends a message to the coordinator.
        after: calls something later.
        over: is called once, when nobody may come to the line any more.
        counts: what is measured.
        patience: seconds that the first arrival waits for those of the same node.
    """

    def __init__(
        self,
        run_id: str,
        generation: int,
        *,
        say: Callable[[pb.ConnectRequest], None],
        after: After,
        over: Callable[["Line"], None],
        counts: Counts,
        patience: float = PATIENCE,
    ) -> None:
        self.run_id = run_id
        self.generation = generation
        self.welcome: pb.Welcome | None = None
        self.deserted = False
        """Whether its last process has parted: nobody may come any more."""
        self.ended = False
        self._say = say
        self._after = after
        self._over = over
        self._counts = counts
        self._patience = patience
        self._timer: Timer | None = None
        self._places: dict[int, Place] = {}
        """By rank."""
        self._visitors: dict[Guest, Callable[[pb.Welcome], None]] = {}
        """Who waits for the welcome, and has no process yet."""
        self._newcomers: list[Place] = []
        """Who has not been named to the coordinator yet."""
        self._entering: deque[list[Place]] = deque()
        """Who was named in each Enter that is not answered yet."""
        self._parting: deque[tuple[Guest, Callable[[], None] | None]] = deque()
        """Who said each Part that is not answered yet, and what follows for it."""
        self._joins: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
        """By group and shape: the ranks that join, and were not named to the coordinator yet."""
        self._joined: dict[str, set[int]] = {}
        """By group: the ranks that have joined it."""
        self._arrivals: dict[tuple[str, int, int, int, int], Held] = {}
        """What is kept back for a moment, by group, sequence and times."""
        self._turns: dict[str, Turn] = {}
        self._steps: dict[int, pb.RankStep] = {}
        """By rank: how far it has come, as the coordinator is to be told in a moment."""
        self._tells_steps = False
        """Whether that moment is set."""

    # ------------------------------------------------------------------ places

    def seats(self, process: pb.Process) -> bool:
        """Whether this very process has a place here."""
        place = self._places.get(process.rank)
        return place is not None and place.process.incarnation == process.incarnation

    def has_room(self, rank: int) -> bool:
        """Whether nobody speaks for a rank here."""
        return rank not in self._places

    def visit(self, guest: Guest, welcomed: Callable[[pb.Welcome], None]) -> None:
        """Wait for the coordinator's welcome, without a process."""
        if self.welcome is not None:
            welcomed(self.welcome)
        else:
            self._visitors[guest] = welcomed

    def leave_visit(self, guest: Guest) -> None:
        """Wait no more."""
        self._visitors.pop(guest, None)
        self._end_if_deserted()

    # ------------------------------------------------------------------ from below

    def enter(self, guest: Guest, process: pb.Process, entered: Callable[[pb.Entry], None]) -> None:
        """Ask the coordinator to let a process speak here. Its own earlier stream is over then.

        Args:
            guest: who speaks for it.
            process: who it is.
            entered: what to do with the answer.
        """
        old = self._release(process.rank)
        place = self._places[process.rank] = Place(guest, process, [entered])
        if old is not None:
            if old in self._newcomers:
                self._newcomers.remove(old)
                place.entered[:0] = old.entered
            if old.guest is not guest:
                old.guest.sent_away(process.rank, replaced(process))
        self._newcomers.append(place)
        self._hold()

    def join(self, ranks: Iterable[int], group: pb.JoinGroup) -> None:
        """Ranks that speak here take part in a group."""
        key = group.prefix, group.world_size, tuple(group.participants)
        self._joins.setdefault(key, []).extend(ranks)
        self._hold()

    def arrive(self, arrive: pb.Arrive, arrivals: Sequence[pb.Arrival]) -> None:
        """Ranks that speak here arrive at a barrier.

        It goes on when all of the line's ranks that joined the group are there, or after the patience; a
        vote to fail, and what was said before, at once.

        Args:
            arrive: at which barrier, and with which times.
            arrivals: who.
        """
        prefix, sequence = arrive.prefix, arrive.sequence
        joined = self._joined.get(prefix)
        if joined is None:
            # Nobody is known to be in the group, as after a reconnect: there is nobody to wait for.
            self._keep(arrive, arrivals)
            self.flush()
            return
        turn = self._turns.get(prefix)
        if turn is None or turn.sequence != sequence:
            turn = self._turns[prefix] = Turn(sequence, set())
        turn.arrived.update(arrival.rank for arrival in arrivals)
        self._keep(arrive, arrivals)
        votes = any(arrival.HasField("failure") for arrival in arrivals)
        if votes or arrive.waited_ms or turn.arrived >= joined:
            self.flush()
        else:
            self._hold()

    def _keep(self, arrive: pb.Arrive, arrivals: Sequence[pb.Arrival]) -> None:
        """Put arrivals to those at the same barrier with the same times; a message names each rank once."""
        times = arrive.timeout_ms, arrive.progress_after_ms, arrive.waited_ms
        key = arrive.prefix, arrive.sequence, *times
        ranks = {arrival.rank for arrival in arrivals}
        if key in self._arrivals and not ranks.isdisjoint(self._arrivals[key].ranks):
            self.flush()
        held = self._arrivals.setdefault(key, Held(_without_arrivals(arrive), set()))
        held.message.arrivals.extend(arrivals)
        held.ranks |= ranks

    def stepped(self, step: pb.RankStep) -> None:
        """A process that speaks here has come to a training step: those of a node are told together."""
        if not self._tells_steps:
            self._tells_steps = True
            self._after(STEPS_PATIENCE, self._tell_steps)
        self._steps[step.rank] = step

    def _tell_steps(self) -> None:
        self._tells_steps = False
        steps, self._steps = self._steps, {}
        if steps and self.welcome is not None and not self.ended and not self.deserted:
            self._say(pb.ConnectRequest(steps=pb.Steps(steps=steps.values())))

    def inspected(self, answer: pb.ConnectRequest) -> None:
        """A process that speaks here says what it is doing: it goes on at once, past what is kept back."""
        if self.welcome is not None and not self.ended:
            self._say(answer)

    def part(
        self,
        guest: Guest,
        ranks: Iterable[int],
        goodbye: pb.Goodbye | None,
        parted: Callable[[], None] | None = None,
    ) -> None:
        """Processes of a guest speak here no more.

        Args:
            guest: whose.
            ranks: theirs.
            goodbye: they left for good; None: their connection was lost.
            parted: what to do when what follows from it is durable.
        """
        # What they said before counts, as it would on a stream of their own.
        self.flush()
        its = (self._release(rank) for rank in ranks if self._is_of(guest, rank))
        places = [place for place in its if place is not None]
        unnamed = [place for place in places if place in self._newcomers]
        for place in unnamed:
            self._newcomers.remove(place)
            place.answer(pb.Entry(refusal=upstream_lost("it has parted before it was let in")))
        named = [place.process.rank for place in places if place not in unnamed]
        if named and not self.ended:
            self._parting.append((guest, parted))
            self._say(pb.ConnectRequest(part=pb.Part(ranks=named, goodbye=goodbye)))
        elif parted is not None:
            parted()
        self._end_if_deserted()

    def _is_of(self, guest: Guest, rank: int) -> bool:
        place = self._places.get(rank)
        return place is not None and place.guest is guest

    def flush(self) -> None:
        """Say now what was kept back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.welcome is None or self.ended:
            return
        if self._newcomers:
            newcomers, self._newcomers = self._newcomers, []
            for some in _in_portions(newcomers, lambda place: place.process.ByteSize(), MOST_ENTER):
                self._entering.append(some)
                self._say(pb.ConnectRequest(enter=pb.Enter(processes=[place.process for place in some])))
        if self._joins:
            joins, self._joins = self._joins, {}
            for (prefix, world_size, participants), ranks in joins.items():
                group = pb.JoinGroup(
                    prefix=prefix,
                    world_size=world_size,
                    participants=participants,
                    ranks=dict.fromkeys(ranks),
                )
                self._say(pb.ConnectRequest(join_group=group))
        if self._arrivals:
            held, self._arrivals = self._arrivals, {}
            for one in held.values():
                self._counts.folded(len(one.message.arrivals))
                self._say_arrivals(one.message, self.welcome.max_payload_bytes)

    def _say_arrivals(self, arrive: pb.Arrive, most: int) -> None:
        """What ranks bring is said in one message, if it is no more than the coordinator takes from one."""
        portions = list(_in_portions(arrive.arrivals, _size, most))
        if len(portions) == 1:
            self._say(pb.ConnectRequest(arrive=arrive))
            return
        for arrivals in portions:
            part = _without_arrivals(arrive)
            part.arrivals.extend(arrivals)
            self._say(pb.ConnectRequest(arrive=part))

    def _hold(self) -> None:
        if self._timer is None:
            self._timer = self._after(self._patience, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self.flush()

    # ------------------------------------------------------------------ from above

    def hear(self, data: bytes) -> None:
        """Take what the coordinator says."""
        if self.ended:
            return
        try:
            response = pb.ConnectResponse.FromString(data)
        except DecodeError as error:
            self.end(upstream_lost(f"what it says is no message of muster.v1: {error}"))
            return
        kind = response.WhichOneof("message")
        if kind in ("decision", "progress", "closed", "inspect", "save_asked"):
            self._give(response, data)
        elif kind == "group_joined":
            self._group_joined(response.group_joined)
        elif kind == "refusal":
            self._refused(response.refusal, data)
        elif kind == "entered":
            self._entered(response.entered)
        elif kind == "parted":
            self._parted()
        elif kind == "welcome":
            self._welcomed(response.welcome)
        elif kind == "drain":
            self.end(upstream_lost("it is stopping"))

    def _give(self, response: pb.ConnectResponse, data: bytes) -> None:
        """Give a message to those whom it names, each guest once; it names nobody if it is for all.

        A worker gets the coordinator's own bytes. Another relay gets its own ranks here, behind bytes that
        all relays share: a large message is in memory once for all of them.
        """
        named: dict[Guest, list[int]] = {}
        for rank in response.ranks or list(self._places):
            place = self._places.get(rank)
            if place is not None and place.speaks:
                named.setdefault(place.guest, []).append(rank)
        response.ClearField("ranks")
        shared = response.SerializeToString() if any(guest.is_relay for guest in named) else data
        for guest, ranks in named.items():
            if guest.is_relay:
                guest.told(shared, pb.ConnectResponse(ranks=ranks).SerializeToString())
            else:
                guest.told(data)

    def _welcomed(self, welcome: pb.Welcome) -> None:
        self.welcome = welcome
        visitors, self._visitors = self._visitors, {}
        for welcomed in visitors.values():
            welcomed(welcome)
        self.flush()

    def _entered(self, entered: pb.Entered) -> None:
        if not self._entering or len(self._entering[0]) != len(entered.entries):
            self.end(upstream_lost("it answered for others than it was asked for"))
            return
        for place, entry in zip(self._entering.popleft(), entered.entries, strict=True):
            rank = place.process.rank
            # If it has parted since, the coordinator hears of that after its entry.
            if self._places.get(rank) is place:
                if entry.ordinal:
                    place.speaks = True
                    self._counts.processes += 1
                else:
                    self._release(rank)
            place.answer(entry)
        self._end_if_deserted()

    def _group_joined(self, joined: pb.GroupJoined) -> None:
        by_guest: dict[Guest, list[pb.Position]] = {}
        for position in joined.positions:
            place = self._places.get(position.rank)
            if place is not None and place.speaks:
                self._joined.setdefault(joined.prefix, set()).add(position.rank)
                by_guest.setdefault(place.guest, []).append(position)
        for guest, positions in by_guest.items():
            its = pb.GroupJoined(prefix=joined.prefix, positions=positions)
            guest.told(pb.ConnectResponse(group_joined=its).SerializeToString())

    def _refused(self, refusal: pb.Refusal, data: bytes) -> None:
        if not refusal.HasField("rank"):
            # Of all that a line says, only its Hello is refused as a whole; or its run was forgotten.
            self.end(refusal, tell=True)
            return
        place = self._places.get(refusal.rank)
        if place is None or not place.speaks:
            return
        if refusal.prefix:
            place.guest.told(data)
            return
        self._release(refusal.rank)
        place.guest.sent_away(refusal.rank, refusal)
        self._end_if_deserted()

    def _parted(self) -> None:
        if not self._parting:
            self.end(upstream_lost("it answered what it was not asked"))
            return
        _, parted = self._parting.popleft()
        if parted is not None:
            parted()

    # ------------------------------------------------------------------ the end

    def end(self, refusal: pb.Refusal, *, tell: bool = False) -> None:
        """Nobody speaks here any more: all who did must connect again.

        Args:
            refusal: why.
            tell: whether it is the coordinator's word.
        """
        if self.ended:
            return
        guests = [*self._visitors, *(place.guest for place in self._places.values())]
        # Whose goodbye was not heard for certain must say it again.
        guests += [guest for guest, parted in self._parting if parted is not None]
        self.ended = True
        self._visitors.clear()
        for rank in list(self._places):
            self._release(rank)
        self._newcomers.clear()
        self._close()
        for guest in dict.fromkeys(guests):
            guest.end(refusal, tell=tell)

    def _end_if_deserted(self) -> None:
        """After the last has parted, a goodbye ends the stream: all that was said has been heard then."""
        if self._places or self._visitors or self.deserted or self.ended:
            return
        if self.welcome is None:
            self.ended = True
        else:
            self._say(
                pb.ConnectRequest(goodbye=pb.Goodbye(reason="nobody speaks through this relay any more"))
            )
        self._close()

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.deserted:
            self.deserted = True
            self._over(self)

    def _release(self, rank: int) -> Place | None:
        """Free a rank's place. Joins and arrivals are a process's own: whoever follows begins without."""
        place = self._places.pop(rank, None)
        if place is not None:
            self._counts.processes -= place.speaks
            for joined in self._joined.values():
                joined.discard(rank)
            for turn in self._turns.values():
                turn.arrived.discard(rank)
            self._drop(rank)
        return place

    def _drop(self, rank: int) -> None:
        """What a process said and was not handed on yet is not for the next of its rank."""
        for ranks in self._joins.values():
            ranks[:] = [one for one in ranks if one != rank]
        self._joins = {group: ranks for group, ranks in self._joins.items() if ranks}
        for held in self._arrivals.values():
            if rank in held.ranks:
                kept = [one for one in held.message.arrivals if one.rank != rank]
                del held.message.arrivals[:]
                held.message.arrivals.extend(kept)
                held.ranks.discard(rank)
        self._arrivals = {key: held for key, held in self._arrivals.items() if held.ranks}
        self._steps.pop(rank, None)


def _in_portions(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterable[list[Item]]:
    """Items for messages that the coordinator takes: at least one in each, and no more than so many bytes."""
    some: list[Item] = []
    left = most
    for item in items:
        needs = size(item)
        if some and needs > left:
            yield some
            some, left = [], most
        some.append(item)
        left -= needs
    yield some


def _size(arrival: pb.Arrival) -> int:
    return len(arrival.payload) + len(arrival.failure) + arrival.write.ByteSize()


def _without_arrivals(arrive: pb.Arrive) -> pb.Arrive:
    return pb.Arrive(
        prefix=arrive.prefix,
        sequence=arrive.sequence,
        timeout_ms=arrive.timeout_ms,
        progress_after_ms=arrive.progress_after_ms,
        waited_ms=arrive.waited_ms,
    )
