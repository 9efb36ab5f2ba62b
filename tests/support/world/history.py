"""An independent judge of what ranks heard from a coordinator.

It knows nothing of the coordinator: its input is what the client processes wrote down, in the order of a
clock that they share (on one host the monotonic clock), and it says which invariants of docs/design.md that
history breaks. Unit tests feed it from a simulated world, integration tests from real processes, which
write one line of JSON per event (``to_line``, ``from_lines``).

The idea by which it knows which process owned a rank, without having seen the coordinator: an incarnation is
told its first sequence when it joins, and a restarted one starts at the next undecided barrier. So of all
incarnations that could arrive at a barrier, only the arrival of the newest counts, by invariant 11 (the newer
fences the older).
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

RELEASED = "RELEASED"
TIMED_OUT = "TIMED_OUT"
ABORTED = "ABORTED"
MEMBER_LOST = "MEMBER_LOST"
MISMATCHED = "MISMATCHED"


@dataclass(frozen=True)
class RankProcess:
    """One incarnation of a rank: a process that acts for it."""

    run: str
    rank: int
    incarnation: str
    generation: int = 0
    born: float = 0.0
    """Orders the incarnations of a rank: the ordinal that it was given, or when it said hello first."""


@dataclass(frozen=True)
class Joined:
    """A process was told, for the first time since the last reset of the group, where it starts."""

    process: RankProcess
    prefix: str
    start: int
    required: tuple[int, ...]
    """The ranks that the group's barriers cover, as this process knows it."""
    resets: int = 0
    """Rises when the group is reset because all processes had left; may rise with the generation."""


@dataclass(frozen=True)
class MovedOn:
    """A process was told that it hears no outcome of its barrier, and where it goes on."""

    process: RankProcess
    prefix: str
    start: int


@dataclass(frozen=True)
class Arrived:
    """A process is about to arrive, or to arrive again, at a barrier."""

    process: RankProcess
    prefix: str
    sequence: int
    payload: str = ""


@dataclass(frozen=True)
class Heard:
    """A process was told the outcome of a barrier."""

    process: RankProcess
    prefix: str
    sequence: int
    outcome: str
    message: str
    missing: tuple[int, ...] = ()
    payloads: dict[int, str] | None = None
    """By rank; None if the process did not write them down."""


Event: TypeAlias = Joined | MovedOn | Arrived | Heard
Barrier: TypeAlias = tuple[str, str, int]
"""(run, prefix, sequence)"""


def violations(history: Iterable[Event]) -> list[str]:
    """Every way in which the history breaks the rules, as sentences; none if it is good."""
    return _Judge(list(history)).judge()


def assert_good(history: Iterable[Event]) -> None:
    """Fail with all the broken rules."""
    broken = violations(history)
    assert not broken, "the history breaks the rules:\n  " + "\n  ".join(broken)


