"""Saves that all ranks of a run are asked for."""

from dataclasses import dataclass, replace

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
    deadline: float | None = None
    """When the save must be complete, in seconds on this process's monotonic clock; None: no deadline."""

    def after(self, known: "SaveAsked | None", now: float) -> "SaveAsked":
        """Return what a process knows that hears this announcement.

        The coordinator announces a request again to each new stream, with an earlier deadline, and with a new
        one when the first has passed. Until then the earliest deadline counts: a delay of the message makes
        the computed one too late.

        Args:
            known: what the process knew before.
            now: when the announcement arrived, in seconds on the monotonic clock.

        Returns:
            The very same object if it says nothing new.
        """
        if known is None or known.number != self.number:
            return self
        merged = self
        if known.deadline is not None and (self.deadline is None or now < known.deadline < self.deadline):
            merged = replace(self, deadline=known.deadline)
        return known if merged == known else merged


def time_left(asked: SaveAsked, now: float) -> str:
    """Return how a sentence about a request ends that has a deadline, such as ``; 87 s left``; else empty."""
    if asked.deadline is None:
        return ""
    left = asked.deadline - now
    return f"; {left:.0f} s left" if left >= 0.5 else "; no time is left"


def asked_from_pb(message: pb.SaveAsked, now: float) -> SaveAsked:
    """Convert the coordinator's message.

    Args:
        message: the message.
        now: when it arrived, in seconds on the monotonic clock.
    """
    return SaveAsked(
        message.number,
        message.since_sequence,
        message.stop,
        message.reason,
        message.withdrawn,
        now + message.deadline_ms / 1000 if message.HasField("deadline_ms") else None,
    )
