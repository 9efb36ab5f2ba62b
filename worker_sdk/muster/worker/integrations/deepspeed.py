"""DeepSpeed's engine, with checkpoints that are committed by all ranks or by none.

Tried with DeepSpeed 0.19.8. Where the engine is another, the import fails and says so.
"""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast, get_args

from deepspeed import comm
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.damage import CorruptCheckpointError, Damage
from muster.checkpoint.directory import sync, sync_file, write_marker, write_synced
from muster.checkpoint.manifest import Manifest
from muster.worker.barriers import GrpcBarrier
from muster.worker.errors import MusterError
from muster.worker.integrations.commit.cleanup import sweep
from muster.worker.integrations.commit.commitment import (
    LAST_WORD,
    Commitment,
    OnLost,
    commit_written,
    is_own,
)
from muster.worker.integrations.commit.contents import gather_manifest, record_share, verify_share
from muster.worker.integrations.commit.lookup import (
    Marker,
    ReplacedError,
    corrupt,
    find,
    mark_damaged,
    newest,
    read,
    stamped,
)
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from muster.worker.saves.failure import failure_text
from muster.worker.saves.queue.queue import DEFAULT_TIMEOUT

__all__ = ["adopt", "commit_together"]

logger = logging.getLogger(__name__)

TRIED = "DeepSpeed 0.19.8"
PREFIX = "checkpoint/deepspeed"
"""The group that decides saves."""
LATEST = "latest"
"""The file in which DeepSpeed names the tag that it resumes from."""
DECOUPLED = "DecoupledCheckpointEngine"
"""The one checkpoint engine that writes after the save has returned, and for which DeepSpeed's step waits."""

E = TypeVar("E")
Loaded: TypeAlias = tuple[str | None, dict[str, Any] | None]
"""What DeepSpeed's load returns: a path, and the script's own state."""

_SIGNATURES = {
    "save_checkpoint": [
        "self", "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters",
    ],
    "load_checkpoint": [
        "self", "load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states",
        "load_module_only", "custom_load_fn",
    ],
    "_commit_decoupled_checkpoint": ["self"],
    "destroy": ["self"],
    "load_universal_checkpoint": ["self"],
    "use_node_local_storage": ["self"],
}  # fmt: skip
for _name, _parameters in _SIGNATURES.items():
    if list(inspect.signature(getattr(DeepSpeedEngine, _name, lambda: None)).parameters) != _parameters:
        raise ImportError(
            f"muster.worker.integrations.deepspeed was tried with {TRIED}; here DeepSpeedEngine.{_name} "
            "differs."
        )


