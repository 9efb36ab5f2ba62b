"""torchtitan's checkpoints, committed by all ranks or by none: a checkpoint manager in place of its own.

Tried with torchtitan 0.3.0. Where its manager differs, the import says so.
"""

import logging
from collections.abc import Set
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.damage import DAMAGED
from muster.checkpoint.retry import is_file
from muster.worker.integrations.checkpoint import CommittedReader, CommittedWriter
from muster.worker.integrations.commit.cleanup import restore, retire, sweep
from muster.worker.integrations.commit.commitment import OnLost
from muster.worker.integrations.commit.folders import FolderSaves
from muster.worker.integrations.commit.framework import check_signatures
from muster.worker.integrations.commit.lookup import all_damaged, read
from muster.worker.integrations.commit.numbered import Numbered, numbered, outdated, stale
from muster.worker.saves.queue.queue import DEFAULT_TIMEOUT

__all__ = ["CommittedCheckpointManager", "latest"]

logger = logging.getLogger(__name__)

TRIED = "torchtitan 0.3.0"
PREFIX = "checkpoint/torchtitan"
"""The group that decides which checkpoint is loaded, and the saves that are not torch's."""
NAMED = "step-"
"""How checkpoints are named; their steps follow."""
METADATA = ".metadata"
"""Torch's format, from which training goes on: the last save of a job may be in another."""

_SIGNATURES = {
    "dcp_save": ["self", "state_dict", "checkpoint_id", "async_mode", "enable_garbage_collection", "to_hf"],
    "dcp_load": ["self", "state_dict", "checkpoint_id", "from_hf", "from_quantized"],
    "_load": ["self", "step"],
    "_find_load_step": ["self", "folder"],
    "_should_purge": ["self"],
    "_wait_for_saving": ["self"],
    "_close": ["self"],
    "_purge_stale_checkpoints": ["self"],
}
check_signatures("torchtitan", CheckpointManager, _SIGNATURES, TRIED)


class CommittedCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoint manager, whose checkpoints have their names when all ranks have written.

    One line of a job's configuration changes::

        checkpoint=CommittedCheckpointManager.Config(enable=True, interval=500)

    If a rank fails, dies or does not come, all others hear who it was. What is not committed is not resumed
    from, nor does it count for ``keep_latest_k``. All ranks load what rank 0 has found. They must share the
    folder.

    Args:
        config: as torchtitan's; also how long to wait for a rank, and what then.
        **parts: what torchtitan hands to its manager.

    Raises:
        ValueError: the folder is in a bucket, or ``on_lost`` is not one of its values.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's, and how long to wait."""

        timeout: float = DEFAULT_TIMEOUT
        """Seconds that a rank may take for its part of a save, and that it is waited for."""

        on_lost: OnLost = "raise"
        """With "abort", this process is aborted if a rank is lost or does not come in time."""

    def __init__(self, config: Config, **parts: Any) -> None:  # noqa: ANN401
        super().__init__(config, **parts)
        if not self.enable:
            return
        if filesystem.is_remote(self.folder):
            raise ValueError(
                f"{self.folder} is in a bucket, and what is committed gets its name by a rename. Name a "
                "folder that all ranks share."
            )
        self._timeout = config.timeout
        self._on_lost = config.on_lost
        self._saves = FolderSaves(PREFIX, NAMED, None, config.timeout, config.on_lost)
        self._loaded: Path | None = None
        """What was committed here and is loaded, until another one is committed; None: what training begins
        with is loaded."""
        self._writing: Path | None = None
        """What is being saved, or was last."""

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """torchtitan's: all ranks save.

        Raises:
            BarrierError: not all have written; the message names the ranks, and why. The future of an
                asynchronous save raises it.
            CheckpointException: a rank could not write, or plan; torch's word for it.
            MusterError: a rank gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached.
        """
        if to_hf:  # torchtitan writes this in two steps, into a folder that it is given.

            def write(unfinished: Path) -> None:
                theirs(self, state_dict, str(unfinished), async_mode, to_hf=True)

            theirs = CheckpointManager.dcp_save
            self._saves.save(self._saves.meet(*_ranks()), Path(checkpoint_id), write)
            saved = None
        else:
            saved = self._save_by_torch(state_dict, checkpoint_id, async_mode)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    def _save_by_torch(
        self, state_dict: dict[str, Any], name: str, async_mode: AsyncMode
    ) -> Future[Any] | AsyncSaveResponse | None:
        writer = CommittedWriter(name, timeout=self._timeout, on_lost=self._on_lost)
        self._writing = Path(name)
        if async_mode is AsyncMode.ASYNC:
            # What torch takes where it is given no writer: a writer that stages copies tensors alone.
            stager = DefaultStager(StagingOptions(False, False, False, False))
            saving = dcp.async_save(
                state_dict, storage_writer=writer, process_group=self.pg, async_stager=stager
            )
            assert isinstance(saving, Future)
            saving.add_done_callback(lambda _: stager.close())
            return saving
        if async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
            return dcp.async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        dcp.save(state_dict, storage_writer=writer)
        self._loaded = None
        return None

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """torchtitan's; to go on from a checkpoint of this job, only from one that was committed.

        Raises:
            CheckpointException: it was not, on any rank.
        """
        if self._loaded is None:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=CommittedReader(checkpoint_id))
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        """torchtitan's; what rank 0 finds is everyone's.

        Raises:
            BarrierError: not all ranks have come, or one does not see it; the message names who.
            CheckpointException: the step was named, and is damaged.
            CorruptCheckpointError: the step was named and is known to be damaged; or all are.
            UncommittedError: the step was named, and not committed.
        """
        folder = Path(self.folder)

        passed: set[Path] = set()
        damage: CheckpointException | None = None

        def find_name(_: Set[Path]) -> Path | None:
            if not self.load_only and self.save_future is None:
                restore(folder)
                sweep(folder)
            if step == -1:
                return _newest(folder, passed)
            return _in_its_place(folder / f"{NAMED}{step}")

        while True:
            # The reader verifies its content, item by item.
            barrier = self._saves.meet(*_ranks())
            self._loaded = self._saves.choose_any(
                barrier, folder, find_name, verify=False, look=lambda _: _newest(folder, passed)
            )
            if self._loaded is None:
                if damage is not None:
                    raise damage
                return bool(super()._load(-1))
            try:
                return bool(super()._load(int(self._loaded.name.removeprefix(NAMED))))
            except CheckpointException as error:  # The same on all ranks.
                if step != -1 or not _is_damage(error):
                    raise
                damage = error
                passed.add(self._loaded)
                logger.warning("%s is damaged: all ranks load the one before", self._loaded)

    def _find_load_step(self, folder: str = "") -> int:
        """torchtitan's, for each rank; asked only where rank 0 has found none for all."""
        return -1

    def _purge_stale_checkpoints(self) -> None:
        """torchtitan's; what is not committed does not count."""
        if not self._should_purge():
            return
        try:
            every = numbered(Path(self.folder), NAMED)
            found = [one for one in every if _is_resumable(one)]
            newest = found[-1].path if found else None
            used = {path for path in (newest, self._loaded, self._writing) if path is not None}
            for old in (*stale(found, self.keep_latest_k, used), *outdated(every, self.keep_latest_k)):
                self.purge_queue.put(str(retire(old)))
        except (OSError, UncommittedError) as error:  # Rank 0 alone must not stop for this.
            logger.warning("old checkpoints in %s are not removed: %s", self.folder, error)

    def _wait_for_saving(self) -> None:
        """torchtitan's; a caller that goes on after a failed save hears of it once.

        Raises:
            BarrierError: not all have written; the message names who has not, and why.
        """
        saving: Future[Any] = self.save_future  # type: ignore[has-type]
        try:
            super()._wait_for_saving()
            self._loaded = None
        finally:
            if saving.done():
                self.save_future = None

    def __del__(self) -> None:
        """Let go, and wait for nobody: a garbage collection may be on any thread, even one that this ends."""
        if getattr(self, "purge_thread", None) is not None:
            self.purge_queue.put(None)

    def _close(self) -> None:
        """torchtitan's, when the last save has ended: it reads what is let go here."""
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()


def latest(folder: str | Path) -> Path | None:
    """The checkpoint in a folder that was committed last, to go on from.

    It passes over damaged checkpoints.

    Args:
        folder: of the job's checkpoints: torchtitan's dump folder, and the name of the configuration's.

    Raises:
        CorruptCheckpointError: there are checkpoints, and all are damaged.
    """
    return _newest(Path(folder))


def _newest(folder: Path, excluded: Set[Path] = frozenset()) -> Path | None:
    """As :func:`latest`, but for those that were found damaged just now."""
    every = numbered(folder, NAMED, excluded)
    if found := [one.path for one in every if _is_resumable(one)]:
        return found[-1]
    if damaged := [one.found for one in every if not one.whole]:
        raise all_damaged(damaged)
    return None


def _is_resumable(one: Numbered) -> bool:
    """Whether it is one to go on from, in its place."""
    return one.whole and one.found.path == one.path and is_file(one.path / METADATA)


def _in_its_place(path: Path) -> Path:
    """A checkpoint of this name, where torchtitan looks for it.

    Raises:
        UncommittedError: no checkpoint was committed, or it is being replaced.
    """
    if read(path)[0] != path:
        raise UncommittedError(f"{path} is being replaced, or was when its job was killed. Name another.")
    return path


def _is_damage(error: CheckpointException) -> bool:
    # Torch makes an error of its own of what the reader raises for the metadata; the text has the name.
    return any(DAMAGED in str(failure) for failure, _ in error.failures.values())


def _ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
