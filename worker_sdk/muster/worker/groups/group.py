"""A group as one of its processes sees it: the ranks that it covers, and this process's position in it."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.v1 import session_pb2 as pb
from muster.worker.errors import MusterError
from muster.worker.groups.pending import Pending

_POSITIONS = {"SEQUENCE_BEHIND": "start_sequence", "SEQUENCE_FORGOTTEN": "next_sequence"}
"""By reason of a refusal: the metadata that names the refused process's next barrier."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The ranks that a group's barriers cover; no participants: all ranks."""

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
    """The sequence of this process's next barrier; None until the coordinator has named it."""
    error: MusterError | None = None
    """Why the group could not be joined."""
    pending: Pending | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that executes a barrier of the group."""

    def join_request(self) -> pb.ConnectRequest:
        """Return the message that asks to take part."""
        shape = self.shape
        return pb.ConnectRequest(
            join_group=pb.JoinGroup(
                prefix=self.prefix, world_size=shape.world_size, participants=shape.participants
            )
        )

    def go_on_after(self, reason: str, metadata: Mapping[str, str]) -> None:
        """Take over the position that the coordinator names if it has no outcome for this process's barrier.

        Otherwise the process would ask for that barrier forever.

        Args:
            reason: of the refusal.
            metadata: of the refusal.
        """
        name = _POSITIONS.get(reason)
        if name is not None and name in metadata:
            self.position = int(metadata[name])

    def waits_at(self) -> str | None:
        """Return the barrier at which a thread of this process waits, for people."""
        pending = self.pending
        return f'barrier "{self.prefix}" #{pending.request.sequence}' if pending is not None else None
