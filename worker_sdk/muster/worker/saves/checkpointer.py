"""Checkpoints of a distributed state, written aside and committed by every rank or by none.

Planning, serialisation and resharding are torch's (``torch.distributed.checkpoint``). Plans are made together
in the training process; each rank's part is written in its child; when all have written, rank 0 commits.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import WriteResult

from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision
from muster.worker.errors import AsyncSaveError
from muster.worker.saves.directory import CheckpointDirectory, Committed, Life, sync
from muster.worker.saves.failure import failure_text
from muster.worker.saves.queue import DEFAULT_TIMEOUT, AsyncCallsQueue, SaveTimings
from muster.worker.saves.request import PREFIX, AsyncRequest
from muster.worker.saves.staging import HostBuffers, check_memory, survives_fork, tensors_of


@dataclass(frozen=True, slots=True)
class _Plan:
    """What this rank writes, and (on rank 0) what all write."""

    local: SavePlan
    """As this rank proposed it: while it stays the same on every rank, so does the plan."""
    final: SavePlan
    metadata: Metadata | None


class Checkpointer:
    """Saves and loads the checkpoints of a job in one folder that all ranks share.

    Args:
        folder: where the checkpoints go.
        keep_last: how many committed ones to keep; default: all.
        copy: copy the whole state to buffers of its own before the fork. Default: only if one of its tensors
            is on a GPU, in shared memory or pinned; else it is shared with the child, and copied page by page
            as training changes it.
        barrier: decides the saves; default: one of group ``save``, taken from the environment.
        timeout: seconds for one save.
        on_saved: called with the timings of each save that was committed.

    Raises:
        ConnectError: the coordinator could not be reached.
        RefusedError: it refused this process.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int | None = None,
        copy: bool = False,
        barrier: GrpcBarrier | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        on_saved: Callable[[SaveTimings], None] | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last = {keep_last}: it must be above 0, or None to keep all.")
        self._directory = CheckpointDirectory(Path(folder))
        self._keep_last = keep_last
        self._copy = copy
        self._barrier = barrier or GrpcBarrier(barrier_prefix=PREFIX)
        self._queue = AsyncCallsQueue(barrier=self._barrier, timeout=timeout, on_saved=on_saved)
        self._buffers = HostBuffers()
        self._plan: _Plan | None = None
        self._steps: dict[int, int] = {}
        """By the number of the queue's call: steps that are not finalized."""
        if self._leads:
            self._directory.sweep(keep_last)

    @property
    def _leads(self) -> bool:
        return self._barrier.rank == 0

    # ------------------------------------------------------------------ saving

    def save(self, step: int, state_dict: dict[str, Any]) -> None:
        """Begin to save the state as it is now; all ranks must call it. Training goes on meanwhile.

        Args:
            step: the step's number, from 0.
            state_dict: what :func:`torch.distributed.checkpoint.save` takes.

        Raises:
            ValueError: the step is negative, committed already, or under way.
            MemoryError: there is not enough free memory for the copy.
            MusterError: it is closed.
        """
        self._queue.check_open()
        if step < 0:
            raise ValueError(f"step = {step}: it must not be negative.")
        path = self._directory.path(step)
        if path.exists():
            raise ValueError(f"step {step} is committed already, as {path}. Save another step, or remove it.")
        if step in self._steps.values():
            raise ValueError(f"step {step} is being saved already, or not finalized. Save another step.")
        # The order of saves is the same on all ranks, so that the name is the same too, and nobody else's.
        life = Life(self._barrier.generation, self._queue.next_idx)
        unfinished = self._directory.unfinished(step, life)
        release, failed = None, None
        try:
            tensors = tensors_of(state_dict)
            if self._copy or not all(survives_fork(tensor) for tensor in tensors):
                held = self._buffers.stage(state_dict)
                state_dict, release = held.state, held.release
            else:
                # Training may change all of it before the child has ended, and so have all of it copied.
                check_memory(tensors)
        except Exception as error:
            failed = error
        if not _all_ranks(failed is None):
            # All ranks leave out the plan, which they make together, and count the save as failed.
            why = failure_text(failed) if failed is not None else "another rank could not copy its state"
            self._steps[life.number] = step
            self._queue.schedule_failure(why, release)
            if failed is not None:
                raise failed
            return
        writer = FileSystemWriter(unfinished, single_file_per_rank=True, sync_files=True)
        planner = DefaultSavePlanner()
        plan = self._make_plan(writer, planner, state_dict)

        def write() -> None:
            # Nobody reads these checksums (torch neither), and they take as long as all the rest.
            torch.serialization.set_crc32_options(False)
            unfinished.mkdir(exist_ok=True)
            results = writer.write_data(plan.final, planner).wait()
            _keep_results(unfinished, self._barrier.rank, results)

        def commit(decision: Decision) -> None:
            if self._leads:
                self._commit(step, unfinished, writer, plan, decision)

        def clean() -> None:
            if self._leads:
                self._directory.sweep(self._keep_last, life)

        self._steps[life.number] = step
        self._queue.schedule_async_request(
            AsyncRequest(write, (), []), on_written=release, commit=commit, on_decided=clean
        )

    def _make_plan(
        self, writer: FileSystemWriter, planner: DefaultSavePlanner, state_dict: dict[str, Any]
    ) -> _Plan:
        """Torch's plan for the state; that of the last save, if nothing has changed on any rank."""
        planner.set_up_planner(state_dict, writer.storage_meta(), self._leads)
        writer.set_up_storage_writer(self._leads)
        local = writer.prepare_local_plan(planner.create_local_plan())
        last = self._plan
        if last is not None and _all_ranks(last.local == local):
            planner.finish_plan(last.final)
            return last
        metadata = None
        plans = _gather(local)
        shares: list[SavePlan] | None = None
        if plans is not None:
            shares, metadata = planner.create_global_plan(plans)
            shares = writer.prepare_global_plan(shares)
        final = planner.finish_plan(_scatter(shares))
        self._plan = _Plan(local, final, metadata)
        return self._plan

    def _commit(
        self, step: int, unfinished: Path, writer: FileSystemWriter, plan: _Plan, decision: Decision
    ) -> None:
        """Rank 0, when every rank has written: write torch's metadata, and give the save its name."""
        assert plan.metadata is not None
        writer.finish(plan.metadata, _take_results(unfinished, self._barrier.world_size))
        made = Committed(
            step,
            self._barrier.world_size,
            self._barrier.run_id,
            decision.prefix,
            decision.sequence,
            self._directory.path(step),
        )
        self._directory.commit(unfinished, made)

    def finalize(self, blocking: bool = False) -> list[int]:
        """Learn which saves have been committed; costs no round trip.

        Args:
            blocking: wait for all saves that were begun.

        Returns:
            Their steps.

        Raises:
            AsyncSaveError: a save was not committed, on any rank.
        """
        try:
            done = self._queue.maybe_finalize_async_calls(blocking, no_dist=True)
        except AsyncSaveError as error:
            self._forget(error.call_idx)
            raise
        steps = [self._steps[number] for number in done]
        if done:
            self._forget(done[-1])
        return steps

    def _forget(self, last: int) -> None:
        """The saves up to this one are over."""
        self._steps = {number: step for number, step in self._steps.items() if number > last}

    def close(self) -> None:
        """Wait for all saves that were begun, and let go of the writers.

        Raises:
            AsyncSaveError: a save was not committed, on any rank.
        """
        self._queue.close()

    # ------------------------------------------------------------------ loading

    def latest(self) -> Committed | None:
        """The last committed checkpoint."""
        return self._directory.latest()

    def load(self, state_dict: dict[str, Any], path: str | Path | None = None) -> Committed:
        """Load a checkpoint into a state, resharded if the world size has changed; all ranks must call it.

        Args:
            state_dict: what :func:`torch.distributed.checkpoint.load` takes; it is filled in place.
            path: the checkpoint; default: the last committed one.

        Returns:
            The checkpoint.

        Raises:
            UncommittedError: the path is not a committed checkpoint.
            FileNotFoundError: there is no committed checkpoint.
        """
        if path is None:
            committed = self.latest()
            if committed is None:
                raise FileNotFoundError(
                    f"{self._directory.folder} holds no committed checkpoint. Save one first, or name a path."
                )
        else:
            committed = self._directory.read(Path(path))
        load_state(state_dict, checkpoint_id=committed.path, no_dist=not dist.is_initialized())
        return committed