def commit_together(
    engine: E,
    *,
    barrier: GrpcBarrier | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_lost: OnLost = "raise",
) -> E:
    """Let an engine commit its checkpoints by all ranks or by none.

    One line of a script is added, on all ranks::

        engine, *_ = deepspeed.initialize(...)
        engine = commit_together(engine)

    What ``save_checkpoint`` writes goes into a folder beside the tag's. When all ranks have written, rank 0
    gives it the tag's name and lets ``latest`` name it; a checkpoint of the same tag is replaced. If a rank
    fails, dies or does not come, all others hear who it was, and what was there before is still there, whole.
    ``load_checkpoint`` loads what was committed, and nothing else. All ranks must share the folder.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        barrier: decides the saves, and is for nothing else; default: one of group ``checkpoint/deepspeed``.
        timeout: seconds that a rank may take for its part of a save, and that it is waited for.
        on_lost: ``"abort"``: if a rank is lost or does not come in time, this process is aborted, since it
            may hang in a collective; default: the save raises, as far as it can.

    Returns:
        The same engine.

    Raises:
        ConnectError: the coordinator could not be reached.
        RefusedError: it refused this process.
        TypeError: it is no engine of DeepSpeed's for training.
        ValueError: it commits already, its ranks are not the barrier's, or its configuration leaves nothing
            that could be committed.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            f"{type(engine).__name__} is no DeepSpeedEngine: give the first thing that deepspeed.initialize "
            "returned."
        )
    theirs = cast("Any", engine)
    if isinstance(getattr(theirs.save_checkpoint, "__self__", None), _Saves):
        raise ValueError("this engine commits its checkpoints already: leave out one commit_together(…).")
    if on_lost not in get_args(OnLost):
        raise ValueError(f'on_lost = {on_lost!r}: it must be "raise" or "abort".')
    _check_configuration(theirs)
    rank, world_size = comm.get_rank(), comm.get_world_size()
    barrier = barrier or GrpcBarrier(rank, world_size, PREFIX)
    if (barrier.rank, barrier.world_size) != (rank, world_size):
        raise ValueError(
            f"this process is rank {rank} of {world_size} of DeepSpeed, and rank {barrier.rank} of "
            f"{barrier.world_size} of the barrier. Give a barrier of DeepSpeed's ranks, or none."
        )
    saves = _Saves(theirs, barrier, timeout, on_lost)
    for name in ("save_checkpoint", "load_checkpoint", "_commit_decoupled_checkpoint", "destroy"):
        setattr(theirs, name, getattr(saves, name))
    return cast("E", engine)


def adopt(path: str | os.PathLike[str]) -> None:
    """Take a checkpoint for committed that was saved without :func:`commit_together`.

    To be called once, by one process, of a checkpoint that is known to be whole.

    Args:
        path: of the tag's folder.

    Raises:
        FileNotFoundError: there is no checkpoint of DeepSpeed's.
        FileExistsError: it is committed.
    """
    path = Path(path)
    if not any(path.glob("*model_states.pt")):
        raise FileNotFoundError(f"{path} is no checkpoint of DeepSpeed's: it has no *model_states.pt.")
    with suppress(UncommittedError):
        raise FileExistsError(f"{path} is committed: {read(path)[1]}.")
    write_marker(path, asdict(stamped(Marker("adopted", 0, 0, PREFIX, 0), path.parent)))


def _check_configuration(engine: DeepSpeedEngine) -> None:
    if engine.use_node_local_storage():
        raise ValueError(
            "checkpoint.use_node_local_storage = true: each node would have a folder of its own, and no "
            "rename commits them all. Let all ranks share one."
        )
    writer = engine.checkpoint_engine
    if writer.is_decoupled() and (type(writer).__name__ != DECOUPLED or isinstance(engine, PipelineEngine)):
        raise ValueError(
            f"{type(engine).__name__} with {type(writer).__name__}: DeepSpeed does not wait there until its "
            f"writer has written. Take a {DECOUPLED} with a DeepSpeedEngine, or the default writer."
        )


@dataclass(frozen=True, slots=True)
class _Save:
    """One that is under way."""

    commitment: Commitment
    staged: StagedCheckpoint
    """The number in its name is rank 0's."""
    folder: Path
    tag: str
    save_latest: bool
    files: list[Path]
    """What this rank writes."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What rank 0 says of a save, before any rank writes."""

    tag: str
    number: int
    failure: str | None
    """Why it could not make room."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """What rank 0 says of a load."""

    tag: str | None
    """None: there is nothing to load."""
    error: Exception | None = None
    """Why all fail."""


_swept: set[Path] = set()
"""On rank 0, the folders in which what other lives have left was removed."""


class _Saves:
    """What an engine does otherwise whose checkpoints are committed."""

    def __init__(
        self, engine: DeepSpeedEngine, barrier: GrpcBarrier, timeout: float, on_lost: OnLost
    ) -> None:
        self._engine = engine
        self._save = engine.save_checkpoint
        self._load = engine.load_checkpoint
        self._commit_decoupled = engine._commit_decoupled_checkpoint
        self._destroy = engine.destroy
        self._barrier = barrier
        self._timeout = timeout
        self._on_lost = on_lost
        self._pending: _Save | None = None
        """One whose writers, which are decoupled, may still be at work."""
        self._failed: MusterError | None = None
        """Why this rank could not begin one of those. The others hear of it at their next step."""
        self._unfinished: StagedCheckpoint | None = None
        """On rank 0, the save that was begun last and not committed."""

    # ------------------------------------------------------------------ in place of the engine's

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's: all ranks save.

        Raises:
            BarrierError: not all have written, or rank 0 could not commit it; the message names who, and why.
            MusterError: a rank gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached.
            ValueError: there is no folder, or the tag is no name in it.
        """
        name = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        folder = Path(save_dir)
        _check_names(save_dir, name)
        self._end_decoupled()
        said = f"{self._engine.global_steps} {name}"
        commitment = Commitment(self._barrier, self._timeout, self._on_lost, name=said, parts=2)
        with _report_failure(commitment):
            staged = self._agree(commitment, folder, name)
        writer = self._engine.checkpoint_engine
        try:
            with _report_failure(commitment, self._leave), _watched(writer) as files:
                where = str(staged.unfinished.relative_to(folder))
                self._save(str(save_dir), where, client_state or {}, False, exclude_frozen_parameters)
        except MusterError as error:
            if writer.is_decoupled():
                self._failed = error
            raise
        save = _Save(commitment, staged, folder, name, save_latest, files)
        if writer.is_decoupled():
            self._pending = save
        else:
            self._finish(save)
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: object = None, *arguments: object, **options: object
    ) -> Loaded:
        """Load as DeepSpeed does, on all ranks, after each has verified a share.

        Raises:
            CorruptCheckpointError: the tag that was named is damaged, or all are. All ranks raise it.
            UncommittedError: it is no committed checkpoint.
            RuntimeError: it was replaced meanwhile, or a rank could not read it.
            OSError: rank 0 could not look for it.
        """
        if self._engine.load_universal_checkpoint():  # Made by a program, from what was committed.
            return cast("Loaded", self._load(load_dir, tag, *arguments, **options))
        self._end_decoupled()
        folder = Path(load_dir)
        damaged: dict[Path, Damage] = {}
        while True:
            choice = _from_rank_0(_choose(folder, tag, damaged) if self._barrier.rank == 0 else _Choice(None))
            if choice.error is not None:
                raise choice.error
            if choice.tag is None:
                logger.warning("%s is not there: nothing is loaded", folder / LATEST)
                return None, None
            found, marker = _find(folder / choice.tag)
            _check_same(folder / choice.tag, marker)
            assert isinstance(marker, Marker)
            damage = self._examine(found, marker)
            if damage is None:
                break
            damaged[found] = damage
        where = found.relative_to(folder) if found.is_relative_to(folder) else found
        loaded: Loaded = self._load(str(load_dir), str(where), *arguments, **options)
        _check_same(folder / choice.tag, _find(folder / choice.tag)[1], marker)
        return loaded

    def _examine(self, path: Path, marker: Marker) -> Damage | None:
        """Verify a checkpoint on all ranks.

        Returns:
            The damage that a rank found, if any. Then the checkpoint is marked.

        Raises:
            RuntimeError: a rank could not read it, or it was replaced meanwhile.
        """
        damage, failure = None, None
        rank, world_size = self._barrier.rank, self._barrier.world_size
        if marker.manifest is None and rank == 0:
            logger.warning("%s has no digests: it is loaded unverified", path)
        try:
            damage = verify_share(path, marker.manifest, rank, world_size)
            if damage is not None and read(path)[1] != marker:
                raise ReplacedError(path)
        except Exception as error:  # The others wait for this rank, whatever happens to it.
            logger.exception("%s cannot be verified", path)
            failure = failure_text(error)
        found: Damage | None = None
        for other, (theirs, why) in enumerate(_of_all((damage, failure))):
            if why is not None:
                raise RuntimeError(f"{path} cannot be loaded: rank {other} failed: {why}")
            found = found or theirs
        if found is not None and rank == 0:
            with suppress(ReplacedError):  # Whatever it is now, it is not loaded.
                mark_damaged(path, marker, found)
        return found

    def _commit_decoupled_checkpoint(self) -> None:
        """DeepSpeed's, before a step changes what is being written: wait until it is, and commit it."""
        save, self._pending = self._pending, None
        failed, self._failed = self._failed, None
        if save is None:
            self._commit_decoupled()
            if failed is not None:
                raise failed
            return
        with _report_failure(save.commitment):
            self._commit_decoupled()
        self._finish(save)

    def destroy(self) -> None:
        """DeepSpeed's; commits what was saved last, unless an exception is on its way."""
        try:
            if sys.exc_info()[0] is None:
                self._end_decoupled()
            elif self._pending is not None:
                self._pending.commitment.give_up()
        finally:
            self._destroy()

    # ------------------------------------------------------------------ a save

    def _agree(self, commitment: Commitment, folder: Path, tag: str) -> StagedCheckpoint:
        """Begin, on all ranks or on none.

        Raises:
            BarrierError: a rank cannot; the message names it, and why.
        """
        failure = self._make_room(folder / tag, commitment.number) if self._barrier.rank == 0 else None
        offer = _from_rank_0(_Offer(tag, commitment.number, failure))
        staged = StagedCheckpoint(folder / tag, self._barrier.generation, offer.number, self._barrier.run_id)
        if offer.tag != tag:
            failure = f"its tag is {tag!r}, and rank 0's is {offer.tag!r}: all ranks must give the same."
        elif offer.failure is None and not staged.unfinished.is_dir():
            failure = f"{staged.unfinished}, which rank 0 has made, is not there: all ranks must share it."
        if any(_of_all(failure is not None)):
            if failure is not None:
                commitment.failed(failure)
            commitment.give_up()
            raise commitment.ending(LAST_WORD) or MusterError(failure or "another rank cannot save.")
        return staged

    def _make_room(self, path: Path, number: int) -> str | None:
        """On rank 0: make the folder that all write to. Returns why that cannot be done."""
        try:
            if self._unfinished is not None:
                self._unfinished.give_up()
            if path.parent not in _swept:  # At first: another engine may be in the midst of a save there.
                sweep(path.parent)
                _swept.add(path.parent)
            self._unfinished = StagedCheckpoint(path, self._barrier.generation, number, self._barrier.run_id)
            self._unfinished.begin()
        except OSError as error:
            return failure_text(error)
        return None

    def _leave(self) -> None:
        """When this rank has failed to write: what DeepSpeed's save ends with, in which the others wait."""
        if hasattr(self._engine.optimizer, "checkpoint_event_epilogue"):
            self._engine.optimizer.checkpoint_event_epilogue()
        comm.barrier()

    def _end_decoupled(self) -> None:
        """Let what is being written come to its end, before another save, or a load, takes its place."""
        if self._engine.checkpoint_engine.is_decoupled():
            self._commit_decoupled_checkpoint()

    def _finish(self, save: _Save) -> None:
        """When this rank has written: commit it, on all ranks or on none."""
        with _report_failure(save.commitment):
            _put_on_disk(save.files)
        staged, ranks = save.staged, self._barrier.world_size

        def commit(marker: Marker, manifest: Manifest) -> None:
            staged.commit(marker, manifest)
            self._unfinished = None
            if save.save_latest:
                _let_latest_name(save.folder, save.tag)

        try:
            commit_written(
                save.commitment,
                partial(record_share, staged.unfinished, self._barrier.rank, ranks),
                partial(gather_manifest, staged.unfinished, ranks),
                commit,
                _report_failure,
            )
        except MusterError:
            save.commitment.give_up()
            raise


