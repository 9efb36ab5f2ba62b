"""Makes a tensor of the bytes that ``torch.save`` wrote of it, or finds its elements among them."""

import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, cast
from zipfile import BadZipFile, ZipFile, ZipInfo

import torch

IN_PLACE = 2**20
"""Bytes from which on a tensor uses the bytes that are there: fewer are copied sooner than found."""
_HEADER = 30
"""Bytes of a local file header before its name. Source: APPNOTE.TXT of the ZIP format, 4.3.7."""
_LENGTHS = 26
"""Where the header has the lengths of the name and of the extra field, 2 bytes each. Source: as above."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a tensor are in what ``torch.save`` wrote."""

    begin: int
    """Offset of its storage, in bytes."""
    length: int
    """Bytes of its storage."""
    empty: torch.Tensor
    """A tensor of this type, size, offset in the storage, and strides. Its elements are not set."""


def stored_tensor(data: memoryview) -> torch.Tensor:
    """Return the tensor that ``torch.save`` wrote.

    Args:
        data: what it wrote. The tensor may use these bytes, so it is valid for as long as they are.

    Raises:
        RuntimeError: torch cannot read it.
        pickle.UnpicklingError: it is more than a tensor.
    """
    layout = layout_of(BytesReader(len(data), {0: data})) if len(data) >= IN_PLACE else None
    if layout is None:
        return _load(io.BytesIO(data))
    record = data[layout.begin : layout.begin + layout.length]
    storage = torch.frombuffer(record, dtype=torch.uint8).untyped_storage()
    empty = layout.empty
    tensor = torch.empty(0, dtype=empty.dtype, device="cpu")  # The default device may be another one.
    return tensor.set_(storage, empty.storage_offset(), empty.size(), empty.stride())


def layout_of(file: io.RawIOBase) -> Layout | None:
    """Return where the elements of a tensor are; None if it is not a single storage's bytes in our order.

    Args:
        file: what ``torch.save`` wrote. The bytes of large storages are not read.

    Raises:
        RuntimeError: torch cannot read it.
        pickle.UnpicklingError: it is more than a tensor.
    """
    storage = _only_storage(file)
    if storage is None:
        return None
    file.seek(0)
    with torch.serialization.skip_data():
        empty = _load(file)
    if not is_plain(empty) or empty.untyped_storage().nbytes() != len(storage):
        return None
    return Layout(storage.start, len(storage), empty)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but a storage's bytes, a type, a size, and strides."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _load(file: io.RawIOBase | io.BytesIO) -> torch.Tensor:
    return cast(torch.Tensor, torch.load(cast(IO[bytes], file), map_location="cpu", weights_only=True))


def _only_storage(file: io.RawIOBase) -> range | None:
    """Return where the only storage is; None if there are several, or in another byte order."""
    try:
        with ZipFile(cast(IO[bytes], file)) as archive:
            records = archive.infolist()
    except BadZipFile:
        return None
    orders = [one for one in records if one.filename.endswith("/byteorder")]
    storages = [one for one in records if "/data/" in one.filename]
    if len(orders) != 1 or len(storages) != 1 or any(one.compress_type for one in (*orders, *storages)):
        return None
    # Not ``ZipFile.read``: Muster's writers leave out the archive's checksums, since they have their own.
    order = _content(file, orders[0])
    if _read(file, order.start, len(order)) != sys.byteorder.encode():
        return None
    return _content(file, storages[0])


def _content(file: io.RawIOBase, record: ZipInfo) -> range:
    lengths = _read(file, record.header_offset + _LENGTHS, 4)
    name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    begin = record.header_offset + _HEADER + name + extra
    return range(begin, begin + record.file_size)


def _read(file: io.RawIOBase, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length) or b""


class BytesReader(io.RawIOBase):
    """A read-only file, parts of which are in memory. They are not copied.

    Args:
        length: bytes of the whole file.
        parts: those that are there, by their offset in the file. A read elsewhere raises
            :class:`io.UnsupportedOperation`.
    """

    def __init__(self, length: int, parts: Mapping[int, memoryview]) -> None:
        self._length = length
        self._parts = parts
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the offset of the next byte, and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        """Fill a buffer up to the end of a part, and return how many bytes it got."""
        into = memoryview(buffer).cast("B")
        if not len(into) or self._position >= self._length:
            return 0
        for begin, part in self._parts.items():
            at = self._position - begin
            if 0 <= at < len(part):
                data = part[at : at + len(into)]
                into[: len(data)] = data
                self._position += len(data)
                return len(data)
        raise io.UnsupportedOperation(f"byte {self._position} is not in memory")
