"""Accelerate's ``save_state`` and ``load_state``, committed by all ranks or by none.

Tried with accelerate 1.15.0. Where its accelerator differs, the import says so.
"""

import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator

from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.retry import exists, is_folder
from muster.worker.barriers import GrpcBarrier
from muster.worker.integrations.commit import adopted
from muster.worker.integrations.commit.agreed import agree_on_newest
from muster.worker.integrations.commit.cleanup import restore, sweep
from muster.worker.integrations.commit.commitment import OnLost
from muster.worker.integrations.commit.contents import OURS
from muster.worker.integrations.commit.folders import FolderSaves
from muster.worker.integrations.commit.framework import check_signatures
from muster.worker.integrations.commit.lookup import find, read
from muster.worker.integrations.commit.numbered import newest, rotate
from muster.worker.saves.queue.queue import DEFAULT_TIMEOUT

__all__ = ["adopt", "agreed_latest", "commit_together", "latest"]

TRIED = "accelerate 1.15.0"
PREFIX = "checkpoint/accelerate"
"""The group that decides saves."""
NAMED = "checkpoint_"
"""How automatic names begin; their numbers follow."""
UNFINISHED = "accelerate"
"""How checkpoints are named where they are not committed yet."""

OWN = re.compile(
    r"(pytorch_)?model.*|(optimizer|scheduler|sampler|random_states|dl_state_dict|custom_checkpoint).*"
    r"|scaler\.pt|config\.json|latest|zero_to_fp32\.py"
)
"""What there may be in a checkpoint of Accelerate's."""

A = TypeVar("A", bound=Accelerator)

_SIGNATURES = {
    "save_state": ["self", "output_dir", "safe_serialization", "save_model_func_kwargs"],
    "load_state": ["self", "input_dir", "load_kwargs", "load_model_func_kwargs"],
}
check_signatures("accelerate", Accelerator, _SIGNATURES, TRIED)


