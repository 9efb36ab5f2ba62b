"""A tensor is the one that torch.save wrote, whatever it is, and large plain ones are not copied."""

import io
import pickle
import sys

import pytest
import torch

from muster.worker.saves.storage.stored_tensor import IN_PLACE, stored_tensor

MANY = IN_PLACE // 2
"""Elements, of 2 bytes or more."""

PLAIN = {
    "float32": torch.randn(MANY),
    "bfloat16": torch.randn(MANY).bfloat16(),
    "float8": torch.randn(2 * MANY).to(torch.float8_e4m3fn),
    "bool": torch.rand(2 * MANY) > 0.5,
    "complex": torch.randn(MANY, dtype=torch.complex64),
    "integers": torch.arange(MANY).reshape(-1, 8),
    "transposed": torch.randn(512, 1024).t(),
    "view of a larger storage": torch.randn(3, MANY)[1],
    "parameter's data": torch.nn.Parameter(torch.randn(MANY)).detach(),
}
OTHERS = {
    "small": torch.randn(16),
    "without elements": torch.empty(0, 4),
    "scalar": torch.tensor(1.5),
    "conjugate": torch.randn(MANY, dtype=torch.complex64).conj(),
    "negative": torch.randn(MANY, dtype=torch.complex64).conj().imag,
    "sparse": torch.randn(1024, 1024).to_sparse(),
    "parameter": torch.nn.Parameter(torch.randn(MANY)),
}


def written(tensor: torch.Tensor) -> memoryview:
    file = io.BytesIO()
    torch.save(tensor, file)
    return memoryview(bytearray(file.getvalue()))


def assert_same(found: torch.Tensor, tensor: torch.Tensor) -> None:
    assert (found.dtype, found.size(), found.layout) == (tensor.dtype, tensor.size(), tensor.layout)
    assert torch.equal(found.to_dense().float(), tensor.to_dense().float()) or torch.equal(found, tensor)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("tensor", [*PLAIN.values(), *OTHERS.values()], ids=[*PLAIN, *OTHERS])
def test_tensor_is_the_one_that_was_written(tensor: torch.Tensor):
    assert_same(stored_tensor(written(tensor)), tensor)


uses_bytes = pytest.mark.skipif(
    torch.__version__ < "2.11",
    reason="skip_data makes storages of a wrong size up to torch 2.10: bytes are copied",
)


@uses_bytes
@pytest.mark.parametrize("tensor", PLAIN.values(), ids=PLAIN)
def test_large_plain_tensor_uses_the_bytes_where_they_are(tensor: torch.Tensor):
    data = written(tensor)
    begin = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    assert begin < stored_tensor(data).data_ptr() < begin + len(data)


@uses_bytes
def test_tensor_that_was_written_without_checksums_uses_the_bytes_where_they_are():
    torch.serialization.set_crc32_options(False)
    try:
        data = written(PLAIN["float32"])
    finally:
        torch.serialization.set_crc32_options(True)
    begin = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    found = stored_tensor(data)
    assert_same(found, PLAIN["float32"])
    assert begin < found.data_ptr() < begin + len(data)


def test_tensor_is_on_the_host_whatever_the_default_device():
    data = written(PLAIN["float32"])
    with torch.device("meta"):
        found = stored_tensor(data)
    assert_same(found, PLAIN["float32"])


def test_bytes_of_a_machine_with_the_other_byte_order_are_swapped(monkeypatch: pytest.MonkeyPatch):
    tensor = torch.arange(MANY)
    with monkeypatch.context() as other_machine:
        other_machine.setattr(sys, "byteorder", {"little": "big", "big": "little"}[sys.byteorder])
        data = written(tensor)
    assert torch.equal(stored_tensor(data), torch.from_numpy(tensor.numpy().byteswap()))


@pytest.mark.parametrize("length", [0, 10, IN_PLACE + 10])
def test_bytes_that_are_no_archive_are_refused_by_torch(length: int):
    with pytest.raises((RuntimeError, EOFError, pickle.UnpicklingError)):
        stored_tensor(memoryview(bytearray(length)))


def test_archive_that_ends_early_is_refused_by_torch():
    data = written(PLAIN["float32"])
    with pytest.raises(RuntimeError):
        stored_tensor(data[: len(data) - 100])
