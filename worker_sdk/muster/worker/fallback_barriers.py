"""The registry and the barrier types of torch's experimental checkpointer, for a torch without them.

The names, arguments and registry behave as torch's do. Unlike torch 2.13's ``TCPStoreBarrier``, the
one here honours ``timeout_secs`` and keeps prefix and sequence apart in its keys.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.elastic.utils import store as store_util

BARRIER_REGISTRY: dict[str, type] = {}
"""Barrier classes by their ``barrier_type``."""

T = TypeVar("T", bound=type)


def register_barrier(barrier_class: T) -> T:
    """Class decorator: make a barrier known under its ``barrier_type``."""
    name = getattr(barrier_class, "barrier_type", None)
    if name is not None:
        BARRIER_REGISTRY[name] = barrier_class
    return barrier_class


@dataclass
class BarrierConfig:
    """Which barrier to build, and with what.

    Attributes:
        barrier_type: a registered type; None means no barrier.
        barrier_args: the arguments of its constructor.
    """

    barrier_type: str | None = None
    barrier_args: dict[str, Any] = field(default_factory=dict)


class Barrier(abc.ABC):
    """What ranks meet at."""

    @abc.abstractmethod
    def execute_barrier(self) -> None:
        """Wait for all ranks; raise if they do not all come."""


def create_barrier_from_config(barrier_config: BarrierConfig) -> Barrier | None:
    """Build the configured barrier.

    Args:
        barrier_config: which one.

    Returns:
        The barrier, or None if the config names none.

    Raises:
        ValueError: no such type is registered.
    """
    name = barrier_config.barrier_type
    if name is None:
        return None
    if name not in BARRIER_REGISTRY:
        known = ", ".join(sorted(BARRIER_REGISTRY))
        raise ValueError(f'barrier_type "{name}" is not known; registered are: {known}.')
    build: Callable[..., Barrier] = BARRIER_REGISTRY[name]
    return build(**barrier_config.barrier_args)


@register_barrier
class DistBarrier(Barrier):
    """The barrier of the default process group, which must be initialised."""

    barrier_type = "dist_barrier"
    """Its name in a :class:`BarrierConfig`."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise AssertionError("DistBarrier needs torch.distributed.init_process_group first.")

    def execute_barrier(self) -> None:
        """Wait for all ranks of the process group."""
        dist.barrier()


@register_barrier
class TCPStoreBarrier(Barrier):
    """A barrier that counts arrivals in a TCPStore on rank 0.

    Args:
        global_rank: this process's rank; rank 0 hosts the store.
        global_world_size: the number of ranks.
        barrier_prefix: keeps barriers apart that share a store.
        timeout_barrier_init_secs: seconds to reach the store.
        use_checkpoint_barrier_tcpstore_libuv: whether the store runs on libuv.
        tcpstore_port: the store's port.
        master_address: rank 0's address.
        timeout_secs: seconds for each barrier.
    """

    barrier_type = "tcp_store"
    """Its name in a :class:`BarrierConfig`."""

    def __init__(
        self,
        global_rank: int,
        global_world_size: int,
        barrier_prefix: str,
        timeout_barrier_init_secs: int,
        use_checkpoint_barrier_tcpstore_libuv: bool,
        tcpstore_port: int,
        master_address: str,
        timeout_secs: int,
    ) -> None:
        self._world_size = global_world_size
        self._prefix = barrier_prefix
        self._timeout_secs = timeout_secs
        self._sequence = 0
        self._store = TCPStore(
            master_address,
            int(tcpstore_port),
            world_size=global_world_size,
            is_master=global_rank == 0,
            timeout=timedelta(seconds=timeout_barrier_init_secs),
            use_libuv=use_checkpoint_barrier_tcpstore_libuv,
        )

    def execute_barrier(self) -> None:
        """Wait until all ranks have been counted."""
        store_util.barrier(
            store=self._store,
            world_size=self._world_size,
            key_prefix=f"{self._prefix}/{self._sequence}",
            barrier_timeout=self._timeout_secs,
        )
        self._sequence += 1
