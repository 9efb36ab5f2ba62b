"""A simulated coordinator whose stores are asked."""

from muster.service.core.store import Store
from muster.service.core.vocabulary.effects import Message, Refused
from muster.service.core.vocabulary.events import StoreRequest
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.operations import (
    Get,
    Operation,
    Set,
    Wait,
)
from muster.service.core.vocabulary.refusal import Refusal
from tests.support.world.core_world import RUN, World


class Stores:
    """A world, and what its stores are asked."""

    def __init__(self, **limits: int) -> None:
        self.world = World(limits=Limits(**limits))

    def call(self, operation: Operation, run: str = RUN) -> tuple[int, list[Message]]:
        """Ask from a call of its own: its session, and what it is told at once."""
        session = self.world.new_session()
        return session, self.world.ask(StoreRequest(session, run, operation))

    def ask(self, operation: Operation, run: str = RUN) -> Message:
        """The answer, which comes at once."""
        _, (answer,) = self.call(operation, run)
        return answer

    def refused(self, operation: Operation, run: str = RUN) -> Refusal:
        answer = self.ask(operation, run)
        assert isinstance(answer, Refused)
        return answer.refusal

    def wait(self, operation: Get | Wait) -> int:
        """Begin to wait: the call's session."""
        session, answers = self.call(operation)
        assert answers == []
        return session

    def set(self, **entries: bytes) -> list[tuple[int, object]]:
        """Set keys, and return the messages to other sessions."""
        session = self.world.new_session()
        effects = self.world.do(StoreRequest(session, RUN, Set(tuple(entries.items()))))
        return [(s, message) for some, message in effects.deliveries for s in some if s != session]

    @property
    def store(self) -> Store:
        return self.world.coordinator.runs[RUN].store
