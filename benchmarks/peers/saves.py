"""The systems that save, each behind the same few calls, for a job of one rank."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

State = dict[str, torch.Tensor]


class Saver(Protocol):
    """A way to save."""

    def save(self, number: int, state: State) -> None:
        """Save a state, or begin to: the caller may change it afterwards."""
        ...

    def done(self) -> bool:
        """Whether the last save has ended, and is on the disk."""
        ...

    def load(self, number: int, state: State) -> State:
        """What was saved; a state like it may be filled."""
        ...

    def close(self) -> None:
        """Let go of the processes."""
        ...


def sync_tree(path: Path) -> None:
    """Put a file, or a directory with all that it holds, on the disk."""
    for one in [path, *path.rglob("*"), path.parent]:
        handle = os.open(one, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _load_distributed(path: Path, state: State) -> State:
    dcp.load(state, checkpoint_id=path)
    return state


def _load_file(path: Path) -> State:
    loaded: State = torch.load(path, mmap=True)
    return loaded


def _join_alone(folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)


# ---------------------------------------------------------------------- Muster


class MusterCheckpointer:
    """Checkpointer: torch's planner and format, committed by a rename."""

    def __init__(self, folder: Path, *, copy: bool) -> None:
        from muster.worker.saves import Checkpointer

        self._checkpointer = Checkpointer(folder, copy=copy)

    def save(self, number: int, state: State) -> None:
        """Plan, copy if asked to, fork."""
        self._checkpointer.save(number, dict(state))

    def done(self) -> bool:
        """Whether it is committed."""
        return bool(self._checkpointer.finalize())

    def load(self, number: int, state: State) -> State:
        """Load the last one."""
        assert self._checkpointer.load(state).step == number
        return state

    def close(self) -> None:
        """Close."""
        self._checkpointer.close()


class _AsyncTorchSave:
    """The calls that Muster's TorchAsyncCheckpoint and nvidia-resiliency-ext's have in common."""

    def __init__(self, folder: Path, checkpoint: Any, unfinalized: Callable[[], int]) -> None:  # noqa: ANN401
        self._folder = folder
        self._checkpoint = checkpoint
        self._unfinalized = unfinalized
        self._path = folder

    def save(self, number: int, state: State) -> None:
        """Copy, and hand over."""
        self._path = self._folder / f"{number}.pt"
        self._checkpoint.async_save(state, self._path)

    def done(self) -> bool:
        """Whether it is finalized; it is then synced, for neither does that."""
        self._checkpoint.finalize_async_save(blocking=False, no_dist=True)
        if self._unfinalized():
            return False
        sync_tree(self._path)
        return True

    def load(self, number: int, state: State) -> State:
        """Load the file."""
        return _load_file(self._folder / f"{number}.pt")

    def close(self) -> None:
        """Close."""
        self._checkpoint.finalize_async_save(blocking=True, no_dist=True, terminate=True)


def muster_torch(folder: Path, *, persistent: bool) -> Saver:
    """Muster's TorchAsyncCheckpoint."""
    from muster.worker.saves import TorchAsyncCheckpoint

    checkpoint = TorchAsyncCheckpoint(persistent)
    return _AsyncTorchSave(folder, checkpoint, checkpoint._queue.get_num_unfinalized_calls)


# ---------------------------------------------------------------------- the peers


