"""What a training process imports to take part in Muster's barriers, and to use its store.

Importing this package registers barrier type ``grpc`` in :mod:`muster.worker.barriers`. If this torch has a
registry of barriers of its own, the type is registered there too, when that registry is imported. The import
also makes ``muster://`` an init method of ``torch.distributed.init_process_group``, unless torch has already
loaded :mod:`_muster_torch_autoload`.

The package does not load torch if torch will announce its own import: the registration happens then. Each
name is imported at its first use, so a process without torch can use everything that does not need torch.
"""

import os
import sys
from importlib import import_module
from importlib.metadata import distribution
from importlib.util import find_spec
from typing import TYPE_CHECKING

if "grpc" not in sys.modules:
    # With gRPC's own fork handlers on, forked children of a process with an open stream hang.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if TYPE_CHECKING:
    from muster.worker.barriers import BarrierConfig, GrpcBarrier, create_barrier_from_config
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
    from muster.worker.group_barrier import GroupBarrier, synchronize
    from muster.worker.groups.write_report import WriteReport
    from muster.worker.savepoint.point import SavePoint
    from muster.worker.saves import AsyncCallsQueue, AsyncRequest, Checkpointer, TorchAsyncCheckpoint
    from muster.worker.session.sessions import close
    from muster.worker.steps import step
    from muster.worker.store import CoordinatorStore

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
    "GroupBarrier",
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
    "WriteReport",
    "close",
    "create_barrier_from_config",
    "step",
    "synchronize",
]

_MODULES = {
    "barriers": ("BarrierConfig", "GrpcBarrier", "create_barrier_from_config"),
    "checkpointing": ("GrpcBarrierConfig",),
    "closed": ("Closed",),
    "decision": ("Decision", "Failure", "MissingRank", "MissingState", "Outcome"),
    "group_barrier": ("GroupBarrier", "synchronize"),
    "savepoint.point": ("SavePoint",),
    "saves": ("AsyncCallsQueue", "AsyncRequest", "Checkpointer", "TorchAsyncCheckpoint"),
    "session.sessions": ("close",),
    "steps": ("step",),
    "store": ("CoordinatorStore",),
    "groups.write_report": ("WriteReport",),
}
"""The modules of the names that are not errors."""
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def _load(name: str) -> object:
    """Import a name of the package, or one of its modules."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_PLACES.get(name, 'errors')}"), name)
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


if not TYPE_CHECKING:  # A type checker would accept any name otherwise.

    def __getattr__(name: str) -> object:
        try:
            value = globals()[name] = _load(name)
        except ModuleNotFoundError as error:
            if _finds_torch() or (error.name or "").partition(".")[0] != "torch":
                raise
            raise ImportError(
                f"{__name__}.{name} needs torch, which is not installed here: "
                "pip install muster-coordinator[worker]"
            ) from error
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _is_announced() -> bool:
    """Return whether torch announces its import: it then loads the entry points of its group."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    return bool(distribution("muster-coordinator").entry_points.select(group="torch.backends"))


def _finds_torch() -> bool:
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # Another module hides or replaces it.
        return False


if _finds_torch() and ("torch" in sys.modules or not _is_announced()):
    import torch.distributed  # noqa: F401 - before the errors: it has their base class

    from _muster_torch_autoload import register

    register()
