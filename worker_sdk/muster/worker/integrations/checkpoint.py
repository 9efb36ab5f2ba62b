"""``torch.distributed.checkpoint``, committed by all ranks or by none: a storage writer and its reader.

Tried with torch 2.13. Where the writer that it builds on is another, the import fails and says so.
"""

import inspect
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision
from muster.worker.integrations.aside import Aside, Marker, check_name, latest, read
from muster.worker.integrations.commitment import Commitment, OnLost
from muster.worker.saves.failure import failure_text
from muster.worker.saves.groups import Group
from muster.worker.saves.queue import DEFAULT_TIMEOUT
from muster.worker.saves.written import check_files, lengths

__all__ = ["CommittedReader", "CommittedWriter", "latest"]

TRIED = "torch 2.13"
PREFIX = "checkpoint/dcp"
"""The group by whose barriers saves are decided."""

if "overwrite" not in inspect.signature(FileSystemWriter.__init__).parameters:
    raise ImportError(
        f"muster.worker.integrations.checkpoint was tried with {TRIED}; here torch's writer differs."
    )


@dataclass(frozen=True, slots=True)
class _Save:
    """One that is under way."""

    barrier: GrpcBarrier
    commitment: Commitment
    aside: Aside
    """Rank 0's counts: all write to the folder that its plan names."""
    dropped: "weakref.finalize[..., CommittedWriter]"
    """Called when nobody holds the writer any more: torch tells it nothing of a collective that fails."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank writes, in its plan."""

    prefix: str
    """Of its files; torch's writer reads it."""
    folder: str


_unfinished: dict[Group, Aside] = {}
"""On rank 0, by group, the save that was begun last and not committed."""


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
        ValueError: ``sync_files=False``: what is committed must be on the disk.
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
        super().__init__(path, **options)  # type: ignore[arg-type]
        if not self.sync_files:
            raise ValueError("sync_files=False: what is committed must be on the disk. Leave it out.")
        self._name = Path(path)
        self._barrier = barrier
        self._prefix = PREFIX
        self._timeout = timeout
        self._on_lost = on_lost
        self._save: _Save | None = None
        self._decision: Decision | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For ``async_save`` in another process, which makes a barrier of its own."""
        if self._barrier is not None:
            raise TypeError("a writer with a barrier of its own cannot go to another process: leave it out.")
        return vars(self) | {"_save": None, "_decision": None, "_prefix": f"{PREFIX}-process"}

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
        barrier = self._barrier or GrpcBarrier(barrier_prefix=self._prefix)
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
        aside = Aside(self._name, barrier.generation, commitment.number)
        self._save = _Save(barrier, commitment, aside, dropped)

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
        aside, group = self._save.aside, Group.of(self._save.barrier)
        with _told(self._save.commitment):
            _check_same(self._name.name, plans)
            if not self.overwrite and os.path.lexists(self._name):
                raise FileExistsError(f"{self._name} is there, and overwrite=False.")
            check_name(self._name)
            if group in _unfinished:
                with suppress(OSError):
                    _unfinished.pop(group).give_up()
            _unfinished[group] = aside
            aside.begin()
            return [
                replace(plan, storage_data=_Place(plan.storage_data.prefix, str(aside.unfinished)))
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
        with _told(self._save.commitment):
            self.path = Path(plan.storage_data.folder)
            written = super().write_data(plan, planner)
            written.wait()
        self._decision = self._save.commitment.written()
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Torch's, on rank 0: write the metadata, and give the checkpoint its name."""
        assert self._save is not None
        assert self._decision is not None
        barrier, aside, decision = self._save.barrier, self._save.aside, self._decision
        with _told(self._save.commitment):
            check_files(aside.unfinished, lengths(results))
            super().finish(metadata, results)
            self._save.commitment.claim()
            aside.commit(
                Marker(
                    barrier.run_id, barrier.generation, barrier.world_size, decision.prefix, decision.sequence
                )
            )
            _unfinished.pop(Group.of(barrier), None)
            self._save.commitment.committed()


def _check_same(name: str, plans: list[SavePlan]) -> None:
    """Raises: ValueError: torch's collectives have let different saves meet, whose parts would be mixed."""
    for rank, plan in enumerate(plans):
        if plan.storage_data not in (None, name):
            raise ValueError(
                f"rank 0 saves {name!r}, and rank {rank} {plan.storage_data!r}. Make the same saves in the "
                "same order on all ranks, and restart the job."
            )


@contextmanager
def _told(commitment: Commitment) -> Iterator[None]:
    """What is raised here is this rank's failure, and everyone's."""
    try:
        yield
    except BaseException as error:
        commitment.failed(failure_text(error))
        raise


class CommittedReader(FileSystemReader):
    """Reads what a :class:`CommittedWriter` has committed, and nothing else.

    One argument of a script changes::

        dcp.load(state, storage_reader=CommittedReader("/checkpoints/step-100"))

    Args:
        path: the checkpoint's name.
        **options: those of torch's ``FileSystemReader``.
    """

    def __init__(self, path: str | os.PathLike[str], **options: object) -> None:
        super().__init__(path, **options)  # type: ignore[arg-type]
        self._name = Path(path)
        self._marker: Marker | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Torch's: read another checkpoint."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._name = Path(checkpoint_id)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Torch's.

        Raises:
            UncommittedError: there is no committed checkpoint of this name.
        """
        self.path, self._marker = read(self._name)
        return super().read_metadata(*args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Torch's; says which save this rank has found under the name."""
        return replace(plan, storage_data=self._marker)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Torch's, on rank 0.

        Raises:
            RuntimeError: the ranks have found different saves.
        """
        self._check(plan.storage_data for plan in plans)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Torch's.

        Raises:
            RuntimeError: the checkpoint was replaced meanwhile.
            UncommittedError: it was removed.
        """
        done = super().read_data(plan, planner)
        done.wait()
        self._check([read(self._name)[1]])
        return done

    def _check(self, found: Iterable[Marker | None]) -> None:
        if any(marker != self._marker for marker in found):
            raise RuntimeError(f"{self._name} was replaced while it was loaded. Load it again, on all ranks.")
