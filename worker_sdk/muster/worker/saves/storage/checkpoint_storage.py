"""Where a job's checkpoints are, as far as saving and loading must know: a folder, or a bucket."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from muster.checkpoint.committed import Committed, SaveAttempt
from muster.checkpoint.damage import Damage
from muster.checkpoint.digest import Segment
from muster.checkpoint.manifest import Manifest, ManifestReference
from muster.checkpoint.source import Source


class PendingWriter(Protocol):
    """Torch's writer of a pending checkpoint, which also knows the digests of what it wrote."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: write torch's metadata."""

    @property
    def written(self) -> Mapping[str, tuple[Segment, ...]]:
        """By name, the segments of each file that this writer has written."""


class PendingSave(Protocol):
    """A save that ranks begin and plan. Each rank, and each child of it, has one of the same name."""

    def begin(self) -> None:
        """Make room for it. Nothing here may wait for a network.

        Raises:
            OSError: it has no room.
        """

    def check_room(self, size: int) -> None:
        """Refuse a part that there is certainly no room for. Nothing here may wait for a network.

        Args:
            size: bytes that this rank is about to write.

        Raises:
            OSError: it has no room.
            MemoryError: it would be in memory, and there is no room.
        """

    def enter(self, rank: int) -> None:
        """Say that a rank is about to write, once, before it leaves anything else there.

        Raises:
            OSError: it cannot be said.
        """

    def leave(self, note: str, data: bytes) -> None:
        """Tell other ranks something, when what was written before is there to stay.

        Args:
            note: a name that no other rank takes.
            data: what to tell.

        Raises:
            OSError: it cannot be written.
        """

    def take(self, notes: Sequence[str]) -> list[bytes]:
        """Return what other ranks have left, in this order.

        Raises:
            FileNotFoundError: one is not there.
            OSError: they cannot be read.
        """


class PendingCheckpoint(PendingSave, Protocol):
    """A save that is being written to one place."""

    @property
    def checkpoint(self) -> Path | str:
        """Where it will be when it is committed."""

    def writer(self) -> PendingWriter:
        """Return torch's writer, for the process that asks."""

    def copy(self, name: str, path: Path) -> None:
        """Write a file that this rank has written elsewhere.

        Args:
            name: its name in the checkpoint.
            path: where it is.

        Raises:
            OSError: it cannot be read, or written.
        """

    def commit(self, made: Committed, manifest: Manifest) -> None:
        """On rank 0, when every rank has written: make it a checkpoint, for good, without the notes.

        Args:
            made: what it is.
            manifest: what it consists of.

        Raises:
            OSError: a file is not there as it was written; or it cannot be committed.
            UncommittedError: another process has abandoned it.
        """


@dataclass(frozen=True, slots=True)
class Newest:
    """The checkpoint to resume from, and the damaged ones before it."""

    newest: Committed | None
    """The whole checkpoint that was committed last."""
    damaged: tuple[str, ...] = ()
    """The newer checkpoints that are damaged, with the reason."""


class CheckpointStorage(Protocol):
    """The checkpoints of one job."""

    def take_over(self) -> None:
        """On rank 0, before the first save: remove what earlier runs have left here, and did not commit.

        Checkpoints stay: the newest may be damaged, which nobody knows before it is loaded.

        Raises:
            OSError: they cannot be looked at.
            UncommittedError: there are checkpoints of another kind.
        """

    def pending(self, step: int, attempt: SaveAttempt) -> PendingCheckpoint:
        """Return the pending checkpoint of a save."""

    def committed(self, step: int) -> Path | str | None:
        """Return the checkpoint of a step that no other may replace, as far as this rank knows at once."""

    def newest(self, excluded: Collection[str]) -> Newest:
        """Return the whole checkpoint that was committed last, and what is damaged.

        Args:
            excluded: paths of damaged checkpoints that could not be marked.

        Raises:
            OSError: it cannot be looked for.
            LaterVersionError: there is one that only another version of Muster can read.
        """

    def read(self, path: Path | str) -> Committed:
        """Return what a checkpoint is.

        Raises:
            UncommittedError: it was not committed.
            DamageError: it is marked as damaged.
            OSError: it cannot be looked at.
        """

    def resolve_name(self, name: str, beside: Path | str | None = None) -> Path | str:
        """Return where the checkpoint is that rank 0 named.

        Args:
            name: as rank 0 sent it.
            beside: a path that the script names on this rank: the name is of the same folder or bucket. None:
                it is of this place.

        Raises:
            ValueError: the name leads elsewhere.
        """

    def source(self, made: Committed) -> Source:
        """Return what a checkpoint's files are read from."""

    def mark_damaged(self, made: Committed, damage: Damage) -> None:
        """Record durably that a checkpoint is damaged, so that no later life resumes from it.

        Raises:
            OSError: it cannot be recorded.
        """

    def settle(self, step: int, attempt: SaveAttempt, manifest: ManifestReference) -> bool:
        """Make sure that an attempt is committed, or never will be; return whether it is.

        Args:
            step: the step.
            attempt: the attempt.
            manifest: that of the attempt.

        Raises:
            OSError: it cannot be made sure of.
        """

    def sweep(
        self,
        keep_last: int | None,
        decided: SaveAttempt,
        used: Collection[Path | str],
        excluded: Collection[str] = (),
    ) -> None:
        """Remove what failed saves have left, and all but the checkpoints committed last.

        Args:
            keep_last: how many checkpoints to keep; None keeps all.
            decided: the last save that is decided: what is later may still be written by other ranks.
            used: checkpoints that are being loaded, and stay.
            excluded: paths of damaged checkpoints that could not be marked, and do not count.

        Raises:
            OSError: the place cannot be looked at. The next sweep goes on.
        """
