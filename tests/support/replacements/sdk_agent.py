"""An agent in virtual time that says and hears what the SDK's dialogue does."""

from muster.service.core.vocabulary.effects import Message, Refused
from muster.service.core.vocabulary.events import JoinRendezvous
from muster.service.rpc import codec
from muster.worker.errors import RefusedError
from muster.worker.node.dialogue import JoinDialogue, NodeConfig
from muster.worker.node.membership import HEAD_START
from tests.support.world.core_world import RUN
from tests.support.world.rendezvous_world import Agent, RendezvousWorld


class SdkAgent(Agent):
    """An agent that says and hears what the SDK's dialogue does."""

    def __init__(self, world: RendezvousWorld, address: str) -> None:
        settings = world.settings
        self.dialogue = JoinDialogue(
            NodeConfig(
                endpoint="there:1",
                run_id=RUN,
                address=address,
                min_nodes=settings.min_nodes,
                max_nodes=settings.max_nodes,
                join_timeout=settings.join_timeout,
                last_call_timeout=settings.last_call_timeout,
                keep_alive_timeout=settings.keep_alive_timeout,
                connect_timeout=settings.join_timeout,
                call_timeout=5.0,
            )
        )
        super().__init__(world, address, settings, RUN, self.dialogue.node.incarnation)

    def join(self, *, seen: bool = True) -> None:
        self.dialogue.join()
        super().join(seen=seen)

    def ask(self, **changed: object) -> JoinRendezvous:
        assert self.session is not None
        return codec.join_rendezvous(self.session, self.dialogue.request(self.world.now))

    def hear(self, session: int, message: Message) -> None:
        if session == self.session and not isinstance(message, Refused):
            self.dialogue.handle(codec.join_response(message), self.world.now)
        super().hear(session, message)

    def _hear_end(self, session: int, refused: Refused) -> None:
        reason = refused.refusal.reason.name
        if session == self.session and not self.dialogue.is_transient(reason):
            self.dialogue.refused(RefusedError(refused.refusal.message, reason), self.world.now)
        super()._hear_end(session, refused)
        self.incarnation = self.dialogue.node.incarnation

    @property
    def nodes_waiting(self) -> int:
        """What the SDK's membership tells torch's agent."""
        dialogue = self.dialogue
        if dialogue.evicted_at is not None:
            return int(self.world.now >= dialogue.evicted_at + HEAD_START)
        return max(dialogue.waiting, int(dialogue.fenced))