# ---------------------------------------------------------------------- between the ranks


def _all_ranks(here: bool) -> bool:
    """Whether it is so on every rank."""
    if not dist.is_initialized():
        return here
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    everywhere = torch.tensor(int(here), device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere.item())


def _gather(plan: SavePlan) -> list[SavePlan] | None:
    """The plans of all ranks, on rank 0."""
    if not dist.is_initialized():
        return [plan]
    plans: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(plan, plans)
    return plans


def _scatter(plans: list[SavePlan] | None) -> SavePlan:
    """This rank's plan, from rank 0."""
    if not dist.is_initialized():
        assert plans is not None
        return plans[0]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, plans)
    share: SavePlan = mine[0]
    return share


# ---------------------------------------------------------------------- from the children to rank 0


def _results_path(folder: Path, rank: int) -> Path:
    return folder / f".written-{rank}"


def _keep_results(folder: Path, rank: int, results: list[WriteResult]) -> None:
    """In the child: leave for rank 0 where this rank's tensors are in its files."""
    with _results_path(folder, rank).open("wb") as file:
        pickle.dump(results, file)
    sync(folder)


def _take_results(folder: Path, world_size: int) -> list[list[WriteResult]]:
    found = []
    for rank in range(world_size):
        path = _results_path(folder, rank)
        found.append(pickle.loads(path.read_bytes()))
        path.unlink()
    return found
