"""Copies the parts of checkpoints to shared storage, one after the other, and commits them there."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from muster.checkpoint.damage import Damage, DamageError
from muster.checkpoint.directory import METADATA, CheckpointDirectory
from muster.checkpoint.local_folder import attempt_name
from muster.checkpoint.manifest import MANIFEST
from muster.checkpoint.retry import exists
from muster.keeper.persisting.destination import Described, Destination, LostFilesError
from muster.keeper.persisting.folder import FolderDestination
from muster.keeper.persisting.rate import RateLimit, give_way
from muster.keeper.persisting.reading import verified_pieces
from muster.keeper.vocabulary import Head, LocalCheckpoint

logger = logging.getLogger(__name__)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)")
_FOLDERS = ("file", "local")
"""Schemes of what can rename."""


class SharedStoragePersister:
    """Persists the checkpoints of one run.

    Args:
        run_id: the run.
        rate: bytes a second; 0: without limit.
        options: for what opens an address, such as credentials.
    """

    def __init__(self, run_id: str, rate: int = 0, options: Mapping[str, Any] | None = None) -> None:
        self._run_id = run_id
        self._limit = RateLimit(rate)
        self._options = options or {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="muster-persist", initializer=give_way)
        self._places: dict[str, Callable[[Described], Destination]] = {}
        """By folder or address."""

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def persist(self, checkpoint: LocalCheckpoint, head: Head, folder: Path, rank: int) -> None:
        """Copy a rank's part. Files that are there already are not copied again."""
        await asyncio.get_running_loop().run_in_executor(
            self._thread, self._persist, checkpoint, head, folder, rank
        )

    async def prepare(self, checkpoint: LocalCheckpoint, head: Head, folder: Path) -> str:
        """Do all that comes before the commit of a checkpoint; return its path if it is committed already."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._prepare, checkpoint, head, folder
        )

    async def commit(
        self, checkpoint: LocalCheckpoint, head: Head, unsettled: Sequence[LocalCheckpoint]
    ) -> str:
        """Commit a checkpoint that was prepared; return its path."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._commit, checkpoint, head, unsettled
        )

    def _persist(self, checkpoint: LocalCheckpoint, head: Head, folder: Path, rank: int) -> None:
        destination = self._destination(checkpoint)
        if destination.is_committed():
            return
        destination.enter(rank)
        self._copy(destination, head, folder, sorted(head.part(rank)))
        logger.info("copied the part of rank %d of %s", rank, _named(checkpoint))

    def _copy(self, destination: Destination, head: Head, folder: Path, names: Iterable[str]) -> None:
        there = destination.sizes()
        for name in names:
            entry = head.entry(name)
            if there.get(name) == entry.size and destination.has(name, entry):
                continue
            destination.write(name, verified_pieces(folder / name, name, entry, self._limit.take))
        destination.flush()

    def _prepare(self, checkpoint: LocalCheckpoint, head: Head, folder: Path) -> str:
        destination = self._destination(checkpoint)
        if destination.is_committed():
            return destination.path
        there = destination.sizes()
        lost = [
            name
            for name, entry in head.manifest.files.items()
            if name != METADATA and there.get(name) != entry.size
        ]
        # Something removed them since they were copied, such as a restart of the job.
        if gone := [name for name in lost if not exists(folder / name)]:
            raise LostFilesError(gone, destination.path)
        for name in lost:
            destination.enter(head.entry(name).rank or 0)
            self._copy(destination, head, folder, [name])
        # The files of the head may have been damaged since the keeper verified them.
        metadata = verified_pieces(folder / METADATA, METADATA, head.entry(METADATA), lambda _: None)
        destination.write_small(METADATA, b"".join(map(bytes, metadata)))
        manifest = (folder / MANIFEST).read_bytes()
        if not head.reference.matches(manifest):
            raise DamageError(Damage.found(MANIFEST, "it is not what was written"))
        destination.write_small(MANIFEST, manifest)
        return ""

    def _commit(self, checkpoint: LocalCheckpoint, head: Head, unsettled: Sequence[LocalCheckpoint]) -> str:
        for one in unsettled:
            if one.persist_to == checkpoint.persist_to:
                is_there = self._destination(one).settle()
                logger.info(
                    "%s is %sin shared storage", _named(one), "" if is_there else "not, and will not be, "
                )
        destination = self._destination(checkpoint)
        sizes = {name: entry.size for name, entry in head.manifest.files.items()}
        made = Described(checkpoint, self._run_id).made(destination.path)
        destination.commit(made, {**sizes, MANIFEST: head.reference.size})
        logger.info("committed %s as %s", _named(checkpoint), destination.path)
        return destination.path

    def _destination(self, checkpoint: LocalCheckpoint) -> Destination:
        """Return the place of a checkpoint.

        Raises:
            OSError: nothing can be written there.
            ValueError: it is no folder, and no address.
        """
        where = checkpoint.persist_to
        if where not in self._places:
            self._places[where] = self._open(where)
        return self._places[where](Described(checkpoint, self._run_id))

    def _open(self, where: str) -> Callable[[Described], Destination]:
        scheme = _SCHEME.fullmatch(where)
        if scheme is None or scheme[1] in _FOLDERS:
            directory = CheckpointDirectory(Path(where if scheme is None else scheme[2]), self._run_id)
            return lambda described: FolderDestination(directory, described)
        # What opens buckets is loaded only for them.
        try:
            from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
            from muster.checkpoint.bucket.protocol import CheckpointBucket
            from muster.keeper.persisting.bucket import BucketDestination

            objects = FsspecObjects(where, self._options)
        except ImportError as error:
            raise OSError(f"{where} cannot be opened: {error}") from error
        bucket = CheckpointBucket(objects, objects.url, self._run_id)
        return lambda described: BucketDestination(objects, bucket, described)


def _named(checkpoint: LocalCheckpoint) -> str:
    return f"step {checkpoint.step} ({attempt_name(checkpoint.attempt)})"
