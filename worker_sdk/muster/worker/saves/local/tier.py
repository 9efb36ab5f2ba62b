"""The local tier of a :class:`Checkpointer`: its keeper, its saves and its recovery."""

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.checkpoint.committed import SaveAttempt
from muster.worker.barriers import GrpcBarrier
from muster.worker.errors import MusterError, OutcomeUnknownError, error_for
from muster.worker.saves.loading import AgreedLoad
from muster.worker.saves.local.folder import LocalFolder
from muster.worker.saves.local.keeper_client import KeeperClient, is_answered
from muster.worker.saves.local.keeper_process import KeeperProcess, keeper_command
from muster.worker.saves.local.keeper_watch import KeeperWatch
from muster.worker.saves.local.level import Level
from muster.worker.saves.local.local_calls import LocalCheckpointCalls
from muster.worker.saves.local.local_load import LocalLoad
from muster.worker.saves.local.local_storage import LocalStorage, Terms
from muster.worker.saves.local.storage_options import keeper_environment
from muster.worker.saves.local.tiered_save import SharedPlace, TieredSave
from muster.worker.saves.local_barrier import LocalBarrier
from muster.worker.saves.storage.checkpoint_storage import CheckpointStorage

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT = 600.0
"""Seconds in which the coordinator must know this rank's keeper; as for joining a group."""
STATUS_TIMEOUT = 30.0
"""Seconds for a request of the keeper's status."""

_prefixes: dict[tuple[str, int], str] = {}
"""By run and generation: the group whose saves are local ones. Attempts are numbered by its barriers."""


