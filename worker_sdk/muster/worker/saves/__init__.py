"""Asynchronous saves: written in the background, and finalized by every rank or by none."""

from muster.checkpoint.committed import Committed, UncommittedError
from muster.checkpoint.damage import CorruptCheckpointError
from muster.checkpoint.version import LaterVersionError
from muster.worker.saves.checkpointer import Checkpointer
from muster.worker.saves.local.keeper_process import KeeperError
from muster.worker.saves.local.level import Level
from muster.worker.saves.queue.calls import SaveTimings
from muster.worker.saves.queue.drop_in import abort_nvrx_checkpoint
from muster.worker.saves.queue.queue import AsyncCallsQueue
from muster.worker.saves.request import AsyncRequest
from muster.worker.saves.torch_checkpoint import TorchAsyncCheckpoint
from muster.worker.saves.writers.callers import AsyncCaller, ForkCaller, PersistentCaller

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "Checkpointer",
    "Committed",
    "CorruptCheckpointError",
    "ForkCaller",
    "KeeperError",
    "LaterVersionError",
    "Level",
    "PersistentCaller",
    "SaveTimings",
    "TorchAsyncCheckpoint",
    "UncommittedError",
    "abort_nvrx_checkpoint",
]
