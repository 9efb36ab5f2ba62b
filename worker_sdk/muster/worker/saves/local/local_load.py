"""Resumes from the checkpoint that the coordinator names: a local one, or the newest in shared storage.

The coordinator decides once for all ranks, before any of them reads a byte. Each rank reads through the
keeper of its node, which has or fetches a verified copy. If a rank cannot get a file whole, all ranks ask for
another decision.
"""

import logging
from collections.abc import Callable, Sequence

from muster.checkpoint.committed import Committed, SaveAttempt
from muster.checkpoint.damage import Damage
from muster.checkpoint.local_folder import attempt_name, parse_attempt
from muster.checkpoint.manifest import ManifestReference
from muster.v1 import local_pb2 as pb
from muster.worker.barriers import GrpcBarrier
from muster.worker.errors import MusterError
from muster.worker.saves.load_agreement import Agreement, Load
from muster.worker.saves.loading import AgreedLoad
from muster.worker.saves.local.folder import LocalFolder
from muster.worker.saves.local.keeper_client import KeeperClient
from muster.worker.saves.local.kept_source import KeptSource
from muster.worker.saves.local.local_calls import LocalCheckpointCalls
from muster.worker.saves.local.recovery import Next, Recovery
from muster.worker.saves.local.settling import settle
from muster.worker.saves.storage.checkpoint_storage import CheckpointStorage
from muster.worker.saves.storage.reading import Opened, open_checkpoint

logger = logging.getLogger(__name__)


class LocalLoad(Agreement):
    """Resumes one rank, in agreement with all others.

    Args:
        barrier: decides the job's saves; recoveries use a sibling of it.
        calls: to the coordinator.
        keeper: this node's.
        folder: the keeper's.
        attach: has a keeper keep for this rank; starts one if it has ended.
        shared: loads from shared storage.
        storage: shared storage, opened when it is needed.
        persist_to: its name, as keepers are told it.
        timeout: seconds for a decision, and for the slowest rank to read.
        verify: whether digests are checked.
    """

    OPENING_BEGINS = True

    def __init__(
        self,
        barrier: GrpcBarrier,
        calls: LocalCheckpointCalls,
        keeper: KeeperClient,
        folder: LocalFolder,
        attach: Callable[[], None],
        shared: AgreedLoad,
        storage: CheckpointStorage,
        persist_to: str,
        timeout: float,
        *,
        verify: bool,
    ) -> None:
        super().__init__(barrier.sibling(f"{barrier.prefix}/recover"), timeout)
        self._prefix = barrier.prefix
        self._calls = calls
        self._keeper = keeper
        self._folder = folder
        self._attach = attach
        self._shared = shared
        self._storage = storage
        self._persist_to = persist_to
        self._verify = verify
        self._source: KeptSource | None = None
        """The files of the checkpoint that is being loaded."""

    def newest(self, load: Load, *, overwrites: bool = True) -> Committed | None:
        """Load the checkpoint that the coordinator names.

        Args:
            load: loads into the state, through a reader; it is called again after damage.
            overwrites: whether each call overwrites all that an earlier one loaded.

        Returns:
            The checkpoint, the same on all ranks but for its path; None before the first commit.

        Raises:
            CorruptCheckpointError: as :meth:`AgreedLoad.newest`.
            BarrierError: a rank failed to load, was lost or did not come; the message names it.
            Exception: what this rank's load raised.
        """
        self._check_in_step()
        recovery = Recovery(overwrites)
        made: Committed | None = None
        absent: list[SaveAttempt] = []
        while recovery.next is not Next.SHARED:
            match recovery.next:
                case Next.ASK:
                    made, absent = self._ask(absent, without_local=recovery.without_local)
                    recovery.decided(local=made is not None, absent=bool(absent))
                case Next.LOAD:
                    assert made is not None
                    damage = self._attempt(made, load)
                    if damage is not None:
                        logger.error("%s cannot be read on all ranks: %s", made.path, damage)
                    recovery.loaded(str(made.path), damage, filled=self._filled)
                case Next.DONE:
                    return made
        return self._shared.newest(load, overwrites=overwrites)

    def _ask(
        self, absent: Sequence[SaveAttempt], *, without_local: bool
    ) -> tuple[Committed | None, list[SaveAttempt]]:
        """Ask for a decision.

        Args:
            absent: what the last decision named, and is not in shared storage.
            without_local: whether it must name no local checkpoint.

        Returns:
            The local checkpoint to load; None: load from shared storage. And what is not there, if all ranks
            must ask again.

        Raises:
            MusterError: the coordinator names a local checkpoint, and was asked for none.
        """
        barrier, response, error, word = self._barrier, None, None, b""
        try:
            response = self._calls.recover(
                barrier.generation,
                barrier.sequence,
                barrier.world_size,
                self._timeout,
                self._attach,
                absent=absent,
                without_local=without_local,
            )
            if response.HasField("checkpoint") and without_local:
                raise MusterError(
                    "the ranks could not load several local checkpoints, and the coordinator names "
                    "another one. It is of an older version: upgrade it, or start the job without local=."
                )
            if barrier.rank == 0 and not response.HasField("checkpoint"):
                word = self._settled(response.unsettled)
        except BaseException as failed:  # The others wait for this rank, whatever happens to it.
            error = failed
        if response is None or error is not None or not response.HasField("checkpoint"):
            # Else a later resume() would ask for the decision that is made already.
            decision = self._meet(error, word, begins=True)
            assert response is not None
            found = [parse_attempt(name) for name in decision.payloads.get(0, b"").decode().split()]
            if found:
                logger.info("step to resume from is not in shared storage; the ranks ask again")
            else:
                logger.info("resuming from shared storage: %s", response.reason)
            return None, found
        made = self._made(response.checkpoint)
        logger.info("resuming from local copies of step %d: %s", made.step, response.reason)
        return made, []

    def _settled(self, unsettled: Sequence[pb.LocalCheckpoint]) -> bytes:
        """On rank 0: look which checkpoints are in shared storage that a process was permitted to commit.

        Returns:
            The names of all of them, if none is there; else nothing.

        Raises:
            OSError: it cannot be looked at. That is not taken for absence.
        """
        if any(settle(self._storage, self._persist_to, unsettled)):
            return b""
        attempts = (SaveAttempt(one.attempt.generation, one.attempt.number) for one in unsettled)
        return " ".join(map(attempt_name, attempts)).encode()

    def _made(self, checkpoint: pb.LocalCheckpoint) -> Committed:
        attempt = SaveAttempt(checkpoint.attempt.generation, checkpoint.attempt.number)
        return Committed(
            checkpoint.step,
            checkpoint.world_size,
            self._barrier.run_id,
            self._prefix,
            attempt.number,
            self._folder.attempt(attempt),
            manifest=ManifestReference(checkpoint.manifest_size, checkpoint.manifest_digest.hex()),
        )

    # ------------------------------------------------------------------ one attempt

    def _attempt(self, made: Committed, load: Load) -> Damage | None:
        try:
            return super()._attempt(made, load)
        finally:
            if self._source is not None:
                self._source.close()

    def _read_first(self, made: Committed) -> Opened:
        attempt = self._folder.attempt_in(made.path)
        self._source = KeptSource(self._keeper, attempt, self._folder.attempt(attempt), self._timeout)
        return open_checkpoint(made, self._source, verify=self._verify, sizes=False)

    def _own(self, damage: Damage) -> Damage:
        if self._source is not None and damage.file:
            # The keeper reports what it finds before the coordinator decides again.
            self._source.look_again(damage.file)
        return super()._own(damage)
