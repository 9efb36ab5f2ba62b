"""Digests a framework's checkpoint when all ranks have written it, and verifies it before a load.

A framework writes its bytes itself, so they cannot be digested on their way. Each rank reads a share of the
written files instead. The files are cut into segments, and all shares have about as many bytes.
"""

import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile
from zlib import crc32

from muster.checkpoint.committed import MARKER
from muster.checkpoint.damage import DAMAGED, KEPT, Damage, DamageError
from muster.checkpoint.digest import Segment, digest_of
from muster.checkpoint.directory import sync, sync_file
from muster.checkpoint.manifest import MANIFEST, FileEntry, Manifest, ManifestReference
from muster.checkpoint.retry import retrying
from muster.checkpoint.source import FolderSource, Source, source_of
from muster.checkpoint.verification import check_present, confirmed, present, read_item, read_manifest
from muster.worker.saves.storage.rank_note import read_note

NOTES = ".ranks"
"""The folder, in an uncommitted save, with the notes that the ranks leave for rank 0."""
SEGMENT = 16 * 2**20
"""Bytes of a segment; the last one of a file is shorter."""
THREADS = 4
"""Segments that a rank reads at the same time."""
OURS = {MARKER, MANIFEST, DAMAGED, KEPT}
"""Files that Muster adds to a checkpoint."""


class Piece(NamedTuple):
    """The location of a segment."""

    file: str
    """Its path in the checkpoint."""
    offset: int
    length: int


# ---------------------------------------------------------------------- a save


def is_archive(path: Path) -> bool:
    """Return whether a file is a whole archive, as ``torch.save`` writes. A torn one has no directory.

    Args:
        path: the file.

    Raises:
        OSError: it is not there, or cannot be read. ``zipfile.is_zipfile`` takes that for a torn file.
    """
    try:
        retrying(str(path), lambda: ZipFile(path).close())
    except BadZipFile:
        return False
    return True


def record_share(folder: Path, rank: int, world_size: int) -> int:
    """Sync and digest this rank's share, and leave a note for rank 0, when all ranks have written.

    Args:
        folder: the folder that all ranks have written.
        rank: this rank.
        world_size: the number of ranks that do so.

    Returns:
        The bytes of the share.

    Raises:
        OSError: the share cannot be read or synced.
    """
    # An NFS client may have cached that the folder, made by another rank, is missing: mkdir asks again.
    (folder / NOTES).mkdir(parents=True, exist_ok=True)
    _sync_share(folder, world_size)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="muster-digest") as pool:
        pieces = _share(_pieces(_sizes(folder)), rank, world_size)
        digests = dict(zip(pieces, pool.map(lambda piece: _digest(folder, piece), pieces), strict=True))
    leave_note(folder, rank, encoded(digests))
    return sum(piece.length for piece in pieces)


def gather_manifest(folder: Path, world_size: int) -> Manifest:
    """Return the manifest, made of the notes of all ranks, and remove the notes. Only rank 0 calls this.

    Args:
        folder: the folder that all ranks have written.
        world_size: the number of ranks that have left a note.

    Raises:
        FileExistsError: the framework has written a file with a name that Muster needs.
        FileNotFoundError: nothing was written.
        OSError: a note is not there, or a file cannot be read.
        ValueError: a note is not what a rank of this version writes.
    """
    digests: dict[Piece, bytes] = {}
    for note in take_notes(folder, range(world_size)):
        digests.update(read_note(note, _parse))
    files: dict[str, list[Segment]] = {}
    sizes = _sizes_now(folder, {*_sizes(folder), *(piece.file for piece in digests)})
    if not sizes:
        raise FileNotFoundError(f"the ranks have written nothing into {folder}.")
    for name in sizes:
        if name in OURS:
            raise FileExistsError(
                f"the framework wrote {folder / name}, and Muster needs that name for its own."
            )
        files[name] = []
    for piece in _pieces(sizes):
        # A rank may have seen an outdated size of a file that another rank wrote. Then no rank has read this.
        digest = digests.get(piece) or _digest(folder, piece)
        files[piece.file].append(Segment(piece.length, digest))
    return Manifest({name: FileEntry(tuple(segments)) for name, segments in files.items()})


def manifest_of_file(path: Path) -> Manifest:
    """Return the manifest of a checkpoint that is one file. Only the rank that has written it calls this.

    Raises:
        OSError: it cannot be read.
    """
    pieces = list(_pieces({path.name: path.stat().st_size}))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="muster-digest") as pool:
        digests = list(pool.map(lambda piece: _digest(path.parent, piece), pieces))
    segments = (Segment(piece.length, digest) for piece, digest in zip(pieces, digests, strict=True))
    return Manifest({path.name: FileEntry(tuple(segments))})


def encoded(digests: Mapping[Piece, bytes]) -> bytes:
    """Return a note, which is JSON."""
    return json.dumps([(*piece, digest.hex()) for piece, digest in digests.items()]).encode()


def _parse(said: Iterable[tuple[str, int, int, str]]) -> dict[Piece, bytes]:
    return {Piece(file, offset, length): bytes.fromhex(digest) for file, offset, length, digest in said}


