"""Loads a large tensor from pieces of a file, so that no buffer has to hold the whole of it."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import xxhash

from muster.checkpoint.digest import Segment
from muster.worker.saves.storage.stored_tensor import BytesReader, is_plain, layout_of

logger = logging.getLogger(__name__)

PIECE = 8 * 2**20
"""Bytes of a piece."""
LARGE = 3 * PIECE
"""Bytes beyond which a stored tensor is read in pieces: smaller ones load faster as a whole."""
DIRECTORY = 64 * 2**10
"""Bytes at the end of a stored tensor that are read first: they hold the directory of its archive."""
ALIGNMENT = 64
"""Pieces begin at multiples of so many bytes, as the elements do in what ``torch.save`` writes.
Source: ``kFieldAlignment`` of torch's ``caffe2/serialize/inline_container.h``."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a stored tensor."""

    offset: int
    """From its beginning."""
    length: int


def pieces_of(length: int) -> Iterator[Piece]:
    """Return the pieces of a stored tensor, in the order in which :class:`LargeTensor` takes them.

    Args:
        length: of the stored tensor, in bytes; more than :data:`LARGE`.
    """
    end = (length - DIRECTORY) // ALIGNMENT * ALIGNMENT
    yield Piece(end, length - end)
    for offset in range(0, end, PIECE):
        yield Piece(offset, min(PIECE, end - offset))


class LargeTensor:
    """Takes the pieces of a stored tensor, and copies their elements to the state.

    They are copied before they are verified: :attr:`is_whole` says at the end whether they are right.

    Args:
        length: of the stored tensor, in bytes.
        segment: its digest; None: it is not known.
        part_of: returns the part of the stored tensor that the state wants.
        resolve: returns the tensor of the state for it.
    """

    def __init__(
        self,
        length: int,
        segment: Segment | None,
        part_of: Callable[[torch.Tensor], torch.Tensor],
        resolve: Callable[[], torch.Tensor],
    ) -> None:
        self._length = length
        self._segment = segment
        self._part_of = part_of
        self._resolve = resolve
        self._digest = xxhash.xxh3_128()
        self._end: tuple[Piece, bytearray] | None = None
        self._dtype = torch.uint8
        """The type of the stored elements."""
        self._elements = range(0)
        """Where the elements that the state wants are in the stored tensor, in bytes."""
        self.target: torch.Tensor | None = None
        """The tensor of the state that is filled; None: the elements are not contiguous there or here."""
        self.whole = memoryview(b"")
        """All pieces, if there is no target."""

    def add(self, piece: Piece, data: memoryview) -> bool:
        """Take the next piece, in the order of :func:`pieces_of`.

        Args:
            piece: which one.
            data: its bytes. They are not needed afterwards.

        Returns:
            Whether it is the last one.
        """
        if self._end is None:
            self._end = piece, bytearray(data)
            return False
        last, end = self._end
        if piece.offset == 0:
            self._begin(data, last, end)
        self._put(piece, data)
        if piece.offset + piece.length < last.offset:
            return False
        self._put(last, memoryview(end))
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the pieces are what was written; known after the last one."""
        return self._segment is None or self._digest.digest() == self._segment.digest

    def _begin(self, first: memoryview, last: Piece, end: bytearray) -> None:
        found = self._part_in(BytesReader(self._length, {0: first, last.offset: memoryview(end)}))
        if found is not None:
            begin, part = found
            target = self._resolve()
            if is_plain(target) and target.is_contiguous() and target.size() == part.size():
                self._elements = range(begin, begin + part.nbytes)
                self._dtype = part.dtype
                self.target = target
                return
        self.whole = memoryview(bytearray(self._length))

    def _part_in(self, stored: BytesReader) -> tuple[int, torch.Tensor] | None:
        """Return where the part begins, and a tensor of its type and size; None if it is not contiguous."""
        try:
            layout = layout_of(stored)
            if layout is None:
                return None
            part = self._part_of(layout.empty)
        except Exception as error:  # These bytes are not verified yet, and may be anything.
            logger.debug("a stored tensor is loaded as a whole: %s", error)
            return None
        begin = layout.begin + int(part.storage_offset()) * part.element_size()
        return (begin, part) if part.is_contiguous() and begin % part.element_size() == 0 else None

    def _put(self, piece: Piece, data: memoryview) -> None:
        if self._segment is not None:
            self._digest.update(data)
        if self.target is None:
            self.whole[piece.offset : piece.offset + piece.length] = data
            return
        begin = max(piece.offset, self._elements.start)
        end = min(piece.offset + piece.length, self._elements.stop)
        if begin < end:
            some = torch.frombuffer(data[begin - piece.offset : end - piece.offset], dtype=torch.uint8)
            elements = some.view(self._dtype)
            first = (begin - self._elements.start) // elements.element_size()
            self.target.view(-1)[first : first + elements.numel()].copy_(elements)
