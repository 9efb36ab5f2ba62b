"""Hands a request to a worker process through shared memory, by a message too short to block the sender.

A pipe takes some 200 KiB and then blocks the sender until the worker reads, which it does between writes.
So the request lies in the memory of its tensors, and the pipe carries its location. The memory's file
descriptors travel in the message: the kernel closes them if the worker ends before it reads them.
"""

import io
import pickle
from collections.abc import Sequence
from ctypes import Array, c_char
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import NamedTuple

import torch

from muster.worker.saves.memory.host_memory import HostMemory, Location, map_files, storage_at
from muster.worker.saves.request import AsyncRequest


class _Message(NamedTuple):
    number: int
    request: Location
    """Where it lies, pickled."""
    files: int
    """How many file descriptors follow."""


def pickle_into(memory: HostMemory, request: AsyncRequest) -> Location:
    """Put a request into host memory, with all of its tensors.

    Args:
        memory: shared; tensors that are elsewhere on the host are copied there.
        request: what is put there.

    Returns:
        Where the request is, for :func:`send`.

    Raises:
        Exception: what pickling raises for a function or an argument that a worker cannot import.
    """
    pickled = io.BytesIO()
    _Pickler(pickled, memory).dump(request)
    data = torch.frombuffer(pickled.getbuffer(), dtype=torch.uint8)
    storage = memory.storage(len(data))
    storage.copy_(data.untyped_storage(), non_blocking=False)
    location = memory.find(storage)
    assert location is not None
    return location


def send(pipe: Connection, pid: int, number: int, request: Location, memory: HostMemory) -> None:
    """Tell a worker of a request.

    Args:
        pipe: to the worker.
        pid: its process id.
        number: the request's, from 0.
        request: where it is.
        memory: what it is in, which must stay as it is until the worker has answered.
    """
    pipe.send(_Message(number, request, len(memory.files)))
    for file in memory.files:
        send_handle(pipe, file, pid)


class Received(NamedTuple):
    """A request that has arrived at the worker."""

    number: int
    blocks: "list[Array[c_char]]"
    location: Location

    def request(self) -> AsyncRequest:
        """Return the request.

        Raises:
            Exception: what unpickling raises for what this process cannot import.
        """
        block, offset, size = self.location
        pickled = memoryview(self.blocks[block])[offset : offset + size]
        request = _Unpickler(io.BytesIO(pickled), self.blocks).load()
        assert isinstance(request, AsyncRequest)
        return request


def receive(pipe: Connection) -> Received | None:
    """Wait for the next request; return None if there are no more.

    Raises:
        EOFError: the other side has ended.
    """
    message: _Message | None = pipe.recv()
    if message is None:
        return None
    files = [recv_handle(pipe) for _ in range(message.files)]
    return Received(message.number, map_files(files), message.request)


class _Pickler(ForkingPickler):
    def __init__(self, file: io.BytesIO, memory: HostMemory) -> None:
        super().__init__(file)
        self._memory = memory
        self._copied: list[torch.UntypedStorage] = []
        self._locations: dict[int, Location] = {}

    def persistent_id(self, value: object) -> Location | None:
        if not isinstance(value, torch.UntypedStorage) or value.device.type != "cpu" or value.nbytes() == 0:
            return None
        known = self._locations.get(id(value)) or self._memory.find(value)
        if known is None:
            copied = self._memory.storage(value.nbytes())
            copied.copy_(value, non_blocking=False)
            known = self._memory.find(copied)
            assert known is not None
            self._locations[id(value)] = known
            self._copied.append(value)
        return known


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, blocks: "Sequence[Array[c_char]]") -> None:
        super().__init__(file)
        self._blocks = blocks
        self._storages: dict[Location, torch.UntypedStorage] = {}

    def persistent_load(self, location: Location) -> torch.UntypedStorage:
        if location not in self._storages:
            block, offset, size = location
            self._storages[location] = storage_at(self._blocks[block], offset, size)
        return self._storages[location]
