"""Checkpoints of a distributed state, written in the background and committed by every rank or by none.

Planning, serialisation and resharding are torch's (``torch.distributed.checkpoint``). The ranks plan together
when there is something else to save; each one's part is written in its child; when all have written, rank 0
commits.
"""

import logging
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from muster.checkpoint.committed import Committed, SaveAttempt
from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision
from muster.worker.errors import AsyncSaveError, BarrierError
from muster.worker.groups.write_report import WriteReport
from muster.worker.saves.failure import failure_text
from muster.worker.saves.limits import check_local, check_timeout
from muster.worker.saves.loading import AgreedLoad
from muster.worker.saves.local.level import Level, WaitFor
from muster.worker.saves.local.local_load import LocalLoad
from muster.worker.saves.local.storage_options import options_or_environment
from muster.worker.saves.local.tier import LocalTier
from muster.worker.saves.memory.huge_pages import HugePages
from muster.worker.saves.memory.staging import (
    Held,
    HostBuffers,
    check_memory,
    size_of,
    survive_fork,
    tensors_of,
)
from muster.worker.saves.planning.planning import Planning, SweptError
from muster.worker.saves.planning.state_dicts import check_planner, expanded, planned_bytes
from muster.worker.saves.queue.backlog import BacklogError, check_backlog, wait_until_few
from muster.worker.saves.queue.calls import SaveTimings
from muster.worker.saves.queue.groups import default_barrier
from muster.worker.saves.queue.queue import DEFAULT_TIMEOUT, AsyncCallsQueue
from muster.worker.saves.queue.vote_payload import words
from muster.worker.saves.request import AsyncRequest
from muster.worker.saves.storage.checkpoint_storage import PendingCheckpoint
from muster.worker.saves.storage.direct_save import DirectSave, PlacedSave
from muster.worker.saves.storage.lazy_storage import LazyStorage
from muster.worker.saves.storage.open_storage import absolute, check_options, open_storage
from muster.worker.saves.storage.rank_write import METADATA, RankWrite, manifest_of, written_note
from muster.worker.saves.storage.reading import load_into
from muster.worker.saves.storage.written import check_whole

logger = logging.getLogger(__name__)

Verify: TypeAlias = Literal["load", "off"]


