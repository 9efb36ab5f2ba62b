"""What one rank wrote of a checkpoint: the note that it leaves for rank 0, which commits."""

import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from muster.checkpoint.digest import Segment
from muster.checkpoint.manifest import FileEntry, Manifest, RankEntry

METADATA = ".metadata"
"""Torch's file, without which nothing can be loaded."""


@dataclass(frozen=True, slots=True)
class RankWrite:
    """What one rank wrote.

    Args:
        results: what torch says of each item.
        files: by name, the segments of each file.
        host: where it wrote.
        seconds: how long its write took.
    """

    results: list[WriteResult]
    files: Mapping[str, tuple[Segment, ...]]
    host: str
    seconds: float

    @classmethod
    def of(
        cls, results: list[WriteResult], files: Mapping[str, tuple[Segment, ...]], seconds: float
    ) -> "RankWrite":
        """Describe what this process has just written.

        Raises:
            RuntimeError: an item cannot be verified by itself: this torch writes otherwise than expected.
        """
        entries = {name: FileEntry(segments) for name, segments in files.items()}
        for result in results:
            stored: _StorageInfo = result.storage_data
            try:
                entries[stored.relative_path].between(stored.offset, stored.length)
            except (KeyError, ValueError) as error:
                raise RuntimeError(
                    f"{result.index.fqn} in {stored.relative_path} cannot be given a digest: {error!r}. This "
                    "version of torch writes files in another way; use one that docs/compatibility.md names."
                ) from error
        return cls(results, dict(files), socket.gethostname(), seconds)

    def encode(self) -> bytes:
        """Return it as a note."""
        return pickle.dumps(self)

    @classmethod
    def decode(cls, note: bytes) -> "RankWrite":
        """Read a note of a rank of this job."""
        said: RankWrite = pickle.loads(note)
        return said


def manifest_of(writes: Sequence[RankWrite], metadata: tuple[Segment, ...]) -> Manifest:
    """Return the manifest of a checkpoint that all ranks have written.

    Args:
        writes: by rank, what it wrote.
        metadata: the segments of torch's ``.metadata``, which rank 0 wrote.
    """
    files = {METADATA: FileEntry(metadata, 0)}
    ranks = []
    for rank, write in enumerate(writes):
        own = {name: FileEntry(segments, rank) for name, segments in write.files.items()}
        ranks.append(RankEntry(rank, write.host, sum(one.size for one in own.values()), write.seconds))
        files |= own
    return Manifest(files, tuple(ranks))
