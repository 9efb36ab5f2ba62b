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

    They are copied before they are verified: :attr:`matches_digest` says at the end whether they are right.
    If they are not, all pieces can be given again.

    Args:
        length: of the stored tensor, in bytes.
        segment: its digest; None: it is not known.
        part_of: returns the part of the stored tensor that the state wants.
        resolve: returns the tensor of the state for it. It is called once at most.
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
        self._last: tuple[Piece, bytearray] | None = None
        """The last bytes, which come first."""
        self._dtype = torch.uint8
        """The type of the stored elements."""
        self._elements = range(0)
        """Where the elements that the state wants are in the stored tensor, in bytes."""
        self.target: torch.Tensor | None = None
        """The tensor of the state; None: it was not asked for."""
        self.is_filled = False
        """Whether the elements are in the target."""
        self.joined: memoryview | None = None
        """All pieces, if their elements or those of the target are not contiguous. If neither this is set nor
        the target is filled, the pieces are no archive that can be read in pieces."""

    def add(self, piece: Piece, data: memoryview) -> bool:
        """Take the next piece, in the order of :func:`pieces_of`.

        Args:
            piece: which one.
            data: its bytes. They are not needed afterwards.

        Returns:
            Whether it is the last one.
        """
        if piece.offset + piece.length == self._length:
            self._last = piece, bytearray(data)
            return False
        assert self._last is not None
        last, end = self._last
        if piece.offset == 0:
            self._begin(data, last, end)
        self._put(piece, data)
        if piece.offset + piece.length < last.offset:
            return False
        self._put(last, memoryview(end))
        return True

    @property
    def matches_digest(self) -> bool:
        """Whether the pieces are what was written; known after the last one."""
        return self._segment is None or self._digest.digest() == self._segment.digest

    def _begin(self, first: memoryview, last: Piece, end: bytearray) -> None:
        self._digest.reset()
        self.is_filled, self.joined = False, None
        found = self._part_in(BytesReader(self._length, {0: first, last.offset: memoryview(end)}))
        if found is None:
            return
        begin, part = found
        if self.target is None:
            self.target = self._resolve()
        if _fits(part, self.target) and begin % part.element_size() == 0:
            self._elements = range(begin, begin + part.nbytes)
            self._dtype = part.dtype
            self.is_filled = True
        else:
            self.joined = memoryview(bytearray(self._length))

    def _part_in(self, stored: BytesReader) -> tuple[int, torch.Tensor] | None:
        """Return where the part begins, and a tensor of its type and size; None if it is not found."""
        try:
            layout = layout_of(stored)
            part = None if layout is None else self._part_of(layout.empty)
        except Exception as error:  # These bytes are not verified yet, and may be anything.
            logger.debug("a stored tensor cannot be read in pieces: %s", error)
            return None
        if layout is None or part is None:
            return None
        return layout.begin + int(part.storage_offset()) * part.element_size(), part

    def _put(self, piece: Piece, data: memoryview) -> None:
        if self._segment is not None:
            self._digest.update(data)
        if self.joined is not None:
            self.joined[piece.offset : piece.offset + piece.length] = data
        begin = max(piece.offset, self._elements.start)
        end = min(piece.offset + piece.length, self._elements.stop)
        if self.is_filled and begin < end:
            assert self.target is not None
            some = torch.frombuffer(data[begin - piece.offset : end - piece.offset], dtype=torch.uint8)
            elements = some.view(self._dtype)
            first = (begin - self._elements.start) // elements.element_size()
            self.target.view(-1)[first : first + elements.numel()].copy_(elements)


def _fits(part: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether the elements of both follow one another, and can be copied."""
    return (
        is_plain(target)
        and part.is_contiguous()
        and target.is_contiguous()
        and part.size() == target.size()
        and torch.can_cast(part.dtype, target.dtype)
    )
