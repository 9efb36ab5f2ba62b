"""A large tensor that is loaded piece by piece is the one that was written, without a buffer of its size."""

import io
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.digest import Segment, digest_of
from muster.worker.saves.storage import large_tensor
from muster.worker.saves.storage.large_tensor import LargeTensor, pieces_of

SMALL = 4096
"""Bytes of a piece in these tests."""


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(large_tensor, "PIECE", SMALL)
        patched.setattr(large_tensor, "DIRECTORY", 2 * SMALL)
        yield


def written(tensor: torch.Tensor) -> bytearray:
    file = io.BytesIO()
    torch.save(tensor, file)
    return bytearray(file.getvalue())


def load(
    data: bytearray,
    target: torch.Tensor,
    part_of: Callable[[torch.Tensor], torch.Tensor] = lambda stored: stored,
    segment: Segment | None = None,
) -> LargeTensor:
    large = LargeTensor(len(data), segment, part_of, lambda: target)
    pieces = list(pieces_of(len(data)))
    buffer = bytearray(max(piece.length for piece in pieces))
    ends = []
    for piece in pieces:
        # One buffer for all pieces: what was taken is not looked at again.
        buffer[: piece.length] = data[piece.offset : piece.offset + piece.length]
        ends.append(large.add(piece, memoryview(buffer)[: piece.length]))
    assert ends == [False] * (len(pieces) - 1) + [True]
    return large


@given(st.integers(3 * SMALL, 20 * SMALL))
def test_pieces_cover_each_byte_once_whatever_the_length(length: int):
    first, *others = pieces_of(length)
    assert first.offset + first.length == length, "the end of the archive comes first"
    covered = 0
    for piece in [*others, first]:
        assert piece.offset == covered
        covered += piece.length
    assert covered == length


TENSORS = {
    "float32": torch.randn(64, 100),
    "bfloat16": torch.randn(64, 200).bfloat16(),
    "float8": torch.randn(64, 400).to(torch.float8_e4m3fn),
    "bool": torch.rand(64, 400) > 0.5,
    "complex": torch.randn(64, 50, dtype=torch.complex128),
    "odd": torch.randn(11117).reshape(11117, 1),
    "view of a larger storage": torch.randn(3, 64, 100)[1],
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_plain_tensor_is_copied_to_the_state_piece_by_piece(tensor: torch.Tensor):
    target = torch.zeros_like(tensor)
    large = load(written(tensor), target)
    assert large.target is target
    assert large.is_filled
    assert large.joined is None
    assert torch.equal(target.view(torch.uint8), tensor.contiguous().view(torch.uint8))


@given(st.data())
def test_rows_of_a_tensor_are_copied_as_a_reshard_wants_them(data: st.DataObject):
    tensor = TENSORS["float32"]
    first = data.draw(st.integers(0, 62))
    count = data.draw(st.integers(1, 64 - first))
    target = torch.zeros(count, 100)
    large = load(written(tensor), target, lambda stored: stored.narrow(0, first, count))
    assert large.is_filled
    assert torch.equal(target, tensor[first : first + count])


def test_elements_are_converted_to_the_type_of_the_state():
    target = torch.zeros(64, 100, dtype=torch.float64)
    assert load(written(TENSORS["float32"]), target).is_filled
    assert torch.equal(target, TENSORS["float32"].double())


def test_byte_that_has_changed_is_found_wherever_it_is():
    data = written(TENSORS["float32"])
    segment = Segment(len(data), digest_of(data))
    assert load(data, torch.zeros(64, 100), segment=segment).matches_digest
    for offset in range(0, len(data), 97):
        data[offset] ^= 1
        assert not load(data, torch.zeros(64, 100), segment=segment).matches_digest
        data[offset] ^= 1


def test_pieces_that_were_wrong_are_given_again():
    tensor, target, asked = TENSORS["float32"], torch.zeros(64, 100), []
    data = written(tensor)

    def resolve() -> torch.Tensor:
        asked.append(target)
        return target

    large = LargeTensor(len(data), Segment(len(data), digest_of(data)), lambda stored: stored, resolve)
    wrong = bytearray(len(data))
    for attempt in (wrong, data[:-1000] + wrong[-1000:], data):
        for piece in pieces_of(len(data)):
            large.add(piece, memoryview(attempt)[piece.offset : piece.offset + piece.length])
        assert large.matches_digest == (attempt is data)
    assert large.is_filled
    assert torch.equal(target, tensor)
    assert len(asked) == 1, "the planner is asked once"


NOT_CONTIGUOUS = {
    "stored": (TENSORS["float32"].t(), torch.zeros(100, 64), lambda stored: stored),
    "state": (TENSORS["float32"], torch.zeros(100, 64).t(), lambda stored: stored),
    "part": (TENSORS["float32"], torch.zeros(64, 50), lambda stored: stored.narrow(1, 25, 50)),
    "type that cannot be converted": (TENSORS["complex"], torch.zeros(64, 50), lambda stored: stored),
    "another size": (TENSORS["float32"], torch.zeros(100), lambda stored: stored),
}


@pytest.mark.parametrize("case", NOT_CONTIGUOUS.values(), ids=NOT_CONTIGUOUS)
def test_pieces_are_put_together_if_elements_are_not_contiguous(
    case: tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]],
):
    tensor, target, part_of = case
    data = written(tensor)
    large = load(data, target, part_of)
    assert not large.is_filled
    assert large.joined is not None
    assert bytes(large.joined) == data
    assert not target.any(), "the state is left alone"


OTHERS = {
    "no archive": bytearray(b"not an archive " * 1000),
    "several storages": written(TENSORS["float32"].to_sparse()),
}


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS)
def test_bytes_that_are_no_single_storage_take_no_memory(data: bytearray):
    large = load(data, torch.zeros(64, 100))
    assert not large.is_filled
    assert large.joined is None
    assert large.target is None, "the planner is not asked for it"