@contextmanager
def _report_failure(commitment: Commitment, leave: Callable[[], None] | None = None) -> Iterator[None]:
    """What is raised here is this rank's failure, and everyone's; or a collective's, so another rank's."""
    try:
        yield
    except MusterError:
        raise
    except Exception as error:
        if not is_own(error, commitment.rank):
            commitment.give_up()
        else:
            commitment.failed(failure_text(error))
            if leave is not None:
                with suppress(RuntimeError):  # The others may be gone.
                    leave()
        if (reason := commitment.ending(LAST_WORD)) is not None:
            raise reason from error
        raise
    except BaseException as error:
        commitment.failed(failure_text(error))
        raise


@contextmanager
def _watched(writer: CheckpointEngine) -> Iterator[list[Path]]:
    """Which files a checkpoint engine is given to write."""
    files: list[Path] = []
    theirs = writer.save

    def save(state_dict: object, path: str) -> object:
        files.append(Path(path))
        return theirs(state_dict, path)

    writer.save = save
    try:
        yield files
    finally:
        writer.save = theirs


def _put_on_disk(files: list[Path]) -> None:
    for file in files:
        # One of DeepSpeed's writers makes parts of it, "NAME-RANK.WRITERS".
        parts = [file] if file.exists() else list(file.parent.glob(f"{file.name}-*"))
        if not parts:
            raise FileNotFoundError(
                f"{file}, which this rank has written, is not there: another job has removed it."
            )
        for part in parts:
            sync_file(part)
    for folder in {file.parent for file in files}:
        sync(folder)


