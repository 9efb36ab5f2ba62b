"""The content of a framework's checkpoint: digested when all ranks have written, verified before a load.

The framework's bytes cannot be digested on their way. So each rank reads a share of what was written. The
files are cut into segments, and each rank takes about as many bytes as the others.
"""

import os
import pickle
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from muster.checkpoint.committed import MARKER
from muster.checkpoint.damage import DAMAGED, Damage, DamageError
from muster.checkpoint.digest import Segment, digest_of
from muster.checkpoint.directory import sync, sync_file
from muster.checkpoint.manifest import MANIFEST, FileEntry, Manifest, ManifestReference
from muster.checkpoint.retry import retrying
from muster.checkpoint.source import FolderSource
from muster.checkpoint.verification import check_sizes, read_item, read_manifest

NOTES = ".ranks"
"""In a save that is not committed: what ranks tell rank 0."""
SEGMENT = 16 * 2**20
"""Bytes of a segment; the last one of a file is shorter."""
THREADS = 4
"""Segments that a rank reads at the same time."""
OURS = {MARKER, MANIFEST, DAMAGED}
"""Files that Muster adds to a checkpoint."""


class Piece(NamedTuple):
    """A segment of a file, by where it is."""

    file: str
    """Its path in the checkpoint."""
    offset: int
    length: int


# ---------------------------------------------------------------------- a save


def record_share(folder: Path, rank: int, world_size: int) -> None:
    """When all ranks have written: put this rank's share on the disk, digest it, and leave a note for rank 0.

    Args:
        folder: what all have written.
        rank: this one's.
        world_size: how many ranks do so.

    Raises:
        OSError: it cannot be read, or not be put on the disk.
    """
    # An NFS client may remember that the folder, which another rank has made, is not there: mkdir asks anew.
    (folder / NOTES).mkdir(parents=True, exist_ok=True)
    _sync_share(folder, world_size)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="muster-digest") as pool:
        pieces = _share(_pieces(_sizes(folder)), rank, world_size)
        digests = dict(zip(pieces, pool.map(lambda piece: _digest(folder, piece), pieces), strict=True))
    leave_note(folder, rank, pickle.dumps(digests))


def gather_manifest(folder: Path, world_size: int) -> Manifest:
    """On rank 0, when all have left their notes: return the manifest, and remove the notes.

    Args:
        folder: what all have written.
        world_size: how many ranks have left a note.

    Raises:
        FileExistsError: the framework has written a file of a name that Muster needs.
        FileNotFoundError: nothing was written.
        OSError: a note is not there, or a file cannot be read.
    """
    digests: dict[Piece, bytes] = {}
    for note in take_notes(folder, range(world_size)):
        digests.update(pickle.loads(note))
    files: dict[str, list[Segment]] = {}
    sizes = _sizes_now(folder, {*_sizes(folder), *(piece.file for piece in digests)})
    if not sizes:
        raise FileNotFoundError(f"the ranks have written nothing into {folder}.")
    for name in sizes:
        if name in OURS:
            raise FileExistsError(f"{folder / name} is of the framework, and Muster has a file of this name.")
        files[name] = []
    for piece in _pieces(sizes):
        # A rank may have seen an outdated size of what another one wrote. Then nobody has read this piece.
        digest = digests.get(piece) or _digest(folder, piece)
        files[piece.file].append(Segment(piece.length, digest))
    return Manifest({name: FileEntry(tuple(segments)) for name, segments in files.items()})


def leave_note(folder: Path, rank: int, note: bytes) -> None:
    """Tell rank 0 something, and put the entries of the folder on the disk that this rank has made."""
    notes = folder / NOTES
    notes.mkdir(exist_ok=True)
    (notes / str(rank)).write_bytes(note)
    sync(folder)


def take_notes(folder: Path, ranks: Iterable[int]) -> list[bytes]:
    """Return what each rank has left, in this order, and remove it.

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
                f"what rank {rank} says of its part is not in {notes}: the ranks do not share the folder, or "
                "another job has removed it."
            ) from error
    shutil.rmtree(notes)
    return taken


def _sync_share(folder: Path, world_size: int) -> None:
    """Put what was written on this host on the disk: its ranks do so together.

    The kernel of a host has in its memory what any process there wrote. So any of them can sync it.
    """
    paths = [
        folder,
        *(path for path in sorted(folder.rglob("*")) if NOTES not in path.relative_to(folder).parts),
    ]
    first, step = _local_rank(world_size)
    for path in paths[first::step]:
        if path.is_dir():
            sync(path)
        elif not path.is_symlink():
            sync_file(path)


def _local_rank(world_size: int) -> tuple[int, int]:
    """This rank's number among those of this host, and how many these are; (0, 1) if that is not known."""
    try:
        rank, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, count) if 0 <= rank < count <= world_size else (0, 1)


def _sizes(folder: Path) -> dict[str, int]:
    """The files of a checkpoint that a framework wrote."""
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
    """Of all pieces those of one rank: a stretch of the bytes, as long as that of any other."""
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
    folder: Path, reference: ManifestReference | None, rank: int, world_size: int
) -> Damage | None:
    """Before all ranks load a checkpoint: see that this rank's share of it is what was committed.

    Args:
        folder: the checkpoint.
        reference: what its marker says of its manifest; None if it names none, and cannot be verified.
        rank: this one's.
        world_size: how many ranks do so.

    Returns:
        What is wrong; None if nothing is.

    Raises:
        OSError: it cannot be read.
    """
    source = FolderSource(folder)
    try:
        manifest = read_manifest(source, reference)
        if manifest is None:
            return None
        if rank == 0:
            check_sizes(manifest, retrying(str(folder), source.sizes))
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


def _verify(source: FolderSource, piece: Piece, segment: Segment) -> None:
    buffer = memoryview(bytearray(segment.length))

    def read() -> None:
        try:
            with source.open(piece.file) as file:
                read_item(file, piece.file, piece.offset, (segment,), buffer)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise DamageError(Damage.found(piece.file, "it is missing")) from error

    try:
        retrying(f"{source.place}/{piece.file}", read)
    except DamageError:
        # A first read may have failed on its way.
        retrying(f"{source.place}/{piece.file}", read)
