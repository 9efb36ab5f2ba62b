"""What a training process imports to take part in Muster's barriers, and to use its store.

Importing this package registers barrier type ``grpc`` in torch's own registry of barriers, where this
torch has one, and in :mod:`muster.worker.barriers` in any case; and ``muster://`` as an init method of
``torch.distributed.init_process_group``, where torch has not loaded :mod:`_muster_torch_autoload` by itself.
"""

import os
import sys

if "grpc" not in sys.modules:
    # With gRPC's own fork handlers on, forked children of a process with an open stream hang.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from _muster_torch_autoload import register
from muster.worker.barriers import BarrierConfig, GrpcBarrier, create_barrier_from_config, synchronize
from muster.worker.checkpointing import GrpcBarrierConfig
from muster.worker.closed import Closed
from muster.worker.decision import Decision, Failure, MissingRank, MissingState, Outcome
from muster.worker.errors import (
    AsyncSaveError,
    BarrierAbortedError,
    BarrierError,
    BarrierMismatchError,
    BarrierTimeoutError,
    ConnectError,
    MemberLostError,
    MusterError,
    OutcomeUnknownError,
    RefusedError,
    StoreTimeoutError,
)
from muster.worker.savepoint.point import SavePoint
from muster.worker.saves import AsyncCallsQueue, AsyncRequest, Checkpointer, TorchAsyncCheckpoint
from muster.worker.sessions import close
from muster.worker.steps import step
from muster.worker.store import CoordinatorStore

register()

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "AsyncSaveError",
    "BarrierAbortedError",
    "BarrierConfig",
    "BarrierError",
    "BarrierMismatchError",
    "BarrierTimeoutError",
    "Checkpointer",
    "Closed",
    "ConnectError",
    "CoordinatorStore",
    "Decision",
    "Failure",
    "GrpcBarrier",
    "GrpcBarrierConfig",
    "MemberLostError",
    "MissingRank",
    "MissingState",
    "MusterError",
    "Outcome",
    "OutcomeUnknownError",
    "RefusedError",
    "SavePoint",
    "StoreTimeoutError",
    "TorchAsyncCheckpoint",
    "close",
    "create_barrier_from_config",
    "step",
    "synchronize",
]
