"""The manifest of a checkpoint: every file with its size and digests, and what each rank wrote.

It is a JSON object, in the file ``manifest.json`` beside torch's ``.metadata``::

    {"format": 1, "algorithm": "xxh3-128",
     "files": {"__0_0.distcp": {"size": 4096, "digest": "…", "rank": 0,
                                "lengths": [4000, 96], "digests": "…"}},
     "ranks": [{"rank": 0, "host": "node-0", "bytes": 4096, "seconds": 0.5}]}

``lengths`` and ``digests`` (32 hexadecimal digits each, joined) describe the segments of a file, in order.
They cover the file from its first byte to its last. A file's ``digest`` is the digest of its segments'
digests, joined.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from muster.checkpoint.digest import ALGORITHM, SIZE, Readable, Segment, digest_of, file_digest
from muster.checkpoint.version import FORMAT, LaterVersionError

MANIFEST = "manifest.json"
"""The name of the file."""


class ManifestError(ValueError):
    """A manifest cannot be read."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    segments: tuple[Segment, ...]
    rank: int | None = None
    """The rank that wrote it; None if it is not known."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self._ends[-1] if self._ends else 0

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(segment.length for segment in self.segments))

    @property
    def digest(self) -> bytes:
        """The digest of the whole file."""
        return file_digest(self.segments)

    def between(self, offset: int, length: int) -> tuple[Segment, ...]:
        """Return the segments of an item.

        Args:
            offset: where the item begins, in bytes.
            length: of the item, in bytes.

        Raises:
            ValueError: no segment begins or ends there, so the item cannot be verified by itself.
        """
        if length == 0:
            return ()
        ends = self._ends
        first = 0 if offset == 0 else bisect_left(ends, offset) + 1
        last = bisect_left(ends, offset + length)
        begins = 0 if first == 0 else ends[first - 1] if first <= len(ends) else -1
        if begins != offset or last >= len(ends) or ends[last] != offset + length:
            raise ValueError(f"no segments cover exactly {length} bytes from offset {offset} on")
        return self.segments[first : last + 1]


@dataclass(frozen=True, slots=True)
class RankEntry:
    """The part of a checkpoint that one rank wrote."""

    rank: int
    host: str
    size: int
    """Bytes."""
    seconds: float
    """How long its write took."""


@dataclass(frozen=True, slots=True)
class ManifestReference:
    """The size and digest of a manifest, as the marker names them."""

    size: int
    """Bytes."""
    digest: str
    """In hexadecimal digits."""

    @classmethod
    def of(cls, data: bytes) -> "ManifestReference":
        """Return the reference to an encoded manifest."""
        return cls(len(data), digest_of(data).hex())

    def matches(self, data: bytes) -> bool:
        """Return whether these bytes are the manifest."""
        return self == self.of(data)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a checkpoint, and the part of each rank."""

    files: Mapping[str, FileEntry]
    """By their path in the checkpoint."""
    ranks: tuple[RankEntry, ...] = field(default=())

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        """Return the content of ``manifest.json``."""
        files = {
            name: {
                "size": entry.size,
                "digest": entry.digest.hex(),
                **({} if entry.rank is None else {"rank": entry.rank}),
                "lengths": [segment.length for segment in entry.segments],
                "digests": b"".join(segment.digest for segment in entry.segments).hex(),
            }
            for name, entry in sorted(self.files.items())
        }
        ranks = [
            {"rank": one.rank, "host": one.host, "bytes": one.size, "seconds": round(one.seconds, 3)}
            for one in self.ranks
        ]
        said = {"format": FORMAT, "algorithm": ALGORITHM, "files": files, "ranks": ranks}
        return json.dumps(said, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: Readable) -> "Manifest":
        """Read the content of ``manifest.json``.

        Raises:
            ManifestError: it is damaged.
            LaterVersionError: another version of Muster wrote it.
        """
        try:
            said = json.loads(bytes(data))
            if (found := (said["format"], said["algorithm"])) != (FORMAT, ALGORITHM):
                raise LaterVersionError.of(MANIFEST, found)
            files = {str(name): _file_entry(one) for name, one in said["files"].items()}
            ranks = tuple(
                RankEntry(
                    _count(one["rank"]), str(one["host"]), _count(one["bytes"]), _seconds(one["seconds"])
                )
                for one in said["ranks"]
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ManifestError(f"the manifest cannot be read: {error!r}") from error
        return cls(files, ranks)


def _count(value: object) -> int:
    if not (type(value) is int and 0 <= value < 2**63):
        raise ValueError(f"{value!r} is neither a number of bytes nor a rank")
    return value


def _seconds(value: object) -> float:
    if not (isinstance(value, int | float) and 0 <= value < float("inf")):
        raise ValueError(f"{value!r} is not a duration in seconds")
    return float(value)


def _file_entry(said: Mapping[str, Any]) -> FileEntry:
    digests = bytes.fromhex(said["digests"])
    lengths = [_count(length) for length in said["lengths"]]
    if len(digests) != SIZE * len(lengths) or min(lengths, default=1) < 1:
        raise ValueError(f"{len(lengths)} segments have {len(digests)} bytes of digests")
    rank = said.get("rank")
    entry = FileEntry(
        tuple(
            Segment(length, digests[number * SIZE : (number + 1) * SIZE])
            for number, length in enumerate(lengths)
        ),
        None if rank is None else _count(rank),
    )
    if entry.size != said["size"] or entry.digest.hex() != said["digest"]:
        raise ValueError("a file's size or digest does not agree with its segments")
    return entry
