"""A rank's report of its part of a save, for people."""

from dataclasses import dataclass

from muster.client.protocol import MAX_STEP, MAX_WRITE_BYTES, MAX_WRITE_SECONDS
from muster.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """Describes this rank's part of a save. Send it at each barrier of that save.

    The coordinator shows the newest checkpoint, its size, the slowest rank and the failed saves. No decision
    depends on a report, and no other rank receives it.

    Attributes:
        step: the training step; None: the save has none.
        bytes: bytes that this rank wrote; None: it does not know.
        seconds: seconds that its write took; None: it does not know.
        commits: the barrier is the last one of the save. If all ranks set it, the barrier's release commits
            the checkpoint. If a barrier with a report fails, the save has failed.
        gives_up: this rank has given the save up: the save has failed, even if the barrier is released.

    Raises:
        ValueError: a number is negative, not finite, or larger than the coordinator accepts.
    """

    step: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    commits: bool = False
    gives_up: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (
            ("step", self.step, MAX_STEP),
            ("bytes", self.bytes, MAX_WRITE_BYTES),
            ("seconds", self.seconds, MAX_WRITE_SECONDS),
        ):
            if value is not None and not 0 <= value <= most:  # NaN fails this, too.
                raise ValueError(f"{name} = {value!r}: it must be from 0 to {most}, or None.")

    def message(self) -> pb.WriteReport:
        """Return the report as a message."""
        return pb.WriteReport(
            step=self.step,
            bytes=self.bytes,
            write_ms=round(self.seconds * 1000) if self.seconds is not None else None,
            commits=self.commits,
            gives_up=self.gives_up,
        )
