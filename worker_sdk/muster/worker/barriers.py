"""Barrier type ``grpc``, and the registry of barrier types that it stands in.

Where this torch has ``torch.distributed.checkpoint._experimental.barriers``, the names here are torch's
own, so that a barrier that is registered here is found there. Where it has none,
:mod:`muster.worker.fallback_barriers` provides the same.
"""

from muster.worker.group_barrier import DEFAULT_INIT_TIMEOUT as DEFAULT_INIT_TIMEOUT
from muster.worker.group_barrier import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from muster.worker.group_barrier import GroupBarrier
from muster.worker.group_barrier import synchronize as synchronize

try:
    from torch.distributed.checkpoint._experimental.barriers import (
        BARRIER_REGISTRY,
        Barrier,
        BarrierConfig,
        DistBarrier,
        TCPStoreBarrier,
        create_barrier_from_config,
        register_barrier,
    )
except ImportError:
    from muster.worker.fallback_barriers import (  # type: ignore[assignment]
        BARRIER_REGISTRY,
        Barrier,
        BarrierConfig,
        DistBarrier,
        TCPStoreBarrier,
        create_barrier_from_config,
        register_barrier,
    )

__all__ = [
    "BARRIER_REGISTRY",
    "Barrier",
    "BarrierConfig",
    "DistBarrier",
    "GrpcBarrier",
    "TCPStoreBarrier",
    "create_barrier_from_config",
    "register_barrier",
]


@register_barrier
class GrpcBarrier(GroupBarrier, Barrier):
    """A :class:`GroupBarrier` that torch knows as barrier type ``grpc``, with the same arguments."""

    barrier_type = "grpc"
    """Its name in a :class:`BarrierConfig`."""
