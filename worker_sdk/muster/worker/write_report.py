"""What a rank tells of its part of a save, for people."""

from dataclasses import dataclass

from muster.v1 import common_pb2 as pb

MAX_STEP = 2**63 - 1
MAX_BYTES = 2**47
MAX_SECONDS = 366 * 86_400
"""What the coordinator takes at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """What this rank tells of its part of a save, at each barrier of that save.

    The coordinator shows it: the newest checkpoint, its size, the slowest rank, what failed. Nothing is
    decided by it, and no other rank gets it.

    Attributes:
        step: the training step; None: the save has none.
        bytes: that this rank wrote; None: it does not know.
        seconds: that its write took; None: it does not know.
        commits: the barrier is the last of the save. If all ranks say so, its release is the commit of the
            checkpoint. If a barrier at which any rank reports fails, the save has failed.
        gives_up: this rank has given the save up, which has failed even if the barrier is released.

    Raises:
        ValueError: a number is negative, not finite, or beyond what the coordinator takes.
    """

    step: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    commits: bool = False
    gives_up: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (
            ("step", self.step, MAX_STEP),
            ("bytes", self.bytes, MAX_BYTES),
            ("seconds", self.seconds, MAX_SECONDS),
        ):
            if value is not None and not 0 <= value <= most:  # Nor is NaN.
                raise ValueError(f"{name} = {value!r}: it must be from 0 to {most}, or None.")

    def message(self) -> pb.WriteReport:
        """The report on the wire."""
        return pb.WriteReport(
            step=self.step,
            bytes=self.bytes,
            write_ms=round(self.seconds * 1000) if self.seconds is not None else None,
            commits=self.commits,
            gives_up=self.gives_up,
        )
