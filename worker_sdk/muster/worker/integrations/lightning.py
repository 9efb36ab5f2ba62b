"""Lightning's ``Trainer``, with checkpoints that are committed by all ranks or by none: its strategies.

Tried with Lightning 2.6.6, as ``lightning.pytorch``. Where its strategies differ, the import says so.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.damage import CorruptCheckpointError, Damage
from muster.checkpoint.manifest import Manifest
from muster.checkpoint.retry import is_file, is_folder
from muster.worker.barriers import GrpcBarrier
from muster.worker.errors import MusterError
from muster.worker.integrations.commit import lookup
from muster.worker.integrations.commit.agreed import check_all_resume
from muster.worker.integrations.commit.cleanup import finish, remove, restore
from muster.worker.integrations.commit.commitment import (
    Commitment,
    ElsewhereError,
    OnLost,
    check_save_settings,
    commit_written,
    report_failure,
)
from muster.worker.integrations.commit.contents import (
    gather_manifest,
    is_archive,
    manifest_of_file,
    record_share,
    verify_share,
)
from muster.worker.integrations.commit.framework import check_signatures
from muster.worker.integrations.commit.lookup import (
    Marker,
    ReplacedError,
    corrupt,
    damage_of,
    entries,
    find,
    is_kept,
    mark_damaged,
    read_whole,
)
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint, check_name
from muster.worker.saves.queue.queue import DEFAULT_TIMEOUT
from muster.worker.saves.storage.written import check_shards

__all__ = ["committed", "latest"]

logger = logging.getLogger(__name__)

TRIED = "Lightning 2.6.6"
PREFIX = "checkpoint/lightning"
"""The group that decides saves."""
SAVE = "muster_save"
"""The key in a checkpoint of the save that made it."""
SHARDED = "meta.pt"
"""What Lightning writes in a folder of shards, and nowhere else."""

T = TypeVar("T")
S = TypeVar("S", bound=Strategy)

_STRATEGY = {
    "save_checkpoint": ["self", "checkpoint", "filepath", "storage_options"],
    "load_checkpoint": ["self", "checkpoint_path", "weights_only"],
    "remove_checkpoint": ["self", "filepath"],
    "setup": ["self", "trainer"],
    "on_train_start": ["self"],
}
check_signatures("lightning", Strategy, _STRATEGY, TRIED)
_CONNECTOR = {"resume_start": _STRATEGY["load_checkpoint"]}
check_signatures("lightning", _CheckpointConnector, _CONNECTOR, TRIED)


def committed(
    strategy: S,
    *,
    barrier: GrpcBarrier | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_lost: OnLost = "raise",
) -> S:
    """Let a strategy commit its checkpoints by all ranks or by none.

    One argument of a script changes::

        trainer = Trainer(strategy=committed(FSDPStrategy(state_dict_type="sharded")))

    What the ranks write goes beside the checkpoint's name. When all have written, rank 0 gives it that name;
    a checkpoint of the same name is replaced. If a rank fails, dies or does not come, all others hear who it
    was, and what was there before is still there, whole. All ranks must share the folder.

    Args:
        strategy: a ``DDPStrategy``, ``FSDPStrategy`` or ``ModelParallelStrategy``, or one of a class of yours
            that is one.
        barrier: decides the saves, and is for nothing else; default: one of group ``checkpoint/lightning``,
            taken from the environment when training begins.
        timeout: seconds that a rank may take for its part of a save, and that it is waited for.
        on_lost: ``"abort"``: if a rank is lost or does not come in time, this process is aborted, since it
            may hang in a collective; default: the save raises, as far as it can.

    Returns:
        The same strategy.

    Raises:
        TypeError: it is another strategy, or none.
        ValueError: it commits already, ``on_lost`` is neither, the timeout is not a finite number above 0, or
            the barrier does not cover all ranks.
    """
    if not isinstance(strategy, (DDPStrategy, FSDPStrategy, ModelParallelStrategy)):
        raise TypeError(
            f"{strategy!r} is not one of lightning.pytorch's DDPStrategy, FSDPStrategy and "
            "ModelParallelStrategy: give one of these (those of the package pytorch_lightning are others), "
            'or name it: Trainer(strategy="committed_ddp").'
        )
    if isinstance(strategy, CommittedSaves):
        raise ValueError("this strategy commits its checkpoints already: leave out one committed(…).")
    check_save_settings(timeout, on_lost, barrier)
    strategy.__class__ = _committing(type(strategy))
    strategy._saves = _Saves(barrier, timeout, on_lost)
    return strategy


def latest(folder: str | Path) -> Path | None:
    """The checkpoint in a folder that was committed last.

    It passes over checkpoints that are uncommitted, not whole, or damaged. If none was committed, it takes
    the newest whole file of any program.

    Args:
        folder: where checkpoints have their names, such as ``ModelCheckpoint``'s ``dirpath``.

    Raises:
        CorruptCheckpointError: there are checkpoints, and all are damaged.
        OSError: they cannot be read.
    """
    whole: dict[Path, float] = {}
    for path in entries(Path(folder)):
        if path.name.endswith(".ckpt") and not path.name.startswith("."):
            with suppress(FileNotFoundError):  # It was removed just now.
                if is_file(path) and find(path) is None and is_archive(path):
                    whole[path] = path.stat().st_mtime
    try:
        if (last := lookup.latest(folder)) is not None:
            return last
    except CorruptCheckpointError:
        if not whole:
            raise
    return max(whole, key=lambda path: whole[path]) if whole else None


class _Saves:
    """How the saves of a strategy are decided, and which one is under way."""

    def __init__(self, barrier: GrpcBarrier | None, timeout: float, on_lost: OnLost) -> None:
        self._barrier = barrier
        self._timeout = timeout
        self._on_lost = on_lost
        self._unfinished: StagedCheckpoint | None = None
        """On rank 0, the save that was begun last and not committed."""

    def barrier(self, rank: int, world_size: int) -> GrpcBarrier:
        """Return the barrier of a trainer's ranks.

        Raises:
            ConnectError: the coordinator could not be reached.
            RefusedError: it refused this process.
            ValueError: the environment names no barrier, or the barrier is not of the trainer's ranks.
        """
        if self._barrier is None:
            self._barrier = GrpcBarrier(rank, world_size, PREFIX)
        theirs = (self._barrier.rank, self._barrier.world_size)
        if theirs != (rank, world_size):
            raise ValueError(
                f"this process is rank {rank} of {world_size} of the trainer, and rank {theirs[0]} of "
                f"{theirs[1]} of the barrier. Give a barrier of the trainer's ranks, or none: "
                "committed(…, barrier=GrpcBarrier(…))."
            )
        return self._barrier

    def begin(self, barrier: GrpcBarrier, step: object) -> Commitment:
        """A save of a step, on all ranks."""
        return Commitment(barrier, self._timeout, self._on_lost, name=f"step {step}", parts=2)

    def make_room(self, staged: StagedCheckpoint) -> None:
        """On rank 0, before it is written: remove what failed saves have left.

        Raises:
            OSError: that cannot be done, or the name is that of something else.
        """
        check_name(staged.path, SHARDED)
        if self._unfinished is not None:
            with suppress(OSError):
                self._unfinished.give_up()
        self._unfinished = staged
        staged.prepare()
        staged.unfinished.parent.mkdir()

    def commit(self, staged: StagedCheckpoint, marker: Marker, manifest: Manifest) -> None:
        """Commit a save on rank 0, when all ranks have written and digested it.

        Raises:
            OSError: it is not what was written, or could not be committed.
        """
        if is_folder(staged.unfinished) and is_file(staged.path):
            raise FileExistsError(
                f"{staged.path} is a file, which no rename can replace by a folder of shards. Move it away, "
                "or save under another name."
            )
        _check_sharded(staged.unfinished)
        staged.commit(marker, manifest)
        self._unfinished = None


class CommittedSaves(Strategy):  # type: ignore[misc]
    """What a strategy does otherwise whose checkpoints are committed; :func:`committed` makes it one."""

    _saves: _Saves

    def __reduce__(self) -> str:
        raise TypeError(
            f"{type(self).__name__} cannot go to another process: start the ranks by torchrun, srun or "
            "Lightning's own launcher of scripts, not by spawn."
        )

    def setup_environment(self) -> None:
        """Lightning's: connect the ranks. ``fit`` raises if only some find a checkpoint to resume from."""
        super().setup_environment()
        connector = self.lightning_module.trainer._checkpoint_connector
        resume = type(connector).resume_start

        def resume_start(path: str | Path | None = None, weights_only: bool | None = None) -> None:
            check_all_resume(self.global_rank, path, self.reduce_boolean_decision)
            resume(connector, path, weights_only)

        connector.resume_start = resume_start

    def setup(self, trainer: Trainer) -> None:
        """Lightning's: training, or another use of the model, is to begin.

        Raises:
            ConnectError: the coordinator could not be reached.
            RefusedError: it refused this process.
            ValueError: checkpoints are written behind the trainer's back; or the barrier is of other ranks.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            _check_io(self.checkpoint_io)
            self._saves.barrier(self.global_rank, self.world_size)
        super().setup(trainer)

    def on_train_start(self) -> None:
        """Lightning's: training begins.

        Raises:
            MusterError: it would start from scratch, though there is a checkpoint that could not be found.
        """
        super().on_train_start()
        trainer = self.lightning_module.trainer
        if trainer.ckpt_path is None:
            found = self.broadcast(_restored(trainer) if self.is_global_zero else [])
            if found:
                raise MusterError(
                    f"{', '.join(found)} had lost its name, since the job ended while it was replaced, and "
                    "has it again. Start the job once more to resume from it, or remove it to start over."
                )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Lightning's: all ranks save.

        Raises:
            BarrierError: not all have written, or rank 0 could not commit it; the message names who, and why.
            MusterError: a rank gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached.
            ValueError: the ranks are at different steps, or it is no path of a shared folder.
        """
        if "://" in str(filepath):
            raise ValueError(f"{filepath} is not in a folder: what is committed must be renamed. Name one.")
        barrier = self._saves.barrier(self.global_rank, self.world_size)
        commitment = self._saves.begin(barrier, checkpoint.get("global_step"))
        path = Path(filepath)
        # Lightning resumes by the highest number of whatever has this in its name.
        alias = path.name.replace("hpc_ckpt_", "hpc-ckpt-")
        staged = StagedCheckpoint(
            path, barrier.generation, commitment.number, barrier.run_id, alias, path.name
        )
        checkpoint[SAVE] = f"{barrier.run_id} {barrier.generation}-{commitment.number}"
        with report_failure(commitment):
            folder = self._prepare(staged, checkpoint.get("global_step"))
            # Where it writes, rank 0 says, to all.
            super().save_checkpoint(checkpoint, staged.unfinished, storage_options)
            if self.is_global_zero and not staged.unfinished.exists():
                raise FileNotFoundError(
                    f"{type(self.checkpoint_io).__name__} has not written {staged.unfinished} "
                    "when it was to. One that writes later cannot be committed: take another."
                )
        shards = folder if folder is not None and folder.is_dir() else None

        def digest() -> int:
            if shards is not None:
                return record_share(shards, self.global_rank, self._digesting)
            if not self.is_global_zero:
                return 0
            written.append(manifest_of_file(staged.unfinished))
            return staged.unfinished.stat().st_size

        written: list[Manifest] = []
        commit_written(
            commitment,
            digest,
            lambda: written[0] if written else gather_manifest(staged.unfinished, self._digesting),
            partial(self._saves.commit, staged),
        )

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Lightning's: all ranks load.

        Raises:
            CorruptCheckpointError: it is damaged. All ranks raise it.
            UncommittedError: there is no committed checkpoint of this name.
            RuntimeError: it was replaced meanwhile.
            OSError: it cannot be read.
        """
        path = Path(self.broadcast(checkpoint_path))
        if self.is_global_zero:
            with suppress(OSError):  # Else a file whose commit was left half-way loads unverified.
                finish(path)
        found, marker = self._by_all(partial(self._find, path))
        if marker is not None:
            self._verify(found, marker)
        try:
            loaded: dict[str, Any] = super().load_checkpoint(found, weights_only)
        except Exception as error:
            if is_file(found) and not is_archive(found):
                raise UncommittedError(
                    f"{path} is not a whole checkpoint: {error}. It was torn by a program that does not "
                    "commit its checkpoints, or is of another format. Remove it, and resume from another."
                ) from error
            raise
        mine = (marker, loaded.pop(SAVE, None))
        theirs = self.broadcast(mine)

        def check() -> None:
            if mine != theirs or (marker is not None and _find(path)[1] != marker):
                raise ReplacedError(path)

        self._by_all(check)
        return loaded

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Lightning's: all ranks need a checkpoint no more. One that is marked as kept stays."""
        if self.is_global_zero and not is_kept(Path(filepath)):
            remove(Path(filepath))

    @property
    def _digesting(self) -> int:
        """Number of ranks that digest what was written."""
        return 1 if isinstance(self, DDPStrategy) else self.world_size

    def _prepare(self, staged: StagedCheckpoint, step: int | None) -> Path | None:
        """Prepare the write, and check the step: ranks that a signal interrupted may be at different steps.

        Returns:
            Where it is written; None if this rank writes nothing.
        """
        if isinstance(self, DDPStrategy):  # Rank 0 alone writes, and no collective has to be waited for.
            if not self.is_global_zero:
                return None
            self._saves.make_room(staged)
            return staged.unfinished
        leader, where = self.broadcast((step, staged.unfinished))

        def prepare() -> None:
            if leader != step:
                raise ValueError(
                    f"rank {self.global_rank} is at step {step}, and rank 0 at step {leader}: that is no "
                    "checkpoint. Let all ranks save at the same step."
                )
            if self.is_global_zero:
                self._saves.make_room(staged)

        self._by_all(prepare)
        return Path(where)

    def _find(self, path: Path) -> tuple[Path, Marker | None]:
        """Where a checkpoint is, and what it is; None for a file that something else wrote."""
        found, marker = _find(path)
        if self.is_global_zero and (marker is None or marker.manifest is None):
            logger.warning("%s has no digests: it is loaded unverified", found)
            try:
                _check_sharded(found)
            except OSError as error:
                raise UncommittedError(f"{path} is not whole any more: {error}") from error
        return found, marker

    def _verify(self, path: Path, marker: Marker) -> None:
        """Verify a checkpoint on all ranks; each reads a share of it.

        Raises:
            CorruptCheckpointError: it is not. It is marked.
            ReplacedError: another one has its name now.
        """

        def verify() -> Damage | None:
            damage = verify_share(path, marker.manifest, self.global_rank, self.world_size)
            if damage is not None:
                mark_damaged(path, marker, damage)
            return damage

        damage = self._by_all(verify)
        if not self.reduce_boolean_decision(damage is None):
            elsewhere = Damage("a file", "another rank has found it damaged; its log says more")
            raise corrupt(path, damage_of(path) or damage or elsewhere)

    def _by_all(self, step: Callable[[], T]) -> T:
        """What all ranks do, or fail at: one that goes on alone would hang in the next collective."""
        try:
            result = step()
        except Exception:
            self.reduce_boolean_decision(False)
            raise
        if not self.reduce_boolean_decision(True):
            raise ElsewhereError("another rank cannot use this checkpoint. Its own error says why.")
        return result


