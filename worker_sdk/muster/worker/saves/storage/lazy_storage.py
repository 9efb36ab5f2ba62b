"""A storage that is not touched before it is needed."""

import threading
from collections.abc import Callable, Collection
from pathlib import Path

from muster.checkpoint.committed import Committed, SaveAttempt
from muster.checkpoint.damage import Damage
from muster.checkpoint.manifest import ManifestReference
from muster.checkpoint.source import Source
from muster.worker.saves.storage.checkpoint_storage import CheckpointStorage, Newest, PendingCheckpoint


class LazyStorage:
    """The checkpoints of one job, in a storage that is opened by the first call of a method.

    Args:
        opens: opens it.
    """

    def __init__(self, opens: Callable[[], CheckpointStorage]) -> None:
        self._opens = opens
        self._lock = threading.Lock()
        self._opened: CheckpointStorage | None = None

    @property
    def _storage(self) -> CheckpointStorage:
        with self._lock:
            if self._opened is None:
                self._opened = self._opens()
            return self._opened

    def take_over(self) -> None:
        """See :class:`CheckpointStorage`, as for all methods."""
        self._storage.take_over()

    def pending(self, step: int, attempt: SaveAttempt) -> PendingCheckpoint:
        """Return the pending checkpoint of a save."""
        return self._storage.pending(step, attempt)

    def committed(self, step: int) -> Path | str | None:
        """Return the checkpoint of a step that no other may replace."""
        return self._storage.committed(step)

    def newest(self, excluded: Collection[str]) -> Newest:
        """Return the whole checkpoint that was committed last, and what is damaged."""
        return self._storage.newest(excluded)

    def read(self, path: Path | str) -> Committed:
        """Return what a checkpoint is."""
        return self._storage.read(path)

    def resolve_name(self, name: str, beside: Path | str | None = None) -> Path | str:
        """Return where the checkpoint is that rank 0 named."""
        return self._storage.resolve_name(name, beside)

    def source(self, made: Committed) -> Source:
        """Return what a checkpoint's files are read from."""
        return self._storage.source(made)

    def mark_damaged(self, made: Committed, damage: Damage) -> None:
        """Record durably that a checkpoint is damaged."""
        self._storage.mark_damaged(made, damage)

    def settle(self, step: int, attempt: SaveAttempt, manifest: ManifestReference) -> bool:
        """Make sure that an attempt is committed, or never will be; return whether it is."""
        return self._storage.settle(step, attempt, manifest)

    def sweep(
        self,
        keep_last: int | None,
        decided: SaveAttempt,
        used: Collection[Path | str],
        excluded: Collection[str] = (),
    ) -> None:
        """Remove what failed saves have left, and all but the checkpoints committed last."""
        self._storage.sweep(keep_last, decided, used, excluded)
