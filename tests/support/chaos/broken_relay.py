"""Relays with a fault built in, to see that the chaos harness finds it: ``KIND relay …``."""

import sys

from muster.relay.guest import Guest
from muster.relay.line import Line
from muster.service.cli.main import app
from muster.v1 import common_pb2
from muster.v1 import session_pb2 as pb


def answering() -> None:
    """Release the ranks of its node without the coordinator, once they have all arrived."""
    told = Line.arrive

    def arrive(self: Line, said: pb.Arrive, arrivals: list[pb.Arrival]) -> None:
        told(self, said, arrivals)
        here = self._turns[said.prefix]
        if here.arrived >= self._joined.get(said.prefix, set()):
            decision = common_pb2.Decision(
                run_id=self.run_id,
                prefix=said.prefix,
                sequence=said.sequence,
                outcome=common_pb2.OUTCOME_RELEASED,
                message="all of this node are here",
            )
            response = pb.ConnectResponse(decision=decision, ranks=here.arrived)
            self._give(response, response.SerializeToString())

    Line.arrive = arrive  # type: ignore[assignment, method-assign]


def hiding() -> None:
    """Hide the death of a worker from the coordinator."""

    def lost(self: Guest) -> None:
        self._over = True

    Guest.lost = lost  # type: ignore[method-assign]


def eager() -> None:
    """Let the first arrival count for its whole node."""
    told = Line.arrive

    def arrive(self: Line, said: pb.Arrive, arrivals: list[pb.Arrival]) -> None:
        here = {one.rank for one in arrivals}
        others = self._joined.get(said.prefix, set()) - here
        told(self, said, [*arrivals, *(pb.Arrival(rank=rank) for rank in others)])

    Line.arrive = arrive  # type: ignore[assignment, method-assign]


KINDS = {"answering": answering, "hiding": hiding, "eager": eager}

if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    KINDS[kind]()
    sys.argv = ["muster", *arguments]
    app()
