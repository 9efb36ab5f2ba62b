"""Makes a tensor of the bytes that ``torch.save`` wrote of it."""

import io
import sys
from typing import IO, Any, cast
from zipfile import BadZipFile, ZipFile, ZipInfo

import torch

IN_PLACE = 2**20
"""Bytes from which on a tensor uses the bytes that are there: fewer are copied sooner than found."""
_HEADER = 30
"""Bytes of a local file header before its name. Source: APPNOTE.TXT of the ZIP format, 4.3.7."""
_LENGTHS = 26
"""Where the header has the lengths of the name and of the extra field, 2 bytes each. Source: as above."""


def stored_tensor(data: memoryview) -> torch.Tensor:
    """Return the tensor that ``torch.save`` wrote.

    Args:
        data: what it wrote. The tensor may use these bytes, so it is valid for as long as they are.

    Raises:
        RuntimeError: torch cannot read it.
        pickle.UnpicklingError: it is more than a tensor.
    """
    record = _only_storage(data) if len(data) >= IN_PLACE else None
    if record is None:
        return _load(io.BytesIO(data))
    with torch.serialization.skip_data():
        empty = _load(BytesReader(data))
    if not _is_plain(empty) or empty.untyped_storage().nbytes() != len(record):
        return _load(io.BytesIO(data))
    storage = torch.frombuffer(record, dtype=torch.uint8).untyped_storage()
    tensor = torch.empty(0, dtype=empty.dtype)
    return tensor.set_(storage, empty.storage_offset(), empty.size(), empty.stride())


def _load(file: io.IOBase) -> torch.Tensor:
    return cast(torch.Tensor, torch.load(cast(IO[bytes], file), map_location="cpu", weights_only=True))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a storage's bytes, a type, a size, and strides."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _only_storage(data: memoryview) -> memoryview | None:
    """Return the bytes of the only storage; None if there are several, or in another byte order."""
    try:
        with ZipFile(BytesReader(data)) as archive:
            records = archive.infolist()
    except BadZipFile:
        return None
    orders = [one for one in records if one.filename.endswith("/byteorder")]
    storages = [one for one in records if "/data/" in one.filename]
    if len(orders) != 1 or len(storages) != 1 or any(one.compress_type for one in (*orders, *storages)):
        return None
    # Not ``ZipFile.read``: Muster's writers leave out the archive's checksums, since they have their own.
    if _content(data, orders[0]) != sys.byteorder.encode():
        return None
    return _content(data, storages[0])


def _content(data: memoryview, record: ZipInfo) -> memoryview:
    lengths = record.header_offset + _LENGTHS
    name = int.from_bytes(data[lengths : lengths + 2], "little")
    extra = int.from_bytes(data[lengths + 2 : lengths + 4], "little")
    begin = record.header_offset + _HEADER + name + extra
    return data[begin : begin + record.file_size]


class BytesReader(io.RawIOBase):
    """A read-only file over bytes in memory, which are not copied."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
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
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        """Fill a buffer, and return how many bytes it got."""
        into = memoryview(buffer).cast("B")
        data = self._data[self._position : self._position + len(into)]
        into[: len(data)] = data
        self._position += len(data)
        return len(data)
