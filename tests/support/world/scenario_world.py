"""A world that writes down what each command of a scenario did: what is on disk, and what each process heard.

A scenario is a text; ``tests/unit/service/core/scenarios/README.md`` describes its commands and its output.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import (
    Effects,
    GroupJoined,
    Message,
    NodeLeft,
    NodesWaiting,
    ProcessesAdded,
    Progress,
    Refused,
    RoundComplete,
    Standing,
    Welcome,
)
from muster.service.core.vocabulary.events import Event
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, Instant, RendezvousSettings
from muster.service.core.vocabulary.records import (
    AgreementRecord,
    EvictionRecord,
    ForgetAgreement,
    ForgetDecision,
    ForgetParticipant,
    ForgetRankOwner,
    ForgetRound,
    ForgetShape,
    GroupRecord,
    ParticipantRecord,
    RankOwnerRecord,
    Record,
    RoundRecord,
    RunRecord,
    ShapeRecord,
)
from tests.support.world.core_client import CKPT, Client
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN
from tests.support.world.rendezvous_world import Agent, RendezvousWorld


@dataclass
class Step:
    """What one step of the coordinator did."""

    at: float
    disk: list[str] = field(default_factory=list)
    heard: list[tuple[list[str], str]] = field(default_factory=list)
    """Per message: the names of those that heard it, and its text."""
    log: list[str] = field(default_factory=list)


class ScenarioWorld(RendezvousWorld):
    """One coordinator, with processes and nodes that a scenario calls by name."""

    def __init__(
        self,
        size: int = 2,
        settings: RendezvousSettings | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.processes: dict[str, Client | Agent] = {}
        self.caller = "operator"
        """The name of a session that belongs to no process."""
        self.wall_offset = 0.0
        """Seconds that somebody has moved the wall clock by."""
        self._names: dict[int, str] = {}
        """By session."""
        self._calls: set[int] = set()
        """Sessions that belong to no process: they hear everything."""
        self._steps: list[Step] = []
        self._told_before: list[Decision] = []
        super().__init__(settings, limits=limits)
        self.world_size = size

    # ------------------------------------------------------------------ names

    def name_of(self, process: Client | Agent) -> str:
        return next(name for name, one in self.processes.items() if one is process)

    def open_session(self, client: Client) -> int:
        session = super().open_session(client)
        self._names[session] = self.name_of(client)
        return session

    def open_node_session(self, agent: Agent) -> int:
        session = super().open_node_session(agent)
        self._names[session] = self.name_of(agent)
        self._calls.discard(session)
        return session

    def new_session(self) -> int:
        session = super().new_session()
        self._names[session] = self.caller
        self._calls.add(session)
        return session

    # ------------------------------------------------------------------ writing down

    @property
    def instant(self) -> Instant:
        monotonic, wall = super().instant
        return Instant(monotonic, wall + self.wall_offset)

    def do(self, *events: Event) -> Effects:
        crash, hears = self.crash_next, set(self.streams) | self._calls
        step = Step(self.now)
        # Before the step, since the answers may make processes do something.
        self._steps.append(step)
        instant = self.instant
        effects = super().do(*events)
        if crash is not Crash.BEFORE_PERSIST:
            # A process has its groups in a set: the records of one kind come in any order.
            kinds = groupby(effects.records, type)
            step.disk = [text for _, records in kinds for text in sorted(map(_record, records))]
        assert effects.decisions == [one for one in effects.records if isinstance(one, Decision)]
        for decision in effects.decisions:
            _hold_text_against_data(decision)
            assert decision.decided_at == instant.wall
        if crash is not None:
            step.log.append("the coordinator is killed and starts again")
            return effects
        for audience, message in effects.deliveries:
            names = sorted(self._names[session] for session in audience if session in hears)
            text = self._message(message)
            if names and text:
                step.heard.append((names, text))
        step.log = [f"log: {notice.event}: {notice.message}" for notice in effects.notices]
        return effects

    def written(self, since: float) -> Iterator[str]:
        """What was written down for the last command, which began at ``since``; this empties it."""
        steps, self._steps = self._steps, []
        for at, of_moment in groupby(steps, lambda step: step.at):
            moment = f"[{at - since:g} s] " if at != since else ""
            yield from (f"{moment}{line}" for line in _lines(list(of_moment)))

    def _message(self, message: Message) -> str:
        match message:
            case Decision():
                return self._decision(message)
            case Progress():
                assert report.roll_call(message.arrived, message.required, message.missing) in message.message
                return f"warning: {message.message}"
            case Refused(refusal=refusal):
                facts = "".join(f" [{name} {value}]" for name, value in refusal.metadata.items())
                end = ", and the stream ends" if message.final else ""
                return f"refused, {refusal.reason.name}{facts}{end}: {refusal.message}"
            case GroupJoined():
                starts = {f"#{start}" for _, start in message.positions}
                return f"joined{_group(message.prefix)} at {', '.join(starts)}"
            case Standing():
                assert message.message.startswith(f"round {message.round} of run ")
                return f"{message.standing.name}: {message.message}"
            case RoundComplete():
                return f"rank {message.rank} of {message.world_size} in round {message.round}"
            case NodesWaiting():
                lost = f", {message.lost} lost" if message.lost else ""
                return f"{message.count} waiting{lost}"
            case NodeLeft():
                return "the node had a place" if message.had_place else "the node had no place"
            case Welcome() | ProcessesAdded():
                return ""
            case _:
                raise AssertionError(f"no scenario has words for {message!r}")

    def _decision(self, decision: Decision) -> str:
        generation = f" of generation {decision.generation}" if decision.generation else ""
        headline = f"{_barrier(decision)} {decision.outcome.name}{generation}"
        if decision in self._told_before:
            return f"{headline}, the same decision"
        self._told_before.append(decision)
        name = report.barrier_name(decision.run_id, decision.prefix, decision.sequence)
        assert decision.message.startswith(f"{name} ")
        text = f"{headline}: {decision.message.removeprefix(f'{name} ')}"
        if decision.payloads:
            payloads = ", ".join(f"{rank} = {payload.decode()}" for rank, payload in decision.payloads)
            text += f"\npayloads: {payloads}"
        return f"{text} (skew {decision.skew:g} s)" if decision.skew else text


def _lines(steps: list[Step]) -> Iterator[str]:
    """Return the lines of the steps of one moment: the disk, the messages, the log."""
    disk = [record for step in steps for record in step.disk]
    if disk:
        yield f"disk: {', '.join(disk)}"
    heard: list[tuple[list[str], str, Step]] = []
    for step in steps:
        for names, text in step.heard:
            # The messages of one step stay apart, so that a decision that is sent twice can be seen.
            same = next((one for one in heard if one[1] == text and one[2] is not step), None)
            if same is not None:
                same[0].extend(names)
            else:
                heard.append((list(names), text, step))
    for names, text, _ in heard:
        headline, *more = text.split("\n")
        details = " | ".join(line.strip() for line in more)
        yield f"{', '.join(names)}: {headline}"
        if details:
            yield f"  {details}"
    for step in steps:
        yield from step.log


def _group(prefix: str) -> str:
    return "" if prefix == CKPT else f" {prefix}"


def _barrier(decision: Decision) -> str:
    return f"{_group(decision.prefix)} #{decision.sequence}".lstrip()


def _hold_text_against_data(decision: Decision) -> None:
    """The text of a scenario shows the data of a decision only if the two say the same."""
    roll_call = report.roll_call(decision.arrived, decision.required, decision.missing)
    assert not decision.missing or roll_call in decision.message
    for failure in decision.failures:
        assert report.process_name(failure.rank, failure.host, failure.pid) in decision.message


def _record(record: Record) -> str:
    other_run = "" if record.run_id == RUN else f" ({record.run_id})"
    return _record_of_run(record) + other_run


def _record_of_run(record: Record) -> str:
    match record:
        case RunRecord():
            return f"run in generation {record.generation}"
        case GroupRecord():
            return f"group{_group(record.prefix)} from #{record.first_sequence}"
        case Decision():
            return f"{_barrier(record)} {record.outcome.name}"
        case ForgetDecision():
            return f"forget{_group(record.prefix)} #{record.sequence}"
        case ShapeRecord():
            return f"shape{_group(record.prefix)} {record.number}"
        case ForgetShape():
            return f"forget shape{_group(record.prefix)} {record.number}"
        case RankOwnerRecord():
            return f"rank {record.rank}{_group(record.prefix)} from #{record.start_sequence}"
        case ForgetRankOwner():
            return f"forget rank {record.rank}{_group(record.prefix)}"
        case RoundRecord():
            return f"round {record.round} of {record.world_size} after {record.join_seconds:g} s"
        case AgreementRecord():
            return f"agreed on {report.nodes_wanted(record.settings)}"
        case ForgetAgreement():
            return "forget what was agreed on"
        case ForgetRound():
            return f"forget round {record.round}"
        case ParticipantRecord():
            return f"{record.node.incarnation} is {'lost' if record.lost else f'rank {record.rank}'}"
        case ForgetParticipant():
            return f"forget {record.incarnation}"
        case EvictionRecord():
            return f"rank {record.rank} is evicted"
        case _:
            raise AssertionError(f"no scenario has words for {record!r}")