def resiliency(folder: Path, *, persistent: bool) -> Saver:
    """nvidia-resiliency-ext's TorchAsyncCheckpoint; where there is no GPU, its calls of one are void."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    _join_alone(folder)
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        # Its close() takes part in a reduction of a tensor on the GPU.
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    checkpoint = TorchAsyncCheckpoint(persistent_queue=persistent)
    return _AsyncTorchSave(folder, checkpoint, checkpoint._async_calls_queue.get_num_unfinalized_calls)


class DistributedAsyncSave:
    """torch.distributed.checkpoint.async_save."""

    def __init__(self, folder: Path, *, kind: str) -> None:
        _join_alone(folder)
        if kind == "PROCESS":
            # Its process makes a group of its own, which meets at an address.
            from lab.processes.coordinator import free_port

            os.environ |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "RANK": "0",
                "WORLD_SIZE": "1",
            }
        self._folder = folder
        self._kind = dcp.state_dict_saver.AsyncCheckpointerType[kind]
        self._pending: Any = None
        self._path = folder

    def save(self, number: int, state: State) -> None:
        """Copy, and hand over to a thread or a process."""
        self._path = self._folder / str(number)
        self._pending = dcp.async_save(
            dict(state), checkpoint_id=self._path, async_checkpointer_type=self._kind
        )

    def done(self) -> bool:
        """Whether it is written; its files are synced, and so are their folders here."""
        if not self._pending.done():
            return False
        self._pending.result()
        sync_tree(self._path)
        return True

    def load(self, number: int, state: State) -> State:
        """Load it."""
        return _load_distributed(self._folder / str(number), state)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class TorchCheckpointing:
    """The package torch_checkpointing; it does not sync."""

    def __init__(self, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        _join_alone(folder)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        config = CheckpointManager.Config(save=AsyncCheckpointSaverConfig(), storage_config=storage)
        self._manager = CheckpointManager(config)
        self._folder = folder
        self._pending: Any = None
        self._path = folder

    def save(self, number: int, state: State) -> None:
        """Copy, wait for the copy, and hand over to its process."""
        self._path = self._folder / str(number)
        self._pending = self._manager.save(str(self._path), dict(state))
        copying = self._manager._staging_future
        assert copying is not None
        copying.result()

    def done(self) -> bool:
        """Whether it is written; then it is synced."""
        if not self._pending.done():
            return False
        self._pending.result()
        sync_tree(self._path)
        return True

    def load(self, number: int, state: State) -> State:
        """Load it."""
        return dict(self._manager.load(str(self._folder / str(number)), state))

    def close(self) -> None:
        """Close."""
        self._manager.close()
        dist.destroy_process_group()


class PlainSave:
    """torch.save and fsync, in the training thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, number: int, state: State) -> None:
        """Save."""
        path = self._folder / f"{number}.pt"
        torch.save(state, path)
        sync_tree(path)

    def done(self) -> bool:
        """It is."""
        return True

    def load(self, number: int, state: State) -> State:
        """Load the file."""
        return _load_file(self._folder / f"{number}.pt")

    def close(self) -> None:
        """Nothing to do."""


SAVERS: dict[str, tuple[str, Callable[[Path], Saver]]] = {
    "muster": ("Muster, Checkpointer", lambda folder: MusterCheckpointer(folder, copy=False)),
    "muster-copy": ("Muster, Checkpointer(copy=True)", lambda folder: MusterCheckpointer(folder, copy=True)),
    "muster-torch": (
        "Muster, TorchAsyncCheckpoint, fork",
        lambda folder: muster_torch(folder, persistent=False),
    ),
    "muster-torch-persistent": (
        "Muster, TorchAsyncCheckpoint, persistent",
        lambda folder: muster_torch(folder, persistent=True),
    ),
    "dcp-thread": (
        "torch's async_save, thread",
        lambda folder: DistributedAsyncSave(folder, kind="THREAD"),
    ),
    "dcp-process": (
        "torch's async_save, process",
        lambda folder: DistributedAsyncSave(folder, kind="PROCESS"),
    ),
    "resiliency": (
        "nvidia-resiliency-ext, fork",
        lambda folder: resiliency(folder, persistent=False),
    ),
    "resiliency-persistent": (
        "nvidia-resiliency-ext, persistent",
        lambda folder: resiliency(folder, persistent=True),
    ),
    "torch-checkpointing": ("torch_checkpointing", TorchCheckpointing),
    "plain": ("torch.save and fsync", PlainSave),
}
"""By name: the title, and what makes one that keeps its files in a folder."""


def remove(folder: Path, number: int) -> None:
    """Remove a save, whichever system has made it."""
    (folder / f"{number}.pt").unlink(missing_ok=True)
    for name in (str(number), f"step-{number:010}"):
        shutil.rmtree(folder / name, ignore_errors=True)
