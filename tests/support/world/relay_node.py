"""A relay's stream that a test writes by hand."""

from typing import Any

from muster.service.core.vocabulary.effects import Entry, ProcessesAdded, ProcessesRemoved, Refused
from muster.service.core.vocabulary.events import (
    AddProcesses,
    Arrival,
    Arrive,
    Hello,
    JoinGroup,
    ProcessInfo,
    RemoveProcesses,
)
from muster.service.core.vocabulary.model import MemberState
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import of_kind
from tests.support.world.core_client import CKPT, TIMEOUT
from tests.support.world.core_world import RUN, World

RELAY = "node-0 (pid 70)"


def info(rank: int, incarnation: str = "", **more: Any) -> ProcessInfo:
    return ProcessInfo(rank, incarnation or f"p{rank}", "node-0", 4000 + rank, **more)


class Node:
    """A relay's stream that a test writes by hand. The test reads the answers, and nothing acts on them."""

    def __init__(self, world: World, *ranks: int, generation: int = 0, join: bool = True) -> None:
        self.world = world
        self.session = world.new_session()
        (self.welcome,) = world.ask(Hello(self.session, RUN, generation, (), RELAY))
        if ranks:
            self.add_processes(*(info(rank) for rank in ranks))
            if join:
                world.do(JoinGroup(self.session, CKPT, world.world_size, ranks=ranks))

    def add_processes(self, *processes: ProcessInfo) -> tuple[Entry, ...]:
        added = self.world.ask(AddProcesses(self.session, processes))[0]
        return of_kind(ProcessesAdded, added).entries

    def refused(self, *processes: ProcessInfo) -> list[Reason | None]:
        """Why each was refused, None if it was not."""
        entries = self.add_processes(*processes)
        return [entry.refusal.reason if entry.refusal is not None else None for entry in entries]

    def remove_processes(self, *ranks: int, goodbye: str | None = None) -> None:
        removed = [
            one
            for one in self.world.ask(RemoveProcesses(self.session, ranks, goodbye))
            if isinstance(one, ProcessesRemoved)
        ]
        assert removed == [ProcessesRemoved(ranks)]

    def arrive(self, *ranks: int, sequence: int = 0) -> None:
        self.world.do(Arrive(self.session, CKPT, sequence, TIMEOUT, tuple(Arrival(rank) for rank in ranks)))

    @property
    def messages(self) -> list[tuple[object, list[int]]]:
        """The messages of the last step to this stream, with the ranks that each names."""
        return [
            (message, sorted(to[self.session]))
            for to, message in self.world.last.deliveries
            if self.session in to
        ]

    @property
    def refusals(self) -> list[Refused]:
        """The refusals among the messages of the last step."""
        return [message for message, _ in self.messages if isinstance(message, Refused)]

    @property
    def ranks(self) -> list[int]:
        """The ranks of this stream as the coordinator knows them."""
        return list(self.world.coordinator.sessions.open[self.session].processes)

    def state(self, rank: int) -> MemberState:
        (process,) = self.world.coordinator.runs[RUN].roster.of_rank(rank)
        return process.state
