"""Relays with a built-in fault that the chaos test must find: ``KIND relay …``."""

from muster.relay.downstream_stream import DownstreamStream
from muster.relay.upstream_stream import UpstreamStream
from muster.v1 import common_pb2
from muster.v1 import session_pb2 as pb
from tests.support.chaos.program import muster


def answering() -> None:
    """Release the ranks of the node from memory when all of them have arrived."""
    original = UpstreamStream.arrive

    def arrive(self: UpstreamStream, said: pb.Arrive, arrivals: list[pb.Arrival]) -> None:
        original(self, said, arrivals)
        here = self._arrived[said.prefix]
        if here.ranks >= self._joined.get(said.prefix, set()):
            decision = common_pb2.Decision(
                run_id=self.run_id,
                prefix=said.prefix,
                sequence=said.sequence,
                outcome=common_pb2.OUTCOME_RELEASED,
                message="all of this node are here",
            )
            response = pb.ConnectResponse(decision=decision, ranks=here.ranks)
            self._deliver(response, response.SerializeToString())

    UpstreamStream.arrive = arrive  # type: ignore[assignment, method-assign]


def hiding() -> None:
    """Hide the death of a worker from the coordinator."""

    def connection_lost(self: DownstreamStream) -> None:
        self._ended = True

    DownstreamStream.connection_lost = connection_lost  # type: ignore[method-assign]


def eager() -> None:
    """Let the first arrival of a node arrive for all its ranks."""
    original = UpstreamStream.arrive

    def arrive(self: UpstreamStream, said: pb.Arrive, arrivals: list[pb.Arrival]) -> None:
        here = {one.rank for one in arrivals}
        others = self._joined.get(said.prefix, set()) - here
        original(self, said, [*arrivals, *(pb.Arrival(rank=rank) for rank in others)])

    UpstreamStream.arrive = arrive  # type: ignore[assignment, method-assign]


KINDS = {"answering": answering, "hiding": hiding, "eager": eager}

if __name__ == "__main__":
    muster(lambda kind: KINDS[kind]())
