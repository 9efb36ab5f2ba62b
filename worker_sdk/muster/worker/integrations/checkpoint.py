"""``torch.distributed.checkpoint``, committed by all ranks or by none: a storage writer and its reader.

Tried with torch 2.13. Where the writer that it builds on is another, the import fails and says so.
"""

import inspect
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision
from muster.worker.integrations.aside import Aside, Marker, committed, latest
from muster.worker.integrations.commitment import Commitment, OnLost
from muster.worker.saves.failure import failure_text
from muster.worker.saves.queue import DEFAULT_TIMEOUT
from muster.worker.saves.written import check_files

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
    dropped: "weakref.finalize[..., CommittedWriter]"
    """Called when nobody holds the writer any more: torch tells it nothing of a collective that fails."""


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
        timeout: seconds that ranks may wait for each other, at each moment of a save.
        on_lost: ``"abort"``: if a rank is lost or does not come in time, this process is aborted, since it
            may hang in a collective; default: the save raises, as far as it can.
        **options: those of torch's ``FileSystemWriter``.

    Raises:
        TypeError: an option is not torch's.
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
        self._name = Path(path)
        self._barrier = barrier
        self._timeout = timeout
        self._on_lost = on_lost
        self._save: _Save | None = None
        self._decision: Decision | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For ``async_save`` in another process, which makes a barrier of its own."""
        if self._barrier is not None:
            raise TypeError("a writer with a barrier of its own cannot go to another process: leave it out.")
        return vars(self) | {"_save": None, "_decision": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Torch's: write another checkpoint."""
        super().reset(checkpoint_id)
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
            FileExistsError: there is a checkpoint of this name, and it is not to be replaced.
            RefusedError: it refused this process.
            ValueError: torch's ranks are not the barrier's, or the save is to make no collectives.
        """
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not self.use_collectives:
            raise ValueError("use_collectives=False: without a plan of all ranks there is nothing to commit.")
        barrier = self._barrier or GrpcBarrier(barrier_prefix=PREFIX)
        if (barrier.rank == 0) != is_coordinator:
            raise ValueError(
                f"this process is rank {barrier.rank} of the barrier, and "
                f"{'leads' if is_coordinator else 'does not lead'} torch's save. Give a barrier of the ranks "
                "of its process group: CommittedWriter(…, barrier=GrpcBarrier(…))."
            )
        commitment = Commitment(barrier, self._timeout, self._on_lost)
        if self._save is not None:
            self._save.dropped.detach()
        dropped = weakref.finalize(self, commitment.give_up)
        dropped.atexit = False
        aside = Aside(self._name, barrier.generation, commitment.number)
        self._save = _Save(barrier, commitment, aside, dropped)
        with _told(commitment):
            if not self.overwrite and os.path.lexists(self._name):
                raise FileExistsError(f"{self._name} is there, and overwrite=False.")
            if is_coordinator:
                aside.begin()
        self.path = aside.unfinished

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Torch's: write this rank's part, and wait until all have written theirs.

        Raises:
            BarrierError: a rank has not; the message names it.
            MusterError: a rank gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached.
        """
        assert self._save is not None
        with _told(self._save.commitment):
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
            check_files(aside.unfinished, results)
            super().finish(metadata, results)
            aside.commit(
                Marker(
                    barrier.run_id, barrier.generation, barrier.world_size, decision.prefix, decision.sequence
                )
            )
        self._save.commitment.committed()


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

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Torch's.

        Raises:
            UncommittedError: there is no committed checkpoint of this name.
        """
        self.path = committed(Path(self.path))
        return super().read_metadata(*args, **kwargs)
