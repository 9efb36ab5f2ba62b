"""Saves that all ranks of a run are asked for."""

from dataclasses import dataclass

from muster.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class SaveAsked:
    """A request to all ranks to save at one step."""

    number: int
    """Counts the requests of the run, from 1."""
    since: int
    """The first barrier whose failure fails this request."""
    stop: bool
    """Whether training is to end after it."""
    reason: str
    """The author and the reason, for people."""
    withdrawn: bool = False
    """Whether nothing is to be done for it: it is done, was withdrawn, or has lapsed."""


def asked_from_pb(message: pb.SaveAsked) -> SaveAsked:
    """Convert the coordinator's message."""
    return SaveAsked(message.number, message.since_sequence, message.stop, message.reason, message.withdrawn)
