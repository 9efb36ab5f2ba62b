"""Ranks that train and save at an agreed step, as the SDK does it, against the real core."""

from muster.client.save_votes import PREFIX
from muster.service.core.vocabulary.model import Decision
from muster.service.wire import decision_to_pb
from muster.worker.decision import decision_from_pb
from muster.worker.savepoint.agreement import Course, Next
from muster.worker.session.save_request import SaveAsked
from tests.support.world.core_client import Client
from tests.support.world.core_world import World


class Trainer:
    """One rank's training loop with a save point.

    Args:
        world: the coordinator, and the network.
        rank: its own.
        generation: the generation of the job.
        start: the step that it begins after.
    """

    def __init__(self, world: World, rank: int, generation: int = 0, start: int = 0) -> None:
        self.client: Client = world.start(rank, generation=generation)
        self.client.join(PREFIX)
        self.step = start
        self.saved: dict[int, int] = {}
        """The steps that it has saved at, by the barrier at which they were agreed on."""
        self.done: dict[int, bool] = {}
        """Whether training is to end, by the barrier at which all said that they had saved."""
        self.blocked = False
        """Whether it waits for the others."""
        position = self.client.memberships[PREFIX].position
        assert position is not None
        self._course = Course(world.world_size, position)
        self._heard = 0
        self._known: SaveAsked | None = None
        if self._course.stands(self.asked) and not self._course.wants(self.asked):
            self.client.arrive(PREFIX, failure="it alone has restarted")
            self._heard = len(self.client.memberships[PREFIX].heard)

    @property
    def asked(self) -> SaveAsked | None:
        """What it has heard of."""
        request = self.client.save_asked
        if request is None:
            return None
        deadline = (
            self.client.save_asked_at + request.seconds_left if request.seconds_left is not None else None
        )
        asked = SaveAsked(
            request.number, request.since, request.stop, request.reason, request.withdrawn, deadline
        )
        self._known = asked.after(self._known, self.client.save_asked_at)
        return self._known

    @property
    def deadline(self) -> float | None:
        """When the save must be complete that it has heard of."""
        return self._course.deadline(self.asked)

    def attend(self) -> None:
        """Answer what is asked for, as the SDK's thread does, whatever the training is at."""
        self.look()
        asked = self.asked
        if self._course.idle and self._course.wants(asked):
            assert asked is not None
            membership = self.client.memberships[PREFIX]
            assert membership.position is not None
            membership.position = max(membership.position, asked.since)
            self._course.promise(self.step)
            self._arrive()

    def train(self) -> None:
        """Make a step, unless it waits."""
        self.look()
        if not self.blocked:
            self.step += 1
            self._come_to(self.step)

    def look(self) -> None:
        """Take what it has heard meanwhile."""
        heard = self.client.memberships[PREFIX].heard
        while self._heard < len(heard):
            decision = heard[self._heard]
            self._heard += 1
            self._decided(decision)

    def _decided(self, heard: Decision) -> None:
        decision = decision_from_pb(decision_to_pb(heard))
        was_blocked, self.blocked = self.blocked, False
        if self._course.saves:
            finished = self._course.finished(decision)
            if finished is not None:
                self.done[decision.sequence] = finished.stop
            return
        self._course.agreed(decision)
        if was_blocked:
            self._come_to(self.step)

    def _come_to(self, step: int) -> None:
        match self._course.after(step):
            case Next.WAIT:
                self.blocked = True
            case Next.SAVE:
                self.saved[self.client.memberships[PREFIX].heard[-1].sequence] = step
                self.blocked = True
                self._arrive()

    def _arrive(self) -> None:
        self.client.arrive(PREFIX, payload=self._course.payload(self.asked))
        self.look()