def _let_latest_name(folder: Path, tag: str) -> None:
    """On rank 0: this is what DeepSpeed resumes from by itself. At each moment it is this or the last one."""
    unfinished = folder / f".{LATEST}"
    write_synced(unfinished, tag.encode())
    unfinished.replace(folder / LATEST)
    sync(folder)


def _check_names(save_dir: object, tag: str) -> None:
    if not save_dir:
        raise ValueError(f"save_dir = {save_dir!r}: name a folder that all ranks share.")
    path = Path(tag)
    if path.is_absolute() or ".." in path.parts or path.name in ("", LATEST) or path.name.startswith("."):
        raise ValueError(
            f"tag = {tag!r}: it must be a name in save_dir, without a dot before it, and not {LATEST!r}."
        )


# ---------------------------------------------------------------------- a load


def _choose(folder: Path, tag: object, damaged: Mapping[Path, Damage]) -> _Choice:
    """Choose on rank 0 which tag is loaded.

    Args:
        folder: the folder of the checkpoints.
        tag: the tag that the script names; None: the one that ``latest`` names, or that was committed last.
        damaged: the checkpoints that were just found damaged.
    """
    try:
        if tag is not None:
            found = find(folder / str(tag))
            if found is not None and (damage := found.damage or damaged.get(found.path)) is not None:
                return _Choice(None, corrupt(found.path, damage))
            return _Choice(str(tag))
        try:
            named = (folder / LATEST).read_text().strip()
        except FileNotFoundError:
            return _Choice(None)
        found = find(folder / named)
        if found is not None and found.damage is None and found.path not in damaged:
            return _Choice(named)
        last = newest(folder, damaged.keys())
    except (OSError, ValueError, CorruptCheckpointError) as error:
        return _Choice(None, error)
    if last is not None:
        logger.warning("%s is passed over, since it is damaged or not committed; %s is loaded", named, last)
        return _Choice(last.name)
    if damaged:
        return _Choice(None, corrupt(*list(damaged.items())[-1]))
    _, why = _find(folder / named)
    return _Choice(None, UncommittedError(str(why)))