class LocalTier:
    """The local tier of one rank.

    Args:
        barrier: decides the saves.
        parent: the user's local folder.
        replicas: on how many further nodes each part is to be.
        persist_every: which saves go to shared storage, too: the first, and then each so many.
        persist_to: where they go.
        keep_persisted: how many checkpoints shared storage keeps; 0: all.
        timeout: seconds for one save.
        storage: shared storage, opened when it is needed. Saves go there if a node has no room.
        opens: opens it once more, in a forked child.
        storage_options: of shared storage, for the keeper.

    Raises:
        KeeperError: there is no keeper, and none can be started.
        MusterError: this process is a job without a coordinator.
        OSError: the folder cannot be written.
        ValueError: another group of this process has local saves.
    """

    def __init__(
        self,
        barrier: GrpcBarrier,
        parent: Path,
        *,
        replicas: int,
        persist_every: int,
        persist_to: str,
        keep_persisted: int,
        timeout: float,
        storage: CheckpointStorage,
        opens: Callable[[], CheckpointStorage],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        given: object = barrier
        if isinstance(given, LocalBarrier):
            raise MusterError(
                "local= needs a coordinator, which decides what to resume from, and this job of one process "
                "has none. Set MUSTER_ENDPOINT, or leave local= out."
            )
        _check_alone(barrier)
        self._barrier = barrier
        self._replicas = replicas
        self._persist_every = persist_every
        self._persist_to = persist_to
        self._keep_persisted = keep_persisted
        self._timeout = timeout
        self._folder = LocalFolder(parent, barrier.run_id)
        self._folder.make()
        endpoint = barrier.config.endpoint
        command = keeper_command(self._folder, barrier.run_id, endpoint)
        keeper = self._keeper = KeeperClient(
            KeeperProcess(self._folder, command, is_answered, keeper_environment(storage_options))
        )
        self._calls = LocalCheckpointCalls(endpoint, barrier.run_id)
        self._storage = LocalStorage(self._folder, self._keeper, self._calls, barrier.rank, timeout)
        self._shared = barrier.sibling(f"{barrier.prefix}/shared")
        self._place = SharedPlace(storage, opens, persist_to, self._calls, self._meet, timeout)
        self._last: TieredSave | None = None
        self._ending = False
        self.attach()
        attach = weakref.WeakMethod(self.attach)
        self._watch = KeeperWatch(
            lambda: keeper.running, lambda: again() if (again := attach()) is not None else None
        )
        # A tier that nobody closes is not kept by its watch.
        weakref.finalize(self, self._watch.stop).atexit = False

    def attach(self) -> None:
        """Have a keeper keep what this rank writes; start one if it has ended.

        Raises:
            KeeperError: none can be started, or the coordinator does not know it in time.
        """
        barrier = self._barrier
        self._storage.keeper_id = self._keeper.attach(
            barrier.generation,
            barrier.world_size,
            barrier.rank,
            self._replicas,
            min(ATTACH_TIMEOUT, self._timeout / 2),
        )

    def attach_again(self) -> None:
        """Attach as :meth:`attach` does, when a save is written, and log a failure instead of raising it.

        A keeper that has ended since the last save is replaced. Without one, the save may still be a local
        checkpoint.
        """
        try:
            self.attach()
        except MusterError as error:
            logger.warning("this node's part of the save may not be replicated: %s", error)

    def _meet(self, failure: str | None) -> None:
        """Have all ranks meet that bring a save to shared storage.

        Raises:
            BarrierError: one has failed, was lost or did not come; the message names it.
        """

        def doubt(error: OutcomeUnknownError) -> None:
            if self._ending:
                raise error
            logger.warning("%s", error)

        decision = self._shared.vote_until_decided(doubt, failure, self._timeout)
        if not decision.released:
            raise error_for(decision)

    def pending(self, number: int, step: int, attempt: SaveAttempt, wait_for: Level) -> TieredSave:
        """Return a save.

        Args:
            number: of the save, the same on all ranks.
            step: the step.
            attempt: the save's.
            wait_for: the level that it waits for. One that waits for shared storage goes there in any case.

        Raises:
            ValueError: no local save of this job gets that level.
        """
        if wait_for is Level.REPLICATED and not self._replicas:
            raise ValueError(
                'wait_for = "replicated" with replicas=0: no save gets there. Give replicas=1 or more, '
                "or wait for another level."
            )
        persisted = number % self._persist_every == 0 or wait_for is Level.PERSISTED
        terms = Terms(
            self._replicas,
            wait_for,
            self._persist_to if persisted else "",
            self._keep_persisted if persisted else 0,
        )
        # A disk that was full at the commit is not tried at the next save, and then again.
        full = self._last.full if self._last is not None and self._last.has_failed else ""
        self._last = TieredSave(
            self._storage.pending(attempt, terms),
            self._place,
            self._barrier.rank,
            step,
            attempt,
            replace(terms, keep_persisted=self._keep_persisted),
            self.attach_again,
            full,
        )
        return self._last

    def load(self, shared: AgreedLoad, *, verify: bool) -> LocalLoad:
        """Return what resumes this rank.

        Args:
            shared: loads from shared storage.
            verify: whether digests are checked.
        """
        return LocalLoad(
            self._barrier,
            self._calls,
            self._keeper,
            self._folder,
            self.attach,
            shared,
            self._place.storage,
            self._persist_to,
            self._timeout,
            verify=verify,
        )

    def level(self, step: int) -> Level | None:
        """Return the level of the newest local checkpoint of a step, as this node's keeper knows it.

        Raises:
            KeeperError: the keeper does not answer.
        """
        kept = [one for one in self._keeper.checkpoints(STATUS_TIMEOUT) if one.step == step]
        return max(kept, key=lambda one: one.attempt).level if kept else None

    def end(self) -> None:
        """No save follows. A coordinator that is away is given up."""
        self._ending = True

    def close(self) -> None:
        """Close the connections to the keeper, which goes on."""
        self._watch.close()
        self._keeper.close()


def _check_alone(barrier: GrpcBarrier) -> None:
    """Refuse a second group: both would number their attempts alike."""
    known = _prefixes.setdefault((barrier.run_id, barrier.generation), barrier.prefix)
    if known != barrier.prefix:
        raise ValueError(
            f'this process makes local saves of group "{known}" already. Local saves of a run are those of '
            f"one group: give only one Checkpointer local=…"
        )
