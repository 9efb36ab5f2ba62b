"""Committed checkpoints as ranks leave them, in folders and buckets, written without torch."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from muster.checkpoint.bucket.attempts import Attempt
from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.bucket.protocol import CheckpointBucket
from muster.checkpoint.committed import Committed, SaveAttempt
from muster.checkpoint.digest import SegmentDigester
from muster.checkpoint.directory import CheckpointDirectory, write_marker
from muster.checkpoint.manifest import MANIFEST, FileEntry, Manifest, ManifestReference, RankEntry

ITEMS = {"__0_0.distcp": [b"weight", b"b", b"optimizer"], "__1_0.distcp": [b"more weights"]}
"""Files, each with its items: that of rank 0 and that of rank 1."""

ODD: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 10**400, 1.5, float("nan"), float("inf"),
    "", "7", "\x1b[31m", [], [[]], {}, {"a": 1},
)  # fmt: skip
"""What JSON may hold where something else is expected."""


def entry_of(items: list[bytes], rank: int | None = None) -> FileEntry:
    digester = SegmentDigester()
    for item in items:
        digester.update(item)
        digester.cut()
    return FileEntry(digester.segments(), rank)


def manifest_of(files: Mapping[str, list[bytes]]) -> Manifest:
    """The first file is rank 0's, the next rank 1's."""
    entries = {name: entry_of(items, rank) for rank, (name, items) in enumerate(files.items())}
    ranks = [RankEntry(one.rank or 0, f"node-{one.rank}", one.size, 1.5) for one in entries.values()]
    return Manifest(entries, tuple(ranks))


def write_files(path: Path, files: Mapping[str, list[bytes]]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, items in files.items():
        (path / name).write_bytes(b"".join(items))


def in_folder(
    folder: Path,
    step: int,
    *,
    digests: bool = True,
    committed_at: float = 1_700_000_000.0,
) -> Path:
    """Commit a checkpoint of two ranks, as a ``Checkpointer`` does."""
    directory = CheckpointDirectory(folder)
    unfinished = directory.unfinished(step, SaveAttempt(0, step))
    write_files(unfinished, ITEMS)
    made = Committed(step, 2, "job1", "save", step, directory.path(step), committed_at=committed_at)
    if digests:
        data = manifest_of(ITEMS).encode()
        (unfinished / MANIFEST).write_bytes(data)
        made = replace(made, manifest=ManifestReference.of(data))
    directory.commit(unfinished, made)
    return directory.path(step)


def by_adapter(path: Path, *, digests: bool = True) -> Path:
    """Commit a checkpoint as a framework's adapter does: its marker names no step."""
    write_files(path, ITEMS)
    marker = {"run_id": "job1", "generation": 0, "world_size": 2, "prefix": "checkpoint/dcp", "sequence": 4}
    if digests:
        data = manifest_of(ITEMS).encode()
        (path / MANIFEST).write_bytes(data)
        marker["manifest"] = asdict(ManifestReference.of(data))
    write_marker(path, marker)
    return path


def in_bucket(
    objects: FsspecObjects,
    step: int,
    *,
    save: SaveAttempt = SaveAttempt(0, 0),  # noqa: B008 - it is immutable
    bucket: CheckpointBucket | None = None,
) -> Attempt:
    """Commit a checkpoint of two ranks to a bucket; a bucket that is given knows the earlier ones."""
    bucket = bucket or CheckpointBucket(objects, objects.url, "job1")
    attempt = bucket.attempt(step, save)
    held = {name: b"".join(items) for name, items in ITEMS.items()}
    held[MANIFEST] = manifest_of(ITEMS).encode()
    held |= {".entered-0": b"", ".entered-1": b""}
    for name, data in held.items():
        objects.put(f"{attempt.name}/{name}", data)
    made = Committed(
        step,
        2,
        "job1",
        "save",
        step,
        bucket.path(attempt),
        committed_at=1_700_000_000.0,
        manifest=ManifestReference.of(held[MANIFEST]),
    )
    bucket.commit(attempt, made, {name: len(data) for name, data in held.items()})
    return attempt