def _refusal(path: Path, error: Exception) -> str:
    return (
        f"{error} If it was saved before this job committed its checkpoints, and is known to be whole, say "
        f'so once: muster.worker.integrations.deepspeed.adopt("{path}").'
    )


def _find(path: Path) -> tuple[Path, Marker | str]:
    """Where a checkpoint is, and what it is, or why it was not committed."""
    try:
        return read(path)
    except (UncommittedError, OSError) as error:
        return path, _refusal(path, error)


def _check_same(path: Path, *found: Marker | str) -> None:
    """All ranks go on, or none.

    Raises:
        UncommittedError: what is there is not committed.
        RuntimeError: the ranks have found different saves, or one after the other.
    """
    by_rank = _of_all(found)
    every = [one for rank in by_rank for one in rank]
    for one in every:
        if isinstance(one, str):
            raise UncommittedError(one)
    if len(set(every)) > 1:
        raise RuntimeError(f"{path} was replaced while it was loaded. Load it again, on all ranks.")


# ---------------------------------------------------------------------- what ranks tell one another

T = TypeVar("T")


def _from_rank_0(said: T) -> T:
    words = [said]
    comm.broadcast_object_list(words, src=0)
    return words[0]


def _of_all(said: T) -> list[T]:
    words: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(words, said)
    return words
