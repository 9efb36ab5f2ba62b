"""``torch.distributed.checkpoint``, committed by all ranks or by none: a storage writer and its reader.

Tried with torch 2.13. Where the writer that it builds on is another, the import fails and says so.
"""

import inspect
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from muster.checkpoint.committed import Committed
from muster.checkpoint.damage import DamageError
from muster.checkpoint.retry import is_file, lexists
from muster.checkpoint.source import FolderSource
from muster.checkpoint.verification import check_present
from muster.worker.barriers import GrpcBarrier
from muster.worker.integrations.commit.agreed import agree_on_newest
from muster.worker.integrations.commit.commitment import (
    Commitment,
    OnLost,
    check_save_settings,
    report_failure,
)
from muster.worker.integrations.commit.contents import leave_note, take_notes
from muster.worker.integrations.commit.lookup import (
    Marker,
    ReplacedError,
    corrupt,
    find,
    latest,
    mark_damaged,
    newest,
    read,
    read_whole,
)
from muster.worker.integrations.commit.numbered import rotate
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint, check_name
from muster.worker.saves.job_barrier import job_barrier
from muster.worker.saves.queue.groups import Group
from muster.worker.saves.queue.queue import DEFAULT_TIMEOUT
from muster.worker.saves.storage.digesting import DigestingFiles
from muster.worker.saves.storage.rank_write import METADATA, RankWrite, manifest_of
from muster.worker.saves.storage.reading import ItemReader, open_checkpoint
from muster.worker.saves.storage.written import check_files

