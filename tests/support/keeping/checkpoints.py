"""Local checkpoints for the tests of keepers, made without torch."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.digest import SegmentDigester
from muster.checkpoint.directory import METADATA
from muster.checkpoint.manifest import MANIFEST, FileEntry, Manifest, ManifestReference, RankEntry
from muster.keeper.vocabulary import LocalCheckpoint
from muster.v1 import local_pb2 as pb


def entry_of(data: bytes, rank: int | None, segment: int = 50_000) -> FileEntry:
    """The size and digests of a file that was written in items of this size."""
    digester = SegmentDigester()
    for begin in range(0, len(data), segment):
        digester.update(data[begin : begin + segment])
        digester.cut()
    return FileEntry(digester.segments(), rank)


def _bytes(drawn: random.Random, size: int) -> bytes:
    block = 2**20
    return b"".join(drawn.randbytes(min(block, size - begin)) for begin in range(0, size, block))


@dataclass(frozen=True)
class MadeCheckpoint:
    """A checkpoint, and all of its bytes."""

    attempt: SaveAttempt
    step: int
    parts: Mapping[int, Mapping[str, bytes]]
    head: Mapping[str, bytes]

    @property
    def manifest(self) -> bytes:
        return self.head[MANIFEST]

    @property
    def name(self) -> str:
        return f"{self.attempt.generation}-{self.attempt.number}"

    @property
    def files(self) -> dict[str, bytes]:
        """All files by their names."""
        return {**self.head, **{name: data for part in self.parts.values() for name, data in part.items()}}

    def write(self, folder: Path, ranks: Iterable[int], *, head: bool = False) -> None:
        """Write what these ranks write, as the rank 0 among them does last."""
        path = folder / self.name
        path.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            for name, data in self.parts[rank].items():
                (path / name).write_bytes(data)
        for name, data in self.head.items() if head else ():
            (path / name).write_bytes(data)

    def differing(self, folder: Path) -> list[str]:
        """The names of the files that are not in a folder as they were made."""
        paths = {name: folder / name for name in self.files}
        return [
            name
            for name, data in self.files.items()
            if not paths[name].exists() or paths[name].read_bytes() != data
        ]

    def message(self, replicas: int = 1, persist_to: str = "", keep_persisted: int = 0) -> pb.LocalCheckpoint:
        """What the coordinator says of it."""
        reference = ManifestReference.of(self.manifest)
        return pb.LocalCheckpoint(
            attempt=pb.Attempt(generation=self.attempt.generation, number=self.attempt.number),
            step=self.step,
            world_size=len(self.parts),
            manifest_size=reference.size,
            manifest_digest=bytes.fromhex(reference.digest),
            replicas=replicas,
            persist_to=persist_to,
            keep_persisted=keep_persisted,
            size=sum(map(len, self.files.values())),
        )

    def local(self, persist_to: str = "", keep_persisted: int = 0) -> LocalCheckpoint:
        """The same in a keeper's words."""
        return LocalCheckpoint(
            attempt=self.attempt,
            step=self.step,
            world_size=len(self.parts),
            manifest=ManifestReference.of(self.manifest),
            persist_to=persist_to,
            keep_persisted=keep_persisted,
        )


def made_checkpoint(
    world_size: int = 2,
    number: int = 0,
    step: int | None = None,
    size: int = 200_000,
    files: int = 1,
) -> MadeCheckpoint:
    """Make a checkpoint whose bytes depend on its attempt.

    Args:
        world_size: the number of ranks.
        number: of the attempt.
        step: default: ten times the next number.
        size: bytes of each file.
        files: of each rank.
    """
    drawn = random.Random(f"1 {number}")
    parts = {
        rank: {f"__{rank}_{one}.distcp": _bytes(drawn, size) for one in range(files)}
        for rank in range(world_size)
    }
    metadata = drawn.randbytes(3_000)
    entries = {METADATA: entry_of(metadata, 0)}
    for rank, part in parts.items():
        entries |= {name: entry_of(data, rank) for name, data in part.items()}
    ranks = tuple(RankEntry(rank, f"node-{rank}", size * files, 0.1) for rank in parts)
    head = {METADATA: metadata, MANIFEST: Manifest(entries, ranks).encode()}
    return MadeCheckpoint(SaveAttempt(1, number), 10 * (number + 1) if step is None else step, parts, head)
