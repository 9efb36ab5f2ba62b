"""Transformers' ``Trainer``, with checkpoints that are committed by all ranks or by none: a callback.

Tried with transformers 5.23.0. Where its trainer differs, the import says so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import HubStrategy

from muster.checkpoint.committed import UncommittedError
from muster.worker.barriers import GrpcBarrier
from muster.worker.integrations.commit import adopted
from muster.worker.integrations.commit.agreed import agree_on_newest
from muster.worker.integrations.commit.cleanup import restore, sweep
from muster.worker.integrations.commit.commitment import OnLost
from muster.worker.integrations.commit.folders import FolderSaves
from muster.worker.integrations.commit.framework import check_signatures
from muster.worker.integrations.commit.numbered import newest, rotate
from muster.worker.saves.queue.queue import DEFAULT_TIMEOUT

__all__ = ["CommitCallback", "adopt", "agreed_latest", "latest"]

TRIED = "transformers 5.23.0"
PREFIX = "checkpoint/transformers"
"""The group that decides saves."""
NAMED = "checkpoint"
"""How the names of the trainer's checkpoints begin; their steps follow."""
STATE = "trainer_state.json"
"""The trainer's state in a checkpoint, written by the rank that saves."""

T = TypeVar("T")

_SIGNATURES = {
    "_save_checkpoint": ["self", "model", "trial"],
    "_get_output_dir": ["self", "trial"],
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
}
check_signatures("transformers", Trainer, _SIGNATURES, TRIED)


