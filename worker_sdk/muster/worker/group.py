"""A group as one of its processes sees it: whom it covers, and where this process stands in it."""

import threading
from dataclasses import dataclass, field

from muster.v1 import session_pb2 as pb
from muster.worker.errors import MusterError
from muster.worker.pending import Pending


@dataclass(frozen=True, slots=True)
class Shape:
    """Whom a group's barriers cover."""

    world_size: int
    participants: tuple[int, ...] = ()

    def __str__(self) -> str:
        covers = f" and participants {list(self.participants)}" if self.participants else ""
        return f"world size {self.world_size}{covers}"


@dataclass(slots=True)
class Group:
    """A group that this process takes part in."""

    prefix: str
    shape: Shape
    position: int | None = None
    """The sequence of this process's next barrier; None until the coordinator has said."""
    error: MusterError | None = None
    """Why the group could not be joined."""
    pending: Pending | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that executes a barrier of the group."""

    def join_request(self) -> pb.ConnectRequest:
        """Asks to take part."""
        shape = self.shape
        return pb.ConnectRequest(
            join_group=pb.JoinGroup(
                prefix=self.prefix, world_size=shape.world_size, participants=shape.participants
            )
        )

    def waits_at(self) -> str | None:
        """The barrier that a thread of this process waits at, for people."""
        pending = self.pending
        return f'barrier "{self.prefix}" #{pending.request.sequence}' if pending is not None else None
