"""The memory that saves are copied to."""

import os

import torch

from muster.worker.saves.memory.host_memory import ALIGNMENT, HostMemory, Location, map_files, storage_at
from tests.support.saves.open_files import open_files


def test_storages_lie_apart_in_one_mapping():
    memory = HostMemory()
    memory.begin(3 * ALIGNMENT)
    one, two, none = memory.storage(5), memory.storage(ALIGNMENT + 1), memory.storage(0)
    assert (one.nbytes(), two.nbytes(), none.nbytes()) == (5, ALIGNMENT + 1, 0)
    assert two.data_ptr() - one.data_ptr() == ALIGNMENT
    assert one.data_ptr() % ALIGNMENT == 0
    assert [memory.find(storage) for storage in (one, two)] == [
        Location(0, 0, 5),
        Location(0, ALIGNMENT, ALIGNMENT + 1),
    ]
    assert memory.find(torch.ones(3).untyped_storage()) is None


def test_a_state_of_the_same_size_gets_the_same_memory():
    memory = HostMemory()
    memory.begin(10_000)
    first = memory.storage(10_000).data_ptr()
    memory.begin(10_000)
    assert memory.storage(10_000).data_ptr() == first


def test_storage_beyond_the_planned_size_gets_a_block_that_is_kept():
    memory = HostMemory()
    memory.begin(4096)
    memory.storage(4096)
    second = memory.storage(5000).data_ptr()
    size = memory.size
    memory.begin(4096)
    memory.storage(4096)
    assert memory.storage(5000).data_ptr() == second
    assert memory.size == size


def test_a_larger_state_gets_larger_memory_in_place_of_the_old():
    memory = HostMemory()
    memory.begin(4096)
    memory.storage(4096)
    memory.begin(100_000)
    assert 100_000 <= memory.size < 104_096


def test_another_mapping_of_a_file_sees_the_same_and_no_file_is_left():
    before = open_files("/memfd:muster-save")
    memory = HostMemory(shared=True)
    memory.begin(8)
    storage = memory.storage(8)
    tensor = torch.empty(0, dtype=torch.float64).set_(storage)
    tensor.fill_(7.5)
    location = memory.find(storage)
    assert location is not None
    (block,) = map_files(map(os.dup, memory.files))
    other = torch.empty(0, dtype=torch.float64).set_(storage_at(block, location.offset, location.size))
    assert other.tolist() == [7.5]
    del memory, storage, tensor, block, other
    assert open_files("/memfd:muster-save") <= before


def test_a_storage_keeps_the_memory_that_it_is_in():
    memory = HostMemory()
    memory.begin(4096)
    storage = memory.storage(4096)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage).fill_(3)
    del memory, storage
    assert tensor.unique().tolist() == [3]
