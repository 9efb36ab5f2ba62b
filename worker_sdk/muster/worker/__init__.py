"""What a training process imports to take part in Muster's barriers.

Importing this package registers barrier type ``grpc`` in torch's own registry of barriers, where this
torch has one, and in :mod:`muster.worker.barriers` in any case.
"""

import os
import sys

if "grpc" not in sys.modules:
    # With gRPC's own fork handlers on, forked children of a process with an open stream hang.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from muster.worker.barriers import BarrierConfig, GrpcBarrier, create_barrier_from_config
from muster.worker.checkpointing import GrpcBarrierConfig
from muster.worker.closed import Closed
from muster.worker.decision import Decision, MissingRank, MissingState, Outcome
from muster.worker.errors import (
    BarrierAbortedError,
    BarrierError,
    BarrierMismatchError,
    BarrierTimeoutError,
    ConnectError,
    MemberLostError,
    MusterError,
    OutcomeUnknownError,
    RefusedError,
)
from muster.worker.sessions import close

__all__ = [
    "BarrierAbortedError",
    "BarrierConfig",
    "BarrierError",
    "BarrierMismatchError",
    "BarrierTimeoutError",
    "Closed",
    "ConnectError",
    "Decision",
    "GrpcBarrier",
    "GrpcBarrierConfig",
    "MemberLostError",
    "MissingRank",
    "MissingState",
    "MusterError",
    "Outcome",
    "OutcomeUnknownError",
    "RefusedError",
    "close",
    "create_barrier_from_config",
]
