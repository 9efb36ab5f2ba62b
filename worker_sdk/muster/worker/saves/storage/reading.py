"""Torch's reader of a committed checkpoint. It verifies every item before it is loaded into the state."""

import io
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future as WorkFuture
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from muster.checkpoint.committed import Committed
from muster.checkpoint.damage import Damage, DamageError
from muster.checkpoint.digest import Segment
from muster.checkpoint.manifest import MANIFEST, Manifest
from muster.checkpoint.retry import retrying
from muster.checkpoint.source import Source, read_whole
from muster.checkpoint.verification import (
    check_present,
    confirmed,
    present,
    read_file,
    read_item,
    read_manifest,
)
from muster.worker.saves.storage.rank_write import METADATA

AHEAD = 64 * 2**20
"""Bytes that are read and verified before torch asks for them, at most; at least one item."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint that this rank can load."""

    made: Committed
    source: Source
    metadata: Metadata
    manifest: Manifest | None
    """None: the checkpoint is loaded unverified."""


def open_checkpoint(made: Committed, source: Source, *, verify: bool, sizes: bool) -> Opened:
    """Read and verify what a load of a checkpoint needs first: its manifest and torch's metadata.

    Args:
        made: the checkpoint.
        source: its files.
        verify: whether to check its digests.
        sizes: whether this rank checks the sizes of all files; one rank does so for all.

    Raises:
        DamageError: it is damaged.
        OSError: it cannot be read.
        RuntimeError: torch's metadata cannot be read, and no digest tells whether it is damaged.
    """
    manifest = read_manifest(source, made.manifest) if verify else None
    if manifest is None:
        data = retrying(f"{source.place}/{METADATA}", lambda: read_whole(source, METADATA))
    else:
        if sizes:
            check_present(source, manifest)
        data = read_file(source, manifest, METADATA)
    try:
        metadata: Metadata = pickle.loads(data)
    except Exception as error:
        raise RuntimeError(f"{source.place}/{METADATA} cannot be read: {error!r}") from error
    return Opened(made, source, metadata, manifest)


class ItemReader(FileSystemReader):
    """Reads a checkpoint as torch's ``FileSystemReader`` does, from verified items.

    A thread reads and verifies the next items while torch loads the current one.

    Args:
        path: the checkpoint.
        **options: those of torch's ``FileSystemReader``.

    Attributes:
        opened: the checkpoint; None until a subclass has opened it.
    """

    def __init__(self, path: str | os.PathLike[str], **options: object) -> None:
        super().__init__(path, **options)  # type: ignore[arg-type]
        self.opened: Opened | None = None
        self._ahead: _Ahead | None = None
        self.fs = _Nothing()

    @property
    def _of(self) -> Opened:
        assert self.opened is not None
        return self.opened

    def read_metadata(self, *args: object, **options: object) -> Metadata:
        """Return torch's metadata, which was read and verified before."""
        metadata = self._of.metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load the items of a plan into the state.

        Raises:
            DamageError: an item is not what was committed.
            OSError: an item cannot be read.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="muster-load") as pool:
            self._ahead = _Ahead(pool, self._wanted(plan), self._read)
            try:
                return super().read_data(plan, planner)
            finally:
                self._ahead.stop()

    def _wanted(self, plan: LoadPlan) -> list["_Item"]:
        """Return the items in the order in which torch asks for them: file by file."""
        files: dict[str, list[_Item]] = {}
        for wanted in plan.items:
            stored: _StorageInfo = self.storage_data[wanted.storage_index]
            item = _Item(stored.relative_path, stored.offset, stored.length)
            files.setdefault(item.file, []).append(item)
        return [item for items in files.values() for item in items]

    def _slice_file(self, file: object, sinfo: _StorageInfo) -> IO[bytes]:
        assert self._ahead is not None
        item = _Item(sinfo.relative_path, sinfo.offset, sinfo.length)
        return cast(IO[bytes], _View(self._ahead.take(item)))

    def _read(self, item: "_Item", buffer: memoryview) -> None:
        source = self._of.source
        try:
            segments = self._segments(item)
        except ValueError:  # It was not written item by item, as in formats other than torch's own.
            assert self._of.manifest is not None
            whole = memoryview(read_file(source, self._of.manifest, item.file))
            buffer[:] = whole[item.offset : item.offset + item.length]
            return

        def read() -> None:
            with source.open(item.file) as file:
                if segments is not None:
                    read_item(file, item.file, item.offset, segments, buffer)
                elif file.read_into(item.offset, buffer) < item.length:
                    raise EOFError(f"{item.file} ends before offset {item.offset + item.length}")

        confirmed(f"{source.place}/{item.file}", lambda: present(item.file, read))

    def _segments(self, item: "_Item") -> tuple[Segment, ...] | None:
        manifest = self._of.manifest
        if manifest is None:
            return None
        entry = manifest.files.get(item.file)
        if entry is None:
            raise DamageError(Damage.found(MANIFEST, f"it does not name {item.file}"))
        return entry.between(item.offset, item.length)


class VerifyingReader(ItemReader):
    """Reads a checkpoint that was opened.

    Args:
        opened: the checkpoint.
    """

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened.source.place)
        self.opened = opened


@dataclass(frozen=True, slots=True)
class _Item:
    file: str
    offset: int
    length: int


class _Ahead:
    """Reads items on another thread, before they are asked for.

    Buffers are reused: the kernel takes longer to map a new page than this process takes to fill it.

    Args:
        pool: provides the thread.
        wanted: the items, in the order in which torch will ask for them.
        read: reads one into a buffer.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, wanted: list[_Item], read: Callable[[_Item, memoryview], None]
    ) -> None:
        self._pool = pool
        self._read = read
        self._wanted = deque(wanted)
        self._under_way: deque[tuple[_Item, WorkFuture[memoryview]]] = deque()
        self._size = 0
        self._free: list[bytearray] = []
        self._used: bytearray | None = None
        """The buffer of the item that was taken last."""

    def take(self, item: _Item) -> memoryview:
        """Return an item, and wait for it if it is being read. It is valid until the next one is taken."""
        if self._used is not None:
            self._free.append(self._used)
        self._fill()
        if self._under_way and self._under_way[0][0] == item:
            _, work = self._under_way.popleft()
            data = work.result()
            self._size -= item.length
        else:  # Torch asks in another order.
            data = self._into(bytearray(item.length), item)
        assert isinstance(data.obj, bytearray)
        self._used = data.obj
        self._fill()
        return data

    def _fill(self) -> None:
        while self._wanted and (not self._under_way or self._size + self._wanted[0].length <= AHEAD):
            item = self._wanted.popleft()
            self._size += item.length
            self._under_way.append((item, self._pool.submit(self._into, self._buffer(item.length), item)))

    def _buffer(self, length: int) -> bytearray:
        for number, buffer in enumerate(self._free):
            if len(buffer) >= length:
                return self._free.pop(number)
        self._free.clear()  # They are too small, and would only take memory.
        return bytearray(length)

    def _into(self, buffer: bytearray, item: _Item) -> memoryview:
        data = memoryview(buffer)[: item.length]
        self._read(item, data)
        return data

    def stop(self) -> None:
        """Read no further."""
        self._wanted.clear()
        for _, work in self._under_way:
            work.cancel()


class _View(io.RawIOBase):
    """A read-only file over bytes in memory, for torch."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        into = memoryview(buffer).cast("B")
        data = self._data[self._position : self._position + len(into)]
        into[: len(data)] = data
        self._position += len(data)
        return len(data)


class _Nothing(FileSystem):
    """Stands for the files that torch's reader opens; the items come from elsewhere."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        yield None

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix
