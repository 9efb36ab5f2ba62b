"""Torch's reader of a committed checkpoint. It verifies every item that it loads into the state."""

import io
import os
import pickle
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
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
    other_bytes,
    present,
    read_file,
    read_item,
    read_manifest,
    read_piece,
)
from muster.worker.saves.storage.large_tensor import LARGE, LargeTensor, Piece, pieces_of
from muster.worker.saves.storage.rank_write import METADATA
from muster.worker.saves.storage.read_ahead import ReadAhead
from muster.worker.saves.storage.stored_tensor import stored_tensor
from muster.worker.saves.warning_filters import ignore_warning

NO_PROCESS_GROUP = "torch.distributed is disabled"
"""How torch's warning begins that a load without a process group is of a single process."""


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


def load_into(state_dict: dict[str, Any], planner: LoadPlanner | None, reader: "VerifyingReader") -> None:
    """Fill a state by torch's own load.

    Args:
        state_dict: the state. Tensors are filled in place.
        planner: torch's; None: its default.
        reader: of the checkpoint.
    """
    ignore_warning(NO_PROCESS_GROUP, UserWarning)
    load(state_dict, storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())


class ItemReader(FileSystemReader):
    """Reads a checkpoint as torch's ``FileSystemReader`` does, and verifies each item.

    Threads read the next items while the current one is loaded. An item is verified before it is loaded.
    Only a large tensor is copied to the state piece by piece, and verified after the last one.

    Args:
        path: the checkpoint.
        **options: those of torch's ``FileSystemReader``.

    Attributes:
        opened: the checkpoint; None until a subclass has opened it.
    """

    def __init__(self, path: str | os.PathLike[str], **options: object) -> None:
        super().__init__(path, **options)  # type: ignore[arg-type]
        self.opened: Opened | None = None

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
        reads = (read for wanted in self._wanted(plan) for read in self._reads_of(wanted))
        large: LargeTensor | None = None
        with ReadAhead(reads, lambda one: one.length, self._read_ahead).start() as items:
            for read, data in items:
                wanted = read.wanted
                if read.piece is None:
                    self._load(wanted, data, planner)
                    continue
                if large is None:
                    large = self._large_tensor(wanted, planner)
                if large.add(read.piece, data):
                    self._finish(wanted, large, planner)
                    large = None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _wanted(self, plan: LoadPlan) -> list["_Wanted"]:
        """Return the items of a plan, file by file."""
        files: dict[str, list[_Wanted]] = {}
        for request in plan.items:
            stored: _StorageInfo = self.storage_data[request.storage_index]
            item = _Item(stored.relative_path, stored.offset, stored.length)
            transforms = stored.transform_descriptors or ()
            files.setdefault(item.file, []).append(_Wanted(request, item, tuple(transforms)))
        return [wanted for one in files.values() for wanted in one]

    def _load(
        self,
        wanted: "_Wanted",
        data: memoryview,
        planner: LoadPlanner,
        target: torch.Tensor | None = None,
    ) -> None:
        """Load an item.

        Args:
            wanted: the item.
            data: its bytes.
            planner: torch's.
            target: the tensor of the state, if the planner was asked for it before.
        """
        request = wanted.request
        if wanted.transforms:
            stored = self.transforms.transform_load_stream(request, wanted.transforms, io.BytesIO(data))
            data = memoryview(stored.read(-1))
        if request.type is LoadItemType.BYTE_IO:
            planner.load_bytes(request, io.BytesIO(data))
            return
        tensor = narrow_tensor_by_index(stored_tensor(data), request.storage_offsets, request.lengths)
        if target is None:
            target = planner.resolve_tensor(request).detach()
        if target.size() != tensor.size():
            raise ValueError(
                f"{request.storage_index}: the state has {target.size()}, the checkpoint {tensor.size()}"
            )
        target.copy_(tensor)
        planner.commit_tensor(request, target)

    # ------------------------------------------------------------------ large tensors

    def _reads_of(self, wanted: "_Wanted") -> Iterable["_Read"]:
        item = wanted.item
        request = wanted.request
        if item.length <= LARGE or wanted.transforms or request.type is LoadItemType.BYTE_IO:
            return [_Read(wanted)]
        with suppress(DamageError, ValueError):  # The read of the whole item raises it.
            if len(self._segments(item) or (None,)) == 1:
                return (_Read(wanted, piece) for piece in pieces_of(item.length))
        return [_Read(wanted)]

    def _large_tensor(self, wanted: "_Wanted", planner: LoadPlanner) -> LargeTensor:
        request = wanted.request
        (segment,) = self._segments(wanted.item) or (None,)
        return LargeTensor(
            wanted.item.length,
            segment,
            lambda stored: narrow_tensor_by_index(stored, request.storage_offsets, request.lengths),
            lambda: planner.resolve_tensor(request).detach(),
        )

    def _finish(self, wanted: "_Wanted", large: LargeTensor, planner: LoadPlanner) -> None:
        item = wanted.item
        if not large.matches_digest:
            with suppress(DamageError, OSError), self._of.source.open(item.file):
                raise other_bytes(item.file, item.offset, item.length)  # The source is to hear of it.
            retrying(f"{self._of.source.place}/{item.file}", lambda: self._read_again(item, large))
        if large.is_filled:
            assert large.target is not None
            planner.commit_tensor(wanted.request, large.target)
            return
        data = large.joined
        if data is None:
            data = memoryview(bytearray(item.length))
            self._read(item, data)
        self._load(wanted, data, planner, large.target)

    def _read_again(self, item: "_Item", large: LargeTensor) -> None:
        """Read a large tensor once more: the first read may have been at fault.

        Raises:
            DamageError: this read finds damage, too.
            OSError: it cannot be read.
        """
        buffer = memoryview(bytearray(max(piece.length for piece in pieces_of(item.length))))

        def read() -> None:
            with self._of.source.open(item.file) as file:
                for piece in pieces_of(item.length):
                    read_piece(file, item.file, item.offset + piece.offset, buffer[: piece.length])
                    large.add(piece, buffer[: piece.length])
                if not large.matches_digest:
                    raise other_bytes(item.file, item.offset, item.length)

        present(item.file, read)

    # ------------------------------------------------------------------ reads

    def _read_ahead(self, read: "_Read", buffer: memoryview) -> None:
        item, piece = read.wanted.item, read.piece
        if piece is None:
            self._read(item, buffer)
            return
        source, offset = self._of.source, item.offset + piece.offset

        def fill() -> None:
            with source.open(item.file) as file:
                if self._of.manifest is not None:
                    read_piece(file, item.file, offset, buffer)
                elif file.read_into(offset, buffer) < piece.length:
                    raise EOFError(f"{item.file} ends before offset {offset + piece.length}")

        confirmed(f"{source.place}/{item.file}", lambda: present(item.file, fill))

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


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An item, and what the plan wants of it."""

    request: ReadItem
    item: _Item
    transforms: tuple[str, ...]
    """Names of the extensions of torch's that wrote it, in order."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A read of an item."""

    wanted: _Wanted
    piece: Piece | None = None
    """A piece of a large tensor; None: the whole item, verified."""

    @property
    def length(self) -> int:
        """Bytes."""
        return self.wanted.item.length if self.piece is None else self.piece.length