class CommitCallback(TrainerCallback):  # type: ignore[misc]
    """Lets a trainer commit its checkpoints by all ranks or by none.

    One argument of a script changes::

        trainer = Trainer(model, args, callbacks=[CommitCallback()])

    What the ranks write goes into a folder beside the checkpoint's name. When all have written, rank 0 gives
    it that name, and only then removes older ones by ``save_total_limit``. If a rank fails, dies or does not
    come, all others hear who it was, and what was there before is still there, whole. All ranks must share
    the folder.

    Args:
        barrier: decides the saves, and is for nothing else; default: one of group
            ``checkpoint/transformers``, taken from the environment when it is first needed.
        timeout: seconds that a rank may take for its part of a save, and that it is waited for.
        on_lost: ``"abort"``: if a rank is lost or does not come in time, this process is aborted, since it
            may hang in a collective; default: the save raises, as far as it can.

    Raises:
        ValueError: ``on_lost`` is neither.
    """

    def __init__(
        self,
        *,
        barrier: GrpcBarrier | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        on_lost: OnLost = "raise",
    ) -> None:
        self._saves = FolderSaves(PREFIX, NAMED, barrier, timeout, on_lost)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Transformers': a trainer was made.

        Raises:
            ConnectError: the coordinator could not be reached.
            RefusedError: it refused this process.
            ValueError: its arguments ask for what cannot be committed.
        """
        _check(args)
        self._meet(args)
        folder = Path(args.output_dir)
        if args.process_index == 0:
            restore(folder)
            sweep(folder, NAMED)

    def save(self, trainer: Trainer, write: Callable[[], None], trial: object) -> None:
        """All ranks save.

        Args:
            trainer: the trainer of this callback.
            write: lets this rank write its part.
            trial: of a search of hyperparameters; None: no search.

        Raises:
            BarrierError: not all have written, or rank 0 could not commit it; the message names who, and why.
            MusterError: a rank gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached.
        """
        args, state = trainer.args, trainer.state
        barrier = self._meet(args)
        folder = Path(trainer._get_output_dir(trial=trial))
        path = folder / f"{NAMED}-{state.global_step}"
        best = state.best_model_checkpoint

        def write_aside(unfinished: Path) -> None:
            with _redirected(trainer, unfinished.parent):
                write()
            if state.best_model_checkpoint == str(unfinished):
                state.best_model_checkpoint = str(path)
            if barrier.rank == 0:  # It has written the state with the other name.
                state.save_to_json(str(unfinished / STATE))

        try:
            self._saves.save(barrier, path, write_aside)
        except BaseException:
            state.best_model_checkpoint = best
            raise
        if barrier.rank == 0 and args.save_total_limit:
            kept = {path, Path(state.best_model_checkpoint or path)}
            rotate(folder, f"{NAMED}-", args.save_total_limit, kept)

    def resume(self, args: TrainingArguments, asked: str | bool) -> str:
        """Where all ranks resume from.

        Args:
            args: the trainer's.
            asked: a checkpoint; or True for the last one.

        Raises:
            BarrierError: not all ranks have come, or one cannot resume from it; the message names who.
            CorruptCheckpointError: what was asked for is damaged, or all checkpoints are. All ranks raise it.
            UncommittedError: there is no committed checkpoint.
        """
        barrier = self._meet(args)
        if asked is not True:
            return str(self._saves.choose_named(barrier, Path(str(asked))))
        folder = Path(args.output_dir)
        return str(self._saves.choose(barrier, folder, partial(newest, folder, f"{NAMED}-")))

    def _meet(self, args: TrainingArguments) -> GrpcBarrier:
        return self._saves.meet(args.process_index, args.world_size)


def latest(folder: str | Path) -> Path | None:
    """The whole checkpoint that was committed last in a folder.

    It passes over uncommitted and damaged checkpoints.

    Args:
        folder: the trainer's ``output_dir``.

    Raises:
        CorruptCheckpointError: there are checkpoints, and all are damaged.
    """
    with suppress(UncommittedError):
        return newest(Path(folder), f"{NAMED}-")
    return None


def agreed_latest(folder: str | Path, *, barrier: GrpcBarrier | None = None) -> Path | None:
    """Return what :func:`latest` does, the same on all ranks. All ranks must call it.

    Its errors are those of :func:`muster.worker.integrations.commit.agreed.agree_on_newest`.

    Args:
        folder: the trainer's ``output_dir``.
        barrier: of all ranks, and for nothing else; default: one made from the environment.

    Returns:
        None if no rank finds a checkpoint.
    """
    return agree_on_newest(Path(folder), partial(newest, Path(folder), f"{NAMED}-"), barrier)


def adopt(path: str | Path) -> None:
    """Take a checkpoint for committed that was saved without the callback.

    To be called once, by one process, of a checkpoint that is known to be whole.

    Args:
        path: of the checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint of Transformers.
        FileExistsError: it is committed.
    """
    adopted.adopt(path, "Transformers", STATE, PREFIX)


def _check(args: TrainingArguments) -> None:
    """See that nothing writes past the commitment."""
    if args.enable_jit_checkpoint:
        raise ValueError(
            "enable_jit_checkpoint=True: each rank that is sent SIGTERM saves by itself, and no checkpoint "
            "comes of that. Leave it out, and let muster.worker.SavePoint agree on a step."
        )
    if args.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True: what is committed has one name in one folder that all ranks share. "
            "Leave it out."
        )
    if args.push_to_hub and args.hub_strategy != HubStrategy.END:
        raise ValueError(
            f'hub_strategy="{args.hub_strategy.value}": it uploads a checkpoint before it is committed. Set '
            'it to "end", and upload what was committed.'
        )


@contextmanager
def _redirected(trainer: Trainer, folder: Path) -> Iterator[None]:
    """Let a trainer write its checkpoint into another folder, where there is nothing to rotate."""
    trainer._get_output_dir = lambda trial=None: str(folder)
    try:
        yield
    finally:
        del trainer._get_output_dir


def _callback_of(trainer: Trainer) -> CommitCallback | None:
    callbacks = [one for one in trainer.callback_handler.callbacks if isinstance(one, CommitCallback)]
    return callbacks[0] if callbacks else None


def _replace(name: str, ours: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    theirs = getattr(Trainer, name)
    setattr(Trainer, name, wraps(theirs)(ours(theirs)))


def _saves(theirs: Callable[..., None]) -> Callable[..., None]:
    """The trainer tells its callbacks of a save when it is over; this one has to know before."""

    def save(trainer: Trainer, model: object, trial: object) -> None:
        if (callback := _callback_of(trainer)) is None:
            theirs(trainer, model, trial)
        else:
            callback.save(trainer, lambda: theirs(trainer, model, trial), trial)

    return save


def _trains(theirs: Callable[..., T]) -> Callable[..., T]:
    def train(
        trainer: Trainer, resume_from_checkpoint: str | bool | None = None, *rest: object, **options: object
    ) -> T:
        callback = _callback_of(trainer)
        if callback is not None and resume_from_checkpoint:
            resume_from_checkpoint = callback.resume(trainer.args, resume_from_checkpoint)
        return theirs(trainer, resume_from_checkpoint, *rest, **options)

    return train


_replace("_save_checkpoint", _saves)
_replace("train", _trains)
