"""Runs that were stopped to be resumed."""

from dataclasses import dataclass

from muster.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class Stopped:
    """How a run was stopped: all its ranks saved at one step, because they were asked to."""

    step: int
    """The step at which all ranks saved."""
    by: str
    """The author of the request, for people."""
    reason: str
    """Why, for people; may be empty."""

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"stopped at step {self.step} by {self.by}{why}"


def stopped_from_pb(message: pb.Stopped) -> Stopped:
    """Convert the coordinator's message."""
    return Stopped(message.step, message.by, message.reason)
