"""What is asked for of all ranks of a run, as the coordinator tells it."""

from dataclasses import dataclass

from muster.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class SaveAsked:
    """A save that all ranks are to make at one step."""

    number: int
    """Counts the requests of the run, from 1."""
    since: int
    """The first barrier whose failure is this request's."""
    stop: bool
    """Whether training is to end after it."""
    reason: str
    """Who asked, and why, for people."""
    withdrawn: bool = False
    """Nobody wants it any longer."""


def asked_from_pb(message: pb.SaveAsked) -> SaveAsked:
    """The coordinator's message as a :class:`SaveAsked`."""
    return SaveAsked(message.number, message.since_sequence, message.stop, message.reason, message.withdrawn)