def commit_together(
    accelerator: A,
    *,
    barrier: GrpcBarrier | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_lost: OnLost = "raise",
) -> A:
    """Let an accelerator commit its checkpoints by all ranks or by none.

    One line of a script changes::

        accelerator = commit_together(Accelerator())

    What the ranks write goes into a folder beside the checkpoint's name. When all have written, rank 0 gives
    it that name; one of the same name is replaced, and only then are older ones removed by ``total_limit``.
    If a rank fails, dies or does not come, all others hear who it was, and what was there before is still
    there, whole. All ranks must share the folder.

    Args:
        accelerator: its ``save_state`` and ``load_state`` then do so.
        barrier: decides the saves, and is for nothing else; default: one of group ``checkpoint/accelerate``,
            taken from the environment.
        timeout: seconds that a rank may take for its part of a save, and that it is waited for.
        on_lost: ``"abort"``: if a rank is lost or does not come in time, this process is aborted, since it
            may hang in a collective; default: the save raises, as far as it can.

    Returns:
        The same accelerator.

    Raises:
        ConnectError: the coordinator could not be reached.
        RefusedError: it refused this process.
        TypeError: it is no accelerator.
        ValueError: it commits already, or its settings ask for what cannot be committed.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"{accelerator!r} is no accelerate.Accelerator: give one.")
    if isinstance(accelerator, CommittedSaves):
        raise ValueError(
            "this accelerator commits its checkpoints already: leave out one commit_together(…)."
        )
    if accelerator.project_configuration.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True: what is committed has one name in one folder that all ranks share. "
            "Leave it out."
        )
    saves = FolderSaves(PREFIX, UNFINISHED, barrier, timeout, on_lost)
    saves.meet(accelerator.process_index, accelerator.num_processes)
    theirs = type(accelerator)
    accelerator.__class__ = type(f"Committed{theirs.__name__}", (CommittedSaves, theirs), {})
    accelerator._saves = saves
    if accelerator.is_main_process and (folder := accelerator._automatic()) is not None:
        restore(folder)
        sweep(folder, UNFINISHED)
    return accelerator


def latest(project_dir: str | Path) -> Path | None:
    """Return the checkpoint that ``load_state()`` loads where names are automatic.

    It passes over uncommitted and damaged checkpoints.

    Args:
        project_dir: the accelerator's.

    Raises:
        CorruptCheckpointError: there are checkpoints, and all are damaged.
    """
    with suppress(UncommittedError):
        return newest(_checkpoints(project_dir), NAMED)
    return None


def agreed_latest(project_dir: str | Path, *, barrier: GrpcBarrier | None = None) -> Path | None:
    """Return what :func:`latest` does, the same on all ranks. All ranks must call it.

    Its errors are those of :func:`muster.worker.integrations.commit.agreed.agree_on_newest`.

    Args:
        project_dir: the accelerator's.
        barrier: of all ranks, and for nothing else; default: one made from the environment.

    Returns:
        None if no rank finds a checkpoint.
    """
    folder = _checkpoints(project_dir)
    return agree_on_newest(folder, partial(newest, folder, NAMED), barrier)


def adopt(path: str | Path) -> None:
    """Take a checkpoint for committed that was saved without :func:`commit_together`.

    To be called once, by one process, of a checkpoint that is known to be whole.

    Args:
        path: of the checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint of Accelerate.
        FileExistsError: it is committed.
    """
    adopted.adopt(path, "Accelerate", "random_states_*.pkl", PREFIX)


class CommittedSaves(Accelerator):  # type: ignore[misc]
    """What an accelerator does otherwise that commits; :func:`commit_together` makes it one."""

    _saves: FolderSaves

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: object
    ) -> str:
        """Accelerate's: all ranks save.

        Returns:
            The checkpoint's path.

        Raises:
            BarrierError: not all have written, or rank 0 could not commit it; the message names who, and why.
            FileExistsError: a checkpoint has this number already.
            IsADirectoryError: the folder that was named holds something else.
            MusterError: a rank gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached.
            ValueError: no folder was named, and naming is not automatic.
        """
        folder, project = self._automatic(), self.project_configuration
        if folder is None and output_dir is None:
            raise ValueError("save_state() without output_dir: name a folder, or let naming be automatic.")
        path = Path(str(output_dir)) if folder is None else folder / f"{NAMED}{self.save_iteration}"

        def write(unfinished: Path) -> None:
            if folder is not None and exists(path) and not _is_damaged(path):
                raise FileExistsError(
                    f"{path} is there already. Set project_configuration.iteration to the next number."
                )
            if folder is None and self.is_main_process:
                _check_replaceable(path)
            project.automatic_checkpoint_naming = False
            try:
                super(CommittedSaves, self).save_state(
                    str(unfinished), safe_serialization, **save_model_func_kwargs
                )
            finally:
                project.automatic_checkpoint_naming = folder is not None

        iteration = project.iteration
        barrier = self._saves.meet(self.process_index, self.num_processes)
        try:
            # Beside a name that somebody has chosen there may be other jobs.
            alias = None if folder is not None else f"{UNFINISHED}.{path.name}"
            self._saves.save(barrier, path, write, alias=alias)
        except BaseException:
            project.iteration = iteration  # Theirs counts what was written, and not what was committed.
            raise
        if folder is not None and project.total_limit is not None and barrier.rank == 0:
            rotate(folder, NAMED, project.total_limit, {path})
        return str(path)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: object,
    ) -> None:
        """Accelerate's: all ranks load. Where names are automatic, the next save has the next number.

        Raises:
            BarrierError: not all ranks have come, or one cannot load it; the message names who.
            CorruptCheckpointError: the named checkpoint is damaged, or all are. All ranks raise it.
            UncommittedError: there is no committed checkpoint, or none of this name.
            ValueError: no folder was named, and naming is not automatic.
        """
        folder = self._automatic()
        if folder is None and input_dir is None:
            raise ValueError("load_state() without input_dir: name a folder, or let naming be automatic.")

        barrier = self._saves.meet(self.process_index, self.num_processes)
        automatic = folder is not None and input_dir is None
        if folder is not None and automatic:
            chosen = self._saves.choose(barrier, folder, partial(newest, folder, NAMED))
        else:
            chosen = self._saves.choose_named(barrier, Path(str(input_dir)).expanduser())
        marker = read(chosen)[1]
        super().load_state(str(chosen), load_kwargs, **load_model_func_kwargs)
        if read(chosen)[1] != marker:
            raise RuntimeError(f"{chosen} was replaced while it was loaded. Load it again, on all ranks.")
        if automatic:
            self.project_configuration.iteration = int(chosen.name.removeprefix(NAMED)) + 1

    def _automatic(self) -> Path | None:
        """Where checkpoints are that the accelerator names."""
        automatic = self.project_configuration.automatic_checkpoint_naming
        return _checkpoints(self.project_dir) if automatic else None


def _checkpoints(project_dir: str | Path) -> Path:
    """Where Accelerate puts checkpoints that it names."""
    return Path(project_dir) / "checkpoints"


def _is_damaged(path: Path) -> bool:
    """Return whether a checkpoint was found damaged. Then the next one of its number replaces it."""
    found = find(path)
    return found is not None and found.damage is not None


def _check_replaceable(path: Path) -> None:
    """See that a checkpoint would take nothing else's place: it takes that of the whole folder."""
    entries = [entry.name for entry in path.iterdir()] if is_folder(path) else []
    foreign = sorted(name for name in entries if name not in OURS and OWN.fullmatch(name) is None)
    if foreign:
        raise IsADirectoryError(
            f"{path} holds {foreign[0]}, which is no part of a checkpoint: what is committed takes the place "
            "of the whole folder. Name a folder for checkpoints alone."
        )