def _find(path: Path) -> tuple[Path, Marker | None]:
    """Return where a checkpoint is, and its marker; None for a file that something else wrote.

    Raises:
        CorruptCheckpointError: it is damaged.
        UncommittedError: it is a folder that was not committed.
    """
    try:
        return read_whole(path)
    except UncommittedError:
        if is_file(path):
            return path, None
        raise


def _committing(theirs: type[Strategy]) -> type[Any]:
    """A class of strategies, with committed saves."""
    return type(f"Committed{theirs.__name__}", (CommittedSaves, theirs), {})


def _register(name: str, theirs: type[Strategy]) -> None:
    def made(**options: object) -> Strategy:
        return committed(theirs(**options))

    StrategyRegistry.register(
        name, made, f"{theirs.__name__}, with checkpoints that all ranks commit", override=True
    )


_register("committed_ddp", DDPStrategy)
_register("committed_fsdp", FSDPStrategy)
_register("committed_model_parallel", ModelParallelStrategy)


def _check_io(io: object) -> None:
    while io is not None:
        if isinstance(io, AsyncCheckpointIO):
            raise ValueError(
                "AsyncCheckpointIO writes after the save has returned, so that it cannot be committed. Leave "
                "it out of the trainer's plugins."
            )
        io = getattr(io, "checkpoint_io", None)


def _check_sharded(folder: Path) -> None:
    if is_file(folder / SHARDED):
        check_shards(folder)


def _restored(trainer: Trainer) -> list[str]:
    """On rank 0: the checkpoints that a process has left without their names, which they have again."""
    callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    return [str(path) for one in callbacks if one.dirpath for path in restore(Path(one.dirpath))]