def leave_note(folder: Path, rank: int, note: bytes) -> None:
    """Leave a note for rank 0, and sync the entries that this rank has made in the folder."""
    notes = folder / NOTES
    notes.mkdir(exist_ok=True)
    (notes / str(rank)).write_bytes(note)
    sync(folder)


def take_notes(folder: Path, ranks: Iterable[int]) -> list[bytes]:
    """Return the notes of ranks, in this order, and remove them.

    Raises:
        FileNotFoundError: a rank has left nothing here.
    """
    notes = folder / NOTES
    taken = []
    for rank in ranks:
        try:
            taken.append((notes / str(rank)).read_bytes())
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"the note of rank {rank} is not in {notes}: the ranks do not share the folder, or another "
                "job has removed it. Give each job a folder that all its ranks share."
            ) from error
    shutil.rmtree(notes)
    return taken


def _sync_share(folder: Path, world_size: int) -> None:
    """Sync the files and folders that this host has written: each of its ranks syncs a part.

    A host's kernel caches what any of its processes wrote, so any of them can sync it.
    """
    rank, count = _local_rank(world_size)
    for path, is_folder in _written(folder):
        # By its name, and not by its place in a list: two ranks may not list the same.
        if crc32(os.fsencode(path.relative_to(folder))) % count == rank:
            (sync if is_folder else sync_file)(path)


def _written(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield a folder and all that a framework wrote below it, without links; and whether each is a folder.

    Raises:
        OSError: a folder cannot be listed. ``Path.rglob`` takes that for an empty one from Python 3.13 on.
    """

    def fail(error: OSError) -> None:
        raise error

    for where, folders, files in os.walk(folder, onerror=fail):
        if Path(where) == folder and NOTES in folders:
            folders.remove(NOTES)
        yield Path(where), True
        for name in files:
            path = Path(where, name)
            if not path.is_symlink():
                yield path, False


def _local_rank(world_size: int) -> tuple[int, int]:
    """Return this rank's local rank and the number of ranks on this host; (0, 1) if they are not known."""
    try:
        rank, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, count) if 0 <= rank < count <= world_size else (0, 1)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the files that a framework wrote, and their sizes."""
    there = FolderSource(folder).sizes()
    return {name: size for name, size in sorted(there.items()) if not name.startswith(f"{NOTES}/")}


def _sizes_now(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """The sizes of files that are there: an NFS client asks its server only when a file is opened."""
    sizes = {}
    for name in sorted(names):
        with suppress(FileNotFoundError), (folder / name).open("rb") as file:
            sizes[name] = os.fstat(file.fileno()).st_size
    return sizes


def _pieces(sizes: Mapping[str, int]) -> Iterator[Piece]:
    for name, size in sizes.items():
        for offset in range(0, size, SEGMENT):
            yield Piece(name, offset, min(SEGMENT, size - offset))


def _digest(folder: Path, piece: Piece) -> bytes:
    with FolderSource(folder).open(piece.file) as file:
        data = file.read(piece.offset, piece.length)
    if len(data) < piece.length:
        raise OSError(f"{folder / piece.file} has become shorter while it was read.")
    return digest_of(data)


def _share(pieces: Iterator[Piece], rank: int, world_size: int) -> list[Piece]:
    """Return the pieces of one rank: a stretch of about the same number of bytes as any other rank's."""
    every = list(pieces)
    total = sum(piece.length for piece in every)
    mine = []
    begin = 0
    for piece in every:
        if begin * world_size // total == rank:
            mine.append(piece)
        begin += piece.length
    return mine


# ---------------------------------------------------------------------- a load


def verify_share(
    path: Path, reference: ManifestReference | None, rank: int, world_size: int
) -> Damage | None:
    """Verify this rank's share of a checkpoint, before all ranks load it.

    Args:
        path: the checkpoint, a folder or a file.
        reference: the marker's reference to its manifest; None if it has none, and cannot be verified.
        rank: this rank.
        world_size: the number of ranks that do so.

    Returns:
        The damage; None for a whole share.

    Raises:
        OSError: it cannot be read.
    """
    source = source_of(path)
    try:
        manifest = read_manifest(source, reference)
        if manifest is None:
            return None
        if rank == 0:
            check_present(source, manifest)
        segments = {
            Piece(name, offset, segment.length): segment
            for name, entry in sorted(manifest.files.items())
            for offset, segment in _placed(entry)
        }
        mine = _share(iter(segments), rank, world_size)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="muster-verify") as pool:
            for _ in pool.map(lambda piece: _verify(source, piece, segments[piece]), mine):
                pass
    except DamageError as error:
        return replace(error.damage, rank=rank, host=socket.gethostname())
    return None


def _placed(entry: FileEntry) -> Iterator[tuple[int, Segment]]:
    offset = 0
    for segment in entry.segments:
        yield offset, segment
        offset += segment.length


def _verify(source: Source, piece: Piece, segment: Segment) -> None:
    buffer = memoryview(bytearray(segment.length))

    def read() -> None:
        with source.open(piece.file) as file:
            read_item(file, piece.file, piece.offset, (segment,), buffer)

    confirmed(f"{source.place}/{piece.file}", lambda: present(piece.file, read))