class _Judge:
    def __init__(self, history: list[Event]) -> None:
        self.history = history
        self.broken: list[str] = []
        self.joins: dict[tuple[str, str], list[Joined]] = defaultdict(list)
        self.arrivals: dict[Barrier, dict[RankProcess, list[tuple[int, Arrived]]]] = defaultdict(dict)
        self.hearings: dict[Barrier, list[tuple[int, Heard]]] = defaultdict(list)
        for at, event in enumerate(history):
            match event:
                case Joined():
                    self.joins[event.process.run, event.prefix].append(event)
                case Arrived():
                    processes = self.arrivals[event.process.run, event.prefix, event.sequence]
                    processes.setdefault(event.process, []).append((at, event))
                case Heard():
                    self.hearings[event.process.run, event.prefix, event.sequence].append((at, event))

    def judge(self) -> list[str]:
        for barrier, heard in self.hearings.items():
            self._one_decision(barrier, [hearing for _, hearing in heard])
            self._own_arrival_first(barrier, heard)
            self._missing(barrier, heard)
            if heard[0][1].outcome == RELEASED:
                self._everyone_arrived(barrier, heard[0])
        self._in_step()
        return self.broken

    def _one_decision(self, barrier: Barrier, heard: list[Heard]) -> None:
        first = heard[0]
        for other in heard[1:]:
            if (other.outcome, other.message, other.missing) != (first.outcome, first.message, first.missing):
                self._broken("one decision", barrier, f"{_text(first)}, {_text(other)}")
            elif None not in (first.payloads, other.payloads) and first.payloads != other.payloads:
                self._broken("one decision", barrier, "two ranks were told different payloads")

    def _own_arrival_first(self, barrier: Barrier, heard: list[tuple[int, Heard]]) -> None:
        for at, hearing in heard:
            arrivals = self.arrivals[barrier].get(hearing.process, [])
            if not arrivals or arrivals[0][0] > at:
                self._broken(
                    "own arrival",
                    barrier,
                    f"{_name(hearing.process)} heard {hearing.outcome} and had not arrived at it",
                )

    def _missing(self, barrier: Barrier, heard: list[tuple[int, Heard]]) -> None:
        at, first = heard[0]
        missing = set(first.missing)
        if len(missing) < len(first.missing):
            self._broken("missing", barrier, f"a rank is named twice: {list(first.missing)}")
        if first.outcome == RELEASED and missing:
            self._broken("missing", barrier, f"it was released, and yet {sorted(missing)} are missing")
        if first.outcome in (TIMED_OUT, MEMBER_LOST):
            if not missing:
                self._broken("missing", barrier, f"it came to {first.outcome}, and nobody is named")
            required = self._agreed(barrier)
            if required is None:
                return
            if missing - required:
                self._broken("missing", barrier, f"{sorted(missing - required)} are named and not required")
            arrived = {process.rank for process in self._arrived_before(barrier, at)}
            forgotten = required - missing - arrived
            if forgotten:
                self._broken("missing", barrier, f"{sorted(forgotten)} had not arrived and are not named")

    def _everyone_arrived(self, barrier: Barrier, heard: tuple[int, Heard]) -> None:
        at, hearing = heard
        arrived = self._arrived_before(barrier, at)
        joined = self._could_arrive(barrier)
        required = next((j.required for j in joined if j.process == hearing.process), None)
        if required is None:
            self._broken("own arrival", barrier, f"{_name(hearing.process)} was released and had not joined")
            return
        newest = max((j.process.generation, j.resets) for j in joined)
        for rank in required:
            processes = [
                j.process
                for j in joined
                if (j.process.generation, j.resets) == newest and j.process.rank == rank
            ]
            if not processes:
                self._broken("everyone arrived", barrier, f"no rank {rank} of generation {newest[0]} joined")
                continue
            owner = max(processes, key=lambda process: process.born)
            if owner not in arrived:
                others = [_name(process) for process in arrived if process.rank == rank]
                older = f"; {', '.join(others)} did, and no longer owned it" if others else ""
                self._broken("everyone arrived", barrier, f"{_name(owner)} had not arrived{older}")
            elif hearing.payloads is not None:
                sent = {event.payload for _, event in self.arrivals[barrier][owner]}
                if hearing.payloads.get(rank, "") not in sent:
                    self._broken("payloads", barrier, f"{_name(owner)} did not send what all were told")

    def _in_step(self) -> None:
        next_of: dict[tuple[RankProcess, str], int] = {}
        for event in self.history:
            if isinstance(event, Joined):
                next_of.setdefault((event.process, event.prefix), event.start)
            if isinstance(event, MovedOn):
                next_of[event.process, event.prefix] = event.start
            if not isinstance(event, Heard):
                continue
            barrier = (event.process.run, event.prefix, event.sequence)
            expected = next_of.get((event.process, event.prefix))
            if expected is None:
                self._broken("in step", barrier, f"{_name(event.process)} heard of it before it joined")
            elif event.sequence > expected:
                self._broken("in step", barrier, f"{_name(event.process)} heard it before #{expected}")
            next_of[event.process, event.prefix] = max(expected or 0, event.sequence + 1)

    def _arrived_before(self, barrier: Barrier, at: int) -> list[RankProcess]:
        return [process for process, events in self.arrivals[barrier].items() if events[0][0] < at]

    def _could_arrive(self, barrier: Barrier) -> list[Joined]:
        run, prefix, sequence = barrier
        return [joined for joined in self.joins[run, prefix] if joined.start <= sequence]

    def _agreed(self, barrier: Barrier) -> set[int] | None:
        """The required ranks, if all who could arrive agreed on them."""
        opinions = {joined.required for joined in self._could_arrive(barrier)}
        return set(opinions.pop()) if len(opinions) == 1 else None

    def _broken(self, rule: str, barrier: Barrier, what: str) -> None:
        run, prefix, sequence = barrier
        self.broken.append(f'{rule}: barrier "{prefix}" #{sequence} of run {run}: {what}')


def _name(process: RankProcess) -> str:
    return f"rank {process.rank} ({process.incarnation}, generation {process.generation})"


def _text(heard: Heard) -> str:
    outcome = f"{heard.outcome} missing {list(heard.missing)} {heard.message!r}"
    return f"{_name(heard.process)} heard {outcome}"


# ---------------------------------------------------------------------- on paper


def to_line(event: Event) -> str:
    """The event as one line of JSON."""
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def from_lines(lines: Iterable[str]) -> list[Event]:
    """The events back, in the order given: sort the lines by their time first if several wrote them."""
    return [_from(json.loads(line)) for line in lines if line.strip()]


def _from(data: dict[str, Any]) -> Event:
    kinds: dict[str, type[Event]] = {"Joined": Joined, "MovedOn": MovedOn, "Arrived": Arrived, "Heard": Heard}
    kind = kinds[data.pop("event")]
    data["process"] = RankProcess(**data["process"])
    for name in ("required", "missing"):
        if name in data:
            data[name] = tuple(data[name])
    if data.get("payloads") is not None:
        data["payloads"] = {int(rank): payload for rank, payload in data["payloads"].items()}
    return kind(**data)