__all__ = ["CommittedReader", "CommittedWriter", "agreed_latest", "latest", "rotate"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIED = "torch 2.13"
PREFIX = "checkpoint/dcp"
"""The group that decides saves."""

if "overwrite" not in inspect.signature(FileSystemWriter.__init__).parameters:
    raise ImportError(
        f"muster.worker.integrations.checkpoint was tried with {TRIED}; here torch's writer differs."
    )


@dataclass(frozen=True, slots=True)
class _Save:
    """One that is under way."""

    barrier: GrpcBarrier
    commitment: Commitment
    staged: StagedCheckpoint
    """Rank 0's counts: all write to the folder that its plan names."""
    dropped: "weakref.finalize[..., CommittedWriter]"
    """Called when nobody holds the writer any more: torch tells it nothing of a collective that fails."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank writes, in its plan."""

    prefix: str
    """The prefix of its files; torch's writer reads it."""
    folder: str


_unfinished: dict[Group, StagedCheckpoint] = {}
"""On rank 0, by group, the save that was begun last and not committed."""


def agreed_latest(folder: str | Path, *, barrier: GrpcBarrier | None = None) -> Path | None:
    """Return what :func:`latest` does, the same on all ranks. All ranks must call it.

    Its errors are those of :func:`muster.worker.integrations.commit.agreed.agree_on_newest`.

    Args:
        folder: where checkpoints have their names.
        barrier: of all ranks, and for nothing else; default: one made from the environment.

    Returns:
        None if no rank finds a checkpoint.
    """
    return agree_on_newest(Path(folder), partial(newest, Path(folder)), barrier)


class CommittedWriter(FileSystemWriter):
    """Writes checkpoints that have their name when all ranks have written, and not before.

    One argument of a script changes::

        dcp.save(state, storage_writer=CommittedWriter("/checkpoints/step-100"))

    What the ranks write goes into a folder beside it. When all have written, rank 0 gives it its name by one
    rename; a checkpoint of the same name is replaced. If a rank fails, dies or does not come, all others
    hear who it was, and what was there before is still there, whole. All ranks must share the folder.

    Args:
        path: the checkpoint's name.
        barrier: decides the saves, and is for nothing else; default: one of group ``checkpoint/dcp``, taken
            from the environment when the first save begins.
        timeout: seconds that a rank may take for its part of a save, and that it is waited for.
        on_lost: ``"abort"``: if a rank is lost or does not come in time, this process is aborted, since it
            may hang in a collective; default: the save raises, as far as it can.
        **options: those of torch's ``FileSystemWriter``.

    Raises:
        TypeError: an option is not torch's.
        ValueError: ``sync_files=False``: what is committed must be on the disk. Or the timeout is not a
            finite number above 0, or ``on_lost`` is neither of its values.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        barrier: GrpcBarrier | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        on_lost: OnLost = "raise",
        **options: object,
    ) -> None:
        check_save_settings(timeout, on_lost)
        super().__init__(path, **options)  # type: ignore[arg-type]
        if not self.sync_files:
            raise ValueError("sync_files=False: what is committed must be on the disk. Leave it out.")
        self.sync_files = False
        """Always False: torch syncs metadata before it is flushed. :attr:`fs` syncs every file instead."""
        self._files = DigestingFiles()
        self.fs = self._files
        """The file system that digests and syncs what is written."""
        self._name = Path(path)
        self._barrier = barrier
        self._prefix = PREFIX
        self._timeout = timeout
        self._on_lost = on_lost
        self._save: _Save | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For ``async_save`` in another process, which makes a barrier of its own."""
        if self._barrier is not None:
            raise TypeError("a writer with a barrier of its own cannot go to another process: leave it out.")
        return vars(self) | {"_save": None, "_prefix": f"{PREFIX}-process"}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Torch's: write another checkpoint."""
        # Another save may be under way in another thread: where it writes stays as it is.
        super().reset()
        if checkpoint_id:
            self._name = Path(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The checkpoint's name, also while it is written elsewhere."""
        return self._name

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Torch's: a save begins.

        Raises:
            ConnectError: the coordinator could not be reached.
            RefusedError: it refused this process.
            ValueError: torch's ranks are not the barrier's, or the save is to make no collectives.
        """
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not self.use_collectives:
            raise ValueError("use_collectives=False: without a plan of all ranks there is nothing to commit.")
        barrier = self._barrier or job_barrier(self._prefix)
        if (barrier.rank == 0) != is_coordinator:
            raise ValueError(
                f"this process is rank {barrier.rank} of the barrier, and "
                f"{'leads' if is_coordinator else 'does not lead'} torch's save. Give a barrier of the ranks "
                "of its process group: CommittedWriter(…, barrier=GrpcBarrier(…))."
            )
        commitment = Commitment(barrier, self._timeout, self._on_lost, name=self._name.name)
        if self._save is not None:
            self._save.dropped.detach()
        dropped = weakref.finalize(self, commitment.give_up)
        dropped.atexit = False
        staged = StagedCheckpoint(self._name, barrier.generation, commitment.number, barrier.run_id)
        self.fs = self._files = DigestingFiles()
        self._save = _Save(barrier, commitment, staged, dropped)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Torch's; says which checkpoint this rank saves. Rank 0 makes the folder."""
        return replace(plan, storage_data=self._name.name)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Torch's, on rank 0: say where all write.

        Raises:
            FileExistsError: there is a checkpoint of this name, and it is not to be replaced.
            IsADirectoryError: the name is that of a folder of something else.
            OSError: the folder cannot be made.
            ValueError: the ranks save different checkpoints.
        """
        assert self._save is not None
        staged, group = self._save.staged, Group.of(self._save.barrier)
        with report_failure(self._save.commitment):
            _check_same(self._name.name, plans)
            if not self.overwrite and (find(self._name) is not None or lexists(self._name / METADATA)):
                raise FileExistsError(f"Checkpoint already exists and {self.overwrite=}: {self._name}.")
            if is_file(self._name):
                raise NotADirectoryError(f"{self._name} is a file: it is not replaced. Name another.")
            check_name(self._name)
            if group in _unfinished:
                with suppress(OSError):
                    _unfinished.pop(group).give_up()
            _unfinished[group] = staged
            staged.begin()
            return [
                replace(plan, storage_data=_Place(plan.storage_data.prefix, str(staged.unfinished)))
                for plan in super().prepare_global_plan([replace(plan, storage_data=None) for plan in plans])
            ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Torch's: write this rank's part, and wait until all have written theirs.

        Raises:
            BarrierError: a rank has not; the message names it.
            MusterError: a rank gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached.
        """
        assert self._save is not None
        with report_failure(self._save.commitment):
            self.path = Path(plan.storage_data.folder)
            began = time.monotonic()
            written = super().write_data(plan, planner)
            wrote = self._wrote(plan, written.wait(), time.monotonic() - began)
            leave_note(self.path, self._save.barrier.rank, wrote.encode())
        self._save.commitment.written(wrote.size)
        return written

    def _wrote(self, plan: SavePlan, results: list[WriteResult], seconds: float) -> RankWrite:
        """Describe what this rank has written, without the results: torch gathers these.

        Raises:
            OSError: a part was not written. Torch does not say why if one of several threads has failed.
        """
        if missing := {item.index for item in plan.items} - {result.index for result in results}:
            names = ", ".join(sorted({index.fqn for index in missing}))
            raise OSError(f"{names} was not written: a thread of torch's writer has failed. See its log.")
        if self.serialization_format is SerializationFormat.TORCH_SAVE:
            wrote = RankWrite.of(results, self._files.written, seconds)
        else:  # Items of other formats are not written one by one; the file is verified as a whole.
            wrote = RankWrite([], dict(self._files.written), socket.gethostname(), seconds)
        return replace(wrote, results=[])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Torch's, on rank 0: write the metadata, and give the checkpoint its name."""
        assert self._save is not None
        barrier, staged = self._save.barrier, self._save.staged
        with report_failure(self._save.commitment):
            ranks = barrier.participants or range(barrier.world_size)
            writes = [RankWrite.decode(note) for note in take_notes(staged.unfinished, ranks)]
            super().finish(metadata, results)
            manifest = manifest_of(writes, self._files.written[METADATA])
            check_files(staged.unfinished, {name: entry.size for name, entry in manifest.files.items()})
            self._save.commitment.commit(lambda marker: staged.commit(marker, manifest))
            _unfinished.pop(Group.of(barrier), None)


def _check_same(name: str, plans: list[SavePlan]) -> None:
    """Raises: ValueError: torch's collectives have let different saves meet, whose parts would be mixed."""
    for rank, plan in enumerate(plans):
        if plan.storage_data not in (None, name):
            raise ValueError(
                f"rank 0 saves {name!r}, and rank {rank} {plan.storage_data!r}. Make the same saves in the "
                "same order on all ranks, and restart the job."
            )


class CommittedReader(ItemReader):
    """Reads what a :class:`CommittedWriter` or a ``Checkpointer`` has committed, and nothing else.

    One argument of a script changes::

        dcp.load(state, storage_reader=CommittedReader("/checkpoints/step-100"))

    Each rank verifies what it loads, item by item. If one finds damage, the load fails on all ranks, and the
    checkpoint is marked, so that ``latest`` passes it over. The state may then hold damaged parts.

    Args:
        path: the checkpoint's name.
        **options: those of torch's ``FileSystemReader``.
    """

    def __init__(self, path: str | os.PathLike[str], **options: object) -> None:
        super().__init__(path, **options)
        self._name = Path(path)
        self._marker: Marker | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Torch's: read another checkpoint."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._name = Path(checkpoint_id)

    def read_metadata(self, *args: object, **options: object) -> Metadata:
        """Torch's, which makes one error of whatever this raises.

        It asks for the metadata of one rank alone after a failure, if it finds the name ``kwargs`` here.

        Raises:
            CorruptCheckpointError: it is damaged.
            UncommittedError: there is no committed checkpoint of this name.
            OSError: it cannot be read.
        """
        try:
            return self._read_metadata(*args, **options)
        except Exception as error:
            # The error that torch makes of it is "metadata is None" in torch 2.9 and 2.10.
            logger.warning("%s is not loaded: %s", self._name, error)
            raise

    def _read_metadata(self, *args: object, **options: object) -> Metadata:
        self.path, marker = read_whole(self._name)
        self._marker = marker
        made = Committed(
            0,
            marker.world_size,
            marker.run_id,
            marker.prefix,
            marker.sequence,
            self.path,
            manifest=marker.manifest,
        )
        source = FolderSource(self.path)
        self.opened = self._verified(lambda: open_checkpoint(made, source, verify=True, sizes=False))
        return super().read_metadata(*args, **options)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Torch's; says which save this rank has found under the name."""
        return replace(plan, storage_data=self._marker)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Torch's, on rank 0.

        Raises:
            CorruptCheckpointError: a file is missing, or has another size.
            ReplacedError: the ranks have found different saves.
            OSError: the files cannot be listed.
        """
        self._check(plan.storage_data for plan in plans)
        manifest, source = self._of.manifest, self._of.source
        if manifest is None:
            logger.warning("%s has no digests: it is loaded unverified", self.path)
        else:
            self._verified(lambda: check_present(source, manifest))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Torch's.

        Raises:
            CorruptCheckpointError: an item is not what was committed.
            ReplacedError: the checkpoint was replaced meanwhile.
            UncommittedError: it was removed.
            OSError: it cannot be read.
        """
        read_data = super().read_data
        done = self._verified(lambda: read_data(plan, planner))
        done.wait()
        self._check([read(self._name)[1]])
        return done

    def _verified(self, load: Callable[[], T]) -> T:
        """Read something. If it is damaged, mark the checkpoint.

        Raises:
            CorruptCheckpointError: it is damaged.
            ReplacedError: another checkpoint has its name now.
        """
        assert self._marker is not None
        try:
            return load()
        except DamageError as error:
            rank = dist.get_rank() if dist.is_initialized() else 0
            damage = replace(error.damage, rank=rank, host=socket.gethostname())
            mark_damaged(Path(self.path), self._marker, damage)
            raise corrupt(Path(self.path), damage) from error

    def _check(self, found: Iterable[Marker | None]) -> None:
        if any(marker != self._marker for marker in found):
            raise ReplacedError(self._name)
