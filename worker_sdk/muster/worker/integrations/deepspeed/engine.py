"""An engine of DeepSpeed that commits its checkpoints by all ranks or by none."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

from deepspeed import comm
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from muster.checkpoint.damage import Damage
from muster.checkpoint.directory import sync, sync_file, write_synced
from muster.checkpoint.manifest import Manifest
from muster.checkpoint.version import LaterVersionError
from muster.worker.barriers import GrpcBarrier
from muster.worker.errors import MusterError
from muster.worker.integrations.commit.cleanup import sweep
from muster.worker.integrations.commit.commitment import (
    Commitment,
    ElsewhereError,
    OnLost,
    commit_written,
    report_failure,
)
from muster.worker.integrations.commit.contents import gather_manifest, record_share, verify_share
from muster.worker.integrations.commit.lookup import Marker, ReplacedError, mark_damaged, read
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from muster.worker.integrations.deepspeed.ranks import from_rank_0, of_all
from muster.worker.integrations.deepspeed.tags import (
    LATEST,
    Choice,
    check_none,
    check_same,
    choose,
    find_tag,
)
from muster.worker.saves.failure import failure_text

logger = logging.getLogger(__name__)

Loaded: TypeAlias = tuple[str | None, dict[str, Any] | None]
"""What DeepSpeed's load returns: a path, and the script's own state."""


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
    has_room: bool
    """Whether it has made the folder."""


_swept: set[Path] = set()
"""On rank 0, the folders in which what other lives have left was removed."""


class EngineSaves:
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
        with report_failure(commitment, same_error=True):
            staged = self._agree(commitment, folder, name)
        writer = self._engine.checkpoint_engine
        try:
            with report_failure(commitment, self._leave, same_error=True), _watched(writer) as files:
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
            RuntimeError: it was replaced meanwhile, a rank could not read it, or rank 0 does not find what
                another rank finds.
            OSError: rank 0 could not look for it.
        """
        if self._engine.load_universal_checkpoint():  # Made by a program, from what was committed.
            return cast("Loaded", self._load(load_dir, tag, *arguments, **options))
        self._end_decoupled()
        folder = Path(load_dir)
        damaged: dict[Path, Damage] = {}
        while True:
            choice = from_rank_0(choose(folder, tag, damaged) if self._barrier.rank == 0 else Choice(None))
            if choice.error is not None:
                raise choice.error
            if choice.tag is None:
                check_none(folder, self._barrier.rank)
                logger.warning("%s is not there, and no checkpoint: nothing is loaded", folder / LATEST)
                return None, None
            found, marker = find_tag(folder / choice.tag)
            check_same(folder / choice.tag, marker)
            assert isinstance(marker, Marker)
            damage = self._examine(found, marker)
            if damage is None:
                break
            damaged[found] = damage
        where = found.relative_to(folder) if found.is_relative_to(folder) else found
        loaded: Loaded = self._load(str(load_dir), str(where), *arguments, **options)
        check_same(folder / choice.tag, find_tag(folder / choice.tag)[1], marker)
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
        for other, (theirs, why) in enumerate(of_all((damage, failure))):
            if why is not None:
                raise RuntimeError(f"{path} cannot be loaded: rank {other} failed: {why}")
            found = found or theirs
        if found is not None and rank == 0:
            with suppress(ReplacedError, LaterVersionError):  # Whatever it is now, it is not loaded.
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
        with report_failure(save.commitment, same_error=True):
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
            ElsewhereError: another rank cannot.
            Exception: this rank cannot.
        """
        failure = self._make_room(folder / tag, commitment.number) if self._barrier.rank == 0 else None
        offer = from_rank_0(_Offer(tag, commitment.number, failure is None))
        staged = StagedCheckpoint(folder / tag, self._barrier.generation, offer.number, self._barrier.run_id)
        if offer.tag != tag:
            failure = ValueError(
                f"its tag is {tag!r}, and rank 0's is {offer.tag!r}: all ranks must give the same."
            )
        elif offer.has_room and not staged.unfinished.is_dir():
            failure = FileNotFoundError(
                f"{staged.unfinished}, which rank 0 has made, is not there: all ranks must share it."
            )
        if any(of_all(failure is not None)):
            raise failure or ElsewhereError("another rank cannot save. Its own error says why.")
        return staged

    def _make_room(self, path: Path, number: int) -> Exception | None:
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
            return error
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
        with report_failure(save.commitment, same_error=True):
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
                same_error=True,
            )
        except MusterError:
            save.commitment.give_up()
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