class Checkpointer:
    """Saves and loads the checkpoints of a job, in one folder that all ranks share or in a bucket.

    Args:
        folder: where the checkpoints go: a folder, or an address that fsspec knows, such as
            ``s3://bucket/job1``.
        keep_last: how many committed ones to keep; default: all.
        copy: copy the whole state to buffers of its own before the fork. Default: only if one of its tensors
            is on a GPU, in shared memory or pinned; else it is shared with the child, and copied page by page
            as training changes it.
        barrier: decides the saves; default: one of group ``save``, taken from the environment.
        timeout: seconds for one save.
        on_saved: called with the timings of each save that was committed.
        verify: ``"load"``: verify every byte that is loaded against the digest from when it was written;
            ``"off"``: do not.
        storage_options: of a bucket, what fsspec's implementation of its scheme takes, such as
            ``{"profile": "training"}``; default: what that finds by itself. With ``local``, keepers that this
            process starts get them, too, and the default is ``MUSTER_STORAGE_OPTIONS``.
        local: a folder on each node's own disk, or in its memory (tmpfs). Saves go there. The node's keeper,
            a process that the first rank starts, copies each rank's part to other nodes. After a loss that
            leaves one copy of each part, the job resumes from these copies, without shared storage.
            Default: saves go to ``folder`` directly.
        replicas: with ``local``: the number of further nodes that keep a copy of each part.
        persist_every: with ``local``: the first save of this object and then every N-th also go to
            ``folder``. Keepers copy them there in the background.

    Raises:
        ConnectError: the coordinator could not be reached.
        KeeperError: this node's keeper cannot be started; the message has the end of its log.
        RefusedError: the coordinator refused this process.
        OSError: the folder or bucket is not there, or cannot be written.
        ValueError: the address or an argument is not valid, or the barrier does not have all ranks.
        ImportError: a package for its scheme is not installed.
        UncommittedError: the bucket holds checkpoints that were committed in a folder.
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
        verify: Verify = "load",
        storage_options: Mapping[str, Any] | None = None,
        local: str | Path | None = None,
        replicas: int = 1,
        persist_every: int = 1,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last = {keep_last}: it must be above 0, or None to keep all.")
        check_timeout(timeout)
        check_local(local, replicas, persist_every)
        if local is not None:
            storage_options = options_or_environment(storage_options)
            check_options(folder, storage_options)
        self._folder = folder
        self._keep_last = keep_last
        self._copy = copy
        if verify not in get_args(Verify):
            raise ValueError(f'verify = {verify!r}: it must be "load" or "off".')
        self._barrier = barrier or default_barrier()
        if self._barrier.participants:
            raise ValueError(
                f"the barrier has only ranks {list(self._barrier.participants)}, and all ranks of torch's "
                "process group write a checkpoint. Give a barrier without participants."
            )
        opens = partial(open_storage, folder, storage_options, self._barrier.run_id)
        # A job that resumes from local copies does not even look at shared storage. Keepers write there, and
        # remove what they have left.
        self._storage = opens() if local is None else LazyStorage(opens)
        if self._leads and local is None:
            self._storage.take_over()
        self._load = AgreedLoad(self._barrier, self._storage, timeout, verify=verify == "load")
        self._tier: LocalTier | None = None
        self._recover: AgreedLoad | LocalLoad = self._load
        if local is not None:
            self._tier = LocalTier(
                self._barrier,
                Path(local).absolute(),
                replicas=replicas,
                persist_every=persist_every,
                persist_to=absolute(folder),
                keep_persisted=keep_last or 0,
                timeout=timeout,
                storage=self._storage,
                opens=opens,
                storage_options=storage_options,
            )
            self._recover = self._tier.load(self._load, verify=verify == "load")
        self._planning = Planning(self._barrier, timeout)
        self._queue = AsyncCallsQueue(barrier=self._barrier, timeout=timeout, on_saved=on_saved)
        self._buffers = HostBuffers()
        self._huge_pages = HugePages()
        self._first = self._barrier.sequence
        """The barrier of its first save: a job that is started again has names of its own."""
        self._steps: dict[int, int] = {}
        """By the number of the queue's call: steps that are not finalized."""

    @property
    def _leads(self) -> bool:
        return self._barrier.rank == 0

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        state_dict: dict[str, Any],
        *,
        planner: SavePlanner | None = None,
        wait_for: WaitFor = "local",
    ) -> None:
        """Begin to save the state as it is now; all ranks must call it. Training goes on meanwhile.

        If two earlier saves are undecided by then, it waits for one of them, for two minutes at most, unless
        the coordinator is away. With ``wait_for``, this includes their copies or their upload.

        With ``local``, a rank whose folder has no room writes its part to shared storage. Then all ranks
        bring theirs there, and the save is committed there. A warning names the rank and the sizes.

        If the step is committed or under way, or the copy, plan or fork fails, the save counts, and has
        failed for all ranks, which hear of it from :meth:`finalize`. So it has, without an error here, if
        eight earlier saves are undecided.

        Args:
            step: the step's number, from 0.
            state_dict: what :func:`torch.distributed.checkpoint.save` takes, ``Stateful`` objects among it.
            planner: as for that function; default: torch's.
            wait_for: with ``local``, the level at which the save is finalized. ``"local"``: every rank has
                written on its node. ``"replicated"``: each part is on ``replicas`` further nodes, too.
                ``"persisted"``: it is in shared storage, to which such a save goes in any case. The default
                waits for no copy, and :meth:`level` says later how far a step has got.

        Raises:
            TypeError: the step is not a whole number.
            ValueError: the step is negative, committed already, or under way; or torch's process group is not
                of the barrier's ranks; or the planner caches plans; or there is no such level.
            MemoryError: there is not enough free memory for a copy.
            OSError: its folder cannot be made.
            MusterError: it is closed.
            Exception: what the plan raised, or the fork.
        """
        self._queue.check_open()
        self._planning.check_open()
        began = time.monotonic()
        self._check_group()
        step = int(operator.index(step))  # The marker cannot hold a number of numpy's.
        if step < 0:
            raise ValueError(f"step = {step}: it must not be negative.")
        # The order of saves is the same on all ranks, so that the name is the same too, and nobody else's.
        number = self._queue.next_idx
        attempt = SaveAttempt(self._barrier.generation, self._first + number)
        tier, level = self._tier, self._level(wait_for)
        pending: PlacedSave = (
            DirectSave(self._storage.pending(step, attempt))
            if tier is None
            else tier.pending(number, step, attempt, level)
        )
        planner = planner or DefaultSavePlanner()
        check_planner(planner)
        name = f"step {step}"
        report = WriteReport(step=step)
        held: Held | None = None
        shared = self._huge_pages.saving([])

        def clean() -> None:
            if self._leads and pending.is_swept:  # Else the keepers remove what is left.
                self._storage.sweep(self._keep_last, attempt, self._load.used, self._load.excluded)
            self._huge_pages.renew(shared)

        try:
            self._check_new(step)
            self._steps[number] = step
            check_backlog(self._queue.undecided, has_contact=self._barrier.has_contact)
            state_dict = expanded(state_dict)
            held = self._stage(state_dict)
            if held is None:
                shared = self._huge_pages.saving(tensors_of(state_dict))
            staged = time.monotonic()
            pending.begin()
            if held is not None and type(planner) is not DefaultSavePlanner:
                held.wait()  # Torch's own planner looks at no values.
            planner.set_up_planner(held.state if held is not None else state_dict, None, self._leads)
            negotiation = self._planning.begin(name, pending, planner.create_local_plan(), planner)
            final = planner.finish_plan(negotiation.share())
            pending.check_room(planned_bytes(final))

            def write_part(place: PendingCheckpoint) -> None:
                # Nobody reads these checksums (torch neither), and they take as long as all the rest.
                torch.serialization.set_crc32_options(False)
                began = time.monotonic()
                place.enter(self._barrier.rank)
                writer = place.writer()
                results = writer.write_data(final, planner).wait()
                wrote = RankWrite.of(results, writer.written, time.monotonic() - began)
                place.leave(written_note(self._barrier.rank), wrote.encode())

            def commit(decision: Decision) -> None:
                try:
                    place = pending.agreed(words(decision.payloads))
                    if self._leads:
                        self._commit(step, place, negotiation.metadata(), decision)
                except BaseException as error:
                    pending.failed(error)
                    raise

            self._queue.schedule_async_request(
                AsyncRequest(pending.write, (write_part,), []),
                wait_for_copies=held.wait if held is not None else None,
                on_written=held.release if held is not None else None,
                commit=commit,
                on_decided=clean,
                name=name,
                prepared=time.monotonic() - began,
                planned=time.monotonic() - staged,
                report=replace(report, bytes=planned_bytes(final)),
                word=pending.word,
            )
        except BaseException as error:
            is_raised = not isinstance(error, BarrierError | SweptError | BacklogError)
            why = "it was interrupted"
            # The other ranks count this save, in their plans and in their queues.
            try:
                why = failure_text(error) if is_raised else f"it was not planned: {error}"
                self._planning.refuse(name, pending, why)
            finally:
                if self._queue.next_idx == number:
                    if held is not None:
                        held.release()
                    self._queue.schedule_failure(why, name=name, on_decided=clean, report=report)
            if is_raised:
                raise
            if isinstance(error, BacklogError):  # Its decision may be long in coming.
                logger.warning("%s is not saved: %s", name, str(error))  # The error holds the state.
        # Last: an interrupt changes nothing any more about what this rank saves, and in which order.
        wait_until_few(lambda: self._queue.undecided, lambda: self._barrier.has_contact)

    def _check_group(self) -> None:
        """The plan is made by torch's process group, and the decision by the barrier's ranks."""
        ours = (self._barrier.rank, self._barrier.world_size)
        group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if ours != group:
            raise ValueError(
                f"torch's process group has this process as rank {group[0]} of {group[1]}, the barrier as "
                f"rank {ours[0]} of {ours[1]}. Call torch.distributed.init_process_group for all ranks first."
            )

    def _stage(self, state_dict: dict[str, Any]) -> Held | None:
        """The state in buffers of its own; None if it is shared with the child."""
        tensors = tensors_of(state_dict)
        if self._copy or not survive_fork(state_dict):
            return self._buffers.stage(state_dict)
        # Training may change all of it before the child has ended, and so have all of it copied.
        check_memory(size_of(tensors))
        return None

    def _check_new(self, step: int) -> None:
        """Refuse a step that cannot be saved now. Another rank may see it otherwise, so the save counts."""
        if step in self._steps.values():
            raise ValueError(f"step {step} is being saved already, or not finalized. Save another step.")
        path = None if self._tier is not None else self._storage.committed(step)
        if path is not None:
            raise ValueError(f"step {step} is committed already, as {path}. Save another, or remove it.")

    def _level(self, wait_for: WaitFor) -> Level:
        if self._tier is None and wait_for != "local":
            raise ValueError(
                f'wait_for = "{wait_for}" is of saves with local=…. Without it, a save is finalized when it '
                "is in shared storage: leave wait_for out."
            )
        return Level.of(wait_for)

    def _commit(self, step: int, pending: PendingCheckpoint, metadata: Metadata, decision: Decision) -> None:
        """Rank 0, when every rank has written: write torch's metadata, and make the save a checkpoint."""
        notes = pending.take([written_note(rank) for rank in range(self._barrier.world_size)])
        writes = [RankWrite.decode(note) for note in notes]
        results = [write.results for write in writes]
        check_whole(metadata, results)
        writer = pending.writer()
        writer.finish(metadata, results)
        made = Committed(
            step,
            self._barrier.world_size,
            self._barrier.run_id,
            decision.prefix,
            decision.sequence,
            pending.checkpoint,
            committed_at=time.time(),
        )
        pending.commit(made, manifest_of(writes, writer.written[METADATA]))

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
            error.finalized = tuple(self._steps[number] for number in error.finalized)
            self._forget(error.call_idx)
            raise
        steps = [self._steps[number] for number in done]
        if done:
            self._forget(done[-1])
        return steps

    def level(self, step: int) -> Level | None:
        """Return how durable a saved step is by now; without ``local`` it is always in shared storage.

        Args:
            step: the step.

        Returns:
            Its level, as this node's keeper was last told: it never says too much. None if the keeper has no
            part of it: it was not saved, it is too old, or it is another node's.

        Raises:
            KeeperError: the keeper does not answer.
            OSError: without ``local``, shared storage cannot be looked at.
        """
        if self._tier is not None:
            return self._tier.level(step)
        return None if self._storage.committed(step) is None else Level.PERSISTED

    def _forget(self, last: int) -> None:
        """The saves up to this one are over."""
        self._steps = {number: step for number, step in self._steps.items() if number > last}

    def close(self) -> None:
        """Wait for all saves that were begun, and let go of the writers.

        Raises:
            AsyncSaveError: a save was not committed, on any rank.
        """
        self._planning.end()
        if self._tier is not None:
            self._tier.end()
        self._huge_pages.saving([])  # There is no next fork.
        try:
            self._queue.close()
        finally:
            self._planning.close()
            if self._tier is not None:
                self._tier.close()

    # ------------------------------------------------------------------ loading

    def latest(self) -> Committed | None:
        """Return the whole checkpoint that was committed last in shared storage, as this rank sees it.

        With ``local``, there may be a newer one on the nodes. To resume, call :meth:`resume`: another rank
        may see another one.

        Raises:
            OSError: it cannot be looked for.
        """
        return self._storage.newest(()).newest

    def resume(self, state_dict: dict[str, Any], *, planner: LoadPlanner | None = None) -> Committed | None:
        """Load the newest whole checkpoint into a state, if there is one; all ranks must call it.

        Every rank verifies what it loads. If one finds damage, all ranks load the checkpoint before it, and
        the damaged one is marked, so that no later life of the job resumes from it.

        With ``local``, the coordinator decides once for all ranks: the newest step of which each part is on a
        node, or else the newest in shared storage. Nothing is read from shared storage while a local one is
        loaded. A rank reads through its node's keeper, which fetches what the node does not have. If a rank
        cannot get a part whole, all ranks ask for another decision.

        Args:
            state_dict: what :func:`torch.distributed.checkpoint.load` takes; it is filled in place, resharded
                if the world size has changed.
            planner: as for that function. ``DefaultLoadPlanner(allow_partial_load=True)`` skips missing keys.

        Returns:
            The checkpoint, the same on all ranks; None before the first commit. The path of a local one is
            its folder on this node, which may have only some of its parts.

        Raises:
            CorruptCheckpointError: there are checkpoints, and all are damaged; or one was found damaged while
                loading, and the planner loads in part. The state may be partly filled: build it again.
            RuntimeError: it cannot be loaded into this state.
            BarrierError: another rank failed to load, was lost or did not come; the message names it.
            OSError: it cannot be looked for, or read.
        """
        # Another planner need not overwrite all that it loaded before.
        overwrites = planner is None or (
            type(planner) is DefaultLoadPlanner and not planner.allow_partial_load
        )
        return self._recover.newest(partial(load_into, state_dict, planner), overwrites=overwrites)

    def load(
        self,
        state_dict: dict[str, Any],
        path: str | Path | None = None,
        *,
        planner: LoadPlanner | None = None,
    ) -> Committed:
        """Load a checkpoint into a state, resharded if the world size has changed; all ranks must call it.

        Args:
            state_dict: as for :meth:`resume`.
            path: the checkpoint, the same on all ranks; default: the newest whole one, as :meth:`resume`.
            planner: as for :meth:`resume`.

        Returns:
            The checkpoint.

        Raises:
            UncommittedError: the path is not a committed checkpoint.
            FileNotFoundError: there is no committed checkpoint.
            CorruptCheckpointError: it is damaged. The state may be partly filled.
            RuntimeError: it cannot be loaded into this state.
            BarrierError: another rank failed to load, was lost or did not come; the message names it.
            OSError: it cannot be read.
        """
        if path is not None:
            return self._load.named(path, partial(load_into, state_dict, planner))
        committed = self.resume(state_dict, planner=planner)
        if committed is None:
            raise FileNotFoundError(
                f"{self._folder} holds no committed checkpoint. Save one first, or name a path."
            )
        return committed
