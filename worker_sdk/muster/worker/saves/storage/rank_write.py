"""The note by which a rank tells rank 0 what it wrote of a checkpoint, and the manifest made of all notes."""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from muster.checkpoint.digest import Segment
from muster.checkpoint.manifest import FileEntry, Manifest, RankEntry
from muster.worker.saves.storage.rank_note import read_note

METADATA = ".metadata"
"""Torch's file, without which nothing can be loaded."""


def written_note(rank: int) -> str:
    """Return the name of the note by which a rank tells what it wrote."""
    return f"written-{rank}"


@dataclass(frozen=True, slots=True)
class RankWrite:
    """The part of a checkpoint that one rank wrote.

    Args:
        results: torch's result for each item.
        files: by name, the segments of each file.
        host: the host that wrote it.
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
            RuntimeError: an item cannot be verified by itself: this version of torch writes in another way.
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

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(segment.length for segments in self.files.values() for segment in segments)

    def encode(self) -> bytes:
        """Encode it as a note, which is JSON."""
        files = {
            name: [(segment.length, segment.digest.hex()) for segment in segments]
            for name, segments in self.files.items()
        }
        results = [_fields(result) for result in self.results]
        said = {"results": results, "files": files, "host": self.host, "seconds": self.seconds}
        return json.dumps(said, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, note: bytes) -> "RankWrite":
        """Decode a note of a rank of this job.

        Raises:
            ValueError: a rank of this version writes no such note.
        """
        return read_note(note, cls._parse)

    @classmethod
    def _parse(cls, said: Mapping[str, Any]) -> "RankWrite":
        files = {
            name: tuple(Segment(length, bytes.fromhex(digest)) for length, digest in segments)
            for name, segments in said["files"].items()
        }
        return cls([_result(fields) for fields in said["results"]], files, said["host"], said["seconds"])


def _fields(result: WriteResult) -> tuple[Any, ...]:
    """Return torch's result for an item as JSON takes it."""
    index, stored = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    place = (stored.relative_path, stored.offset, stored.length, stored.transform_descriptors)
    return (index.fqn, offset, index.index, result.size_in_bytes, place)


def _result(fields: Sequence[Any]) -> WriteResult:
    fqn, offset, number, size, place = fields
    return WriteResult(MetadataIndex(fqn, offset, number), size, _StorageInfo(*place))


def manifest_of(writes: Sequence[RankWrite], metadata: tuple[Segment, ...]) -> Manifest:
    """Return the manifest of a checkpoint that all ranks have written.

    Args:
        writes: the parts, in the order of their ranks.
        metadata: the segments of torch's ``.metadata``, which rank 0 wrote.
    """
    files = {METADATA: FileEntry(metadata, 0)}
    ranks = []
    for rank, write in enumerate(writes):
        own = {name: FileEntry(segments, rank) for name, segments in write.files.items()}
        ranks.append(RankEntry(rank, write.host, sum(one.size for one in own.values()), write.seconds))
        files |= own
    return Manifest(files, tuple(ranks))
