"""A keeper: carries out its orders, and knows what to report."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.damage import DamageError
from muster.checkpoint.local_folder import attempt_name
from muster.client.protocol import MAX_HOLDINGS
from muster.keeper.file_store import FileStore
from muster.keeper.orders import (
    Action,
    CommitPersisted,
    DeleteAttempt,
    FetchFile,
    GetHead,
    Kept,
    PersistPart,
    Situation,
    SyncFile,
    VerifyFile,
    decide,
    holding,
    may_be_verified,
)
from muster.keeper.persisting.destination import LostFilesError
from muster.keeper.reporting import Report
from muster.keeper.vocabulary import (
    PERSISTED,
    Attachment,
    Head,
    LocalCheckpoint,
    Order,
    Orders,
    Peers,
    Transfer,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_FILES = 3
"""Files that are verified at the same time because of orders, and files that are fetched."""
FIRST_PAUSE, MAX_PAUSE = 0.2, 10.0
"""Seconds until a failed action is tried again. Each pause is twice as long as the one before."""
PATIENT_FAILURES = 5
"""Failures of an action for which a decision waits: with their pauses, 3 s at least. Then it is tried on."""
MAX_DOUBLINGS = 10
"""Doublings after which a pause has reached its limit: a larger power would overflow."""


class Persister(Protocol):
    """Copies checkpoints to shared storage."""

    async def persist(self, checkpoint: LocalCheckpoint, head: Head, folder: Path, rank: int) -> None:
        """Copy a rank's part.

        Raises:
            OSError: it cannot be read here, or written there.
            ValueError: the checkpoint cannot be committed there.
        """

    async def prepare(self, checkpoint: LocalCheckpoint, head: Head, folder: Path) -> str:
        """Do all that comes before the commit of a checkpoint; return its path if it is committed already.

        Raises:
            LostFilesError: files were removed from shared storage, and are not on this node.
            DamageError: a file on this node is not what was verified.
            OSError: it cannot be read here, or written there.
            ValueError: it can never be committed.
        """

    async def commit(
        self, checkpoint: LocalCheckpoint, head: Head, unsettled: Sequence[LocalCheckpoint]
    ) -> str:
        """Commit a checkpoint that was prepared; return its path.

        Args:
            checkpoint: the checkpoint.
            head: its head.
            unsettled: older ones. It is first made sure that each is committed, or never will be.

        Raises:
            OSError: it cannot be committed.
            ValueError: it can never be.
        """


@dataclass(slots=True)
class _Retry:
    """An action that has failed, and is tried again."""

    failures: int = 0
    last_error: str = ""
    is_paused: bool = False
    """Whether the next try is not due yet."""


class Keeper:
    """Carries out the orders of one run on this node. The event loop's thread uses it.

    Args:
        keeper_id: the folder's.
        files: what is here, in a folder that this process has locked.
        persister: copies to shared storage.
        transfers: returns what came lately from other keepers, by their URLs.
    """

    def __init__(
        self,
        keeper_id: str,
        files: FileStore,
        persister: Persister,
        transfers: Callable[[], Mapping[str, Transfer]] = dict,
    ) -> None:
        self.id = keeper_id
        self.files = files
        self.peers = Peers()
        self.attachment: Attachment | None = None
        self.changes = files.changes
        """Notified when there may be something to report, and when orders, peers or ranks have changed."""
        self.permits: Callable[[SaveAttempt], Awaitable[Sequence[LocalCheckpoint]]] = _no_permit
        """Asks the coordinator whether a checkpoint may be committed in shared storage. It returns older ones
        that must be settled first, and raises OSError if it may not."""
        self._persister = persister
        self._transfers = transfers
        self._running: dict[Action, asyncio.Task[None]] = {}
        self._retries: dict[Action, _Retry] = {}
        self._used = files.folder.used()

    # ------------------------------------------------------------------ what is known

    def take_orders(self, orders: Orders) -> None:
        """Replace the orders: they name everything that this keeper is to hold."""
        last = self.files.orders or Orders()
        before, asks = last.orders, orders.confirm not in (0, last.confirm)
        self.files.orders = orders
        for attempt, order in orders.orders.items():
            self.files.verified.drop_other(attempt, order.checkpoint.manifest)
        self._retries = {
            action: retry
            for action, retry in self._retries.items()
            if not _may_succeed(action, before.get(action.attempt), orders.orders.get(action.attempt))
            # What failed before a question is no answer to it.
            and not (asks and isinstance(action, GetHead | VerifyFile | SyncFile))
        }
        self._keep_connections()
        self.changes.notify()

    def take_peers(self, peers: Peers) -> None:
        """Replace the list of the run's keepers."""
        self.peers = peers
        self._keep_connections()
        self.changes.notify()

    def _keep_connections(self) -> None:
        """Close the idle connections to keepers from which nothing more is to be fetched."""
        orders = {} if self.files.orders is None else self.files.orders.orders
        sources = (source.url for order in orders.values() for source in order.sources)
        self.files.keep_connections({*sources, *(peer.url for peer in self.peers.keepers)})

    def attach(self, generation: int, world_size: int, rank: int, replicas: int) -> bool:
        """Attach a rank of this node, whose parts this keeper is to hold.

        Args:
            generation: the rank's.
            world_size: the number of ranks in this generation.
            rank: the rank.
            replicas: on how many further nodes each part is to be.

        Returns:
            Whether the rank is attached; false if a rank of a later generation has attached before.
        """
        known = self.attachment
        if known is not None and generation < known.generation:
            return False
        ranks = {rank}
        if known is not None and (known.generation, known.world_size) == (generation, world_size):
            ranks |= known.ranks
        self.attachment = Attachment(generation, world_size, frozenset(ranks), replicas)
        self.changes.notify()
        return True

    def report(self) -> Report:
        """Return everything that the coordinator is to know.

        More than ``MAX_HOLDINGS`` are cut: those that orders name come first, then the newest.
        """
        holdings = {}
        known = sorted(
            self.files.verified.attempts(), key=lambda one: (self.files.order(one) is not None, one)
        )
        for attempt in sorted(known[-MAX_HOLDINGS:]):
            kept = self.files.verified.kept(attempt)
            if (one := holding(attempt, kept, self.files.order(attempt))) is not None:
                holdings[attempt] = one
        return Report(
            attachment=self.attachment,
            holdings=holdings,
            used=self._used,
            quota=self.files.quota,
            confirmed=self._confirmed(),
            transfers=self._transfers(),
        )

    def _confirmed(self) -> int:
        """Return the number that the orders ask to confirm, if all that can be verified is; else 0."""
        orders = self.files.orders
        if orders is None or not orders.confirm:
            return 0
        failed = {action for action, retry in self._retries.items() if retry.failures >= PATIENT_FAILURES}
        return 0 if may_be_verified(orders, self._kept(orders), failed) else orders.confirm

    def forget_question(self) -> None:
        """The stream over which the orders came has ended: nobody waits for their number any more."""
        if self.files.orders is not None:
            self.files.orders = replace(self.files.orders, confirm=0)

    # ------------------------------------------------------------------ at the start

    async def verify_all(self) -> None:
        """Verify what was in the folder at the start, the newest attempt first."""
        for attempt in sorted(self.files.folder.attempts(), reverse=True):
            try:
                await self.files.verify_attempt(attempt)
            except (OSError, ValueError) as error:
                logger.warning("%s is not used: %s", self.files.folder.attempt(attempt), error)

    # ------------------------------------------------------------------ the orders

    async def run(self) -> None:
        """Carry out the orders until cancelled."""
        try:
            # Most changes need no action, but the decision is cheap.
            while True:
                changed = self.changes.next()
                if self.files.orders is not None:
                    self._begin(self.files.orders)
                await changed.wait()
        finally:
            for task in self._running.values():
                task.cancel()
            self.files.cancel()

    def persists(self) -> bool:
        """Return whether a checkpoint that is here has yet to be committed in shared storage."""
        orders = {} if self.files.orders is None else self.files.orders.orders
        holdings = self.report().holdings
        return any(
            order.checkpoint.persist_to and order.level != PERSISTED and holdings[attempt].ranks
            for attempt, order in orders.items()
            if attempt in holdings
        )

    def _kept(self, orders: Orders) -> Mapping[SaveAttempt, Kept]:
        attempts = self.files.folder.attempts() | set(orders.orders)
        return {attempt: self.files.verified.kept(attempt) for attempt in attempts}

    def _begin(self, orders: Orders) -> None:
        busy = {*self._running, *(action for action, retry in self._retries.items() if retry.is_paused)}
        for action in decide(Situation(orders, self._kept(orders), busy)):
            kind = _kind(action)
            if [_kind(one) for one in self._running].count(kind) < (1 if kind == PERSISTING else MAX_FILES):
                task = asyncio.create_task(self._carry_out(action), name=f"muster-keeper-{action}")
                self._running[action] = task

    async def _carry_out(self, action: Action) -> None:
        order = self.files.order(action.attempt)
        try:
            await self._act(action)
        except (OSError, ValueError) as error:
            self._retry_later(action, error, order)
        except Exception as error:  # A bug in one action must not stop the others.
            logger.exception("cannot carry out %s", action)
            self._retry_later(action, error, order)
        else:
            self._retries.pop(action, None)
        finally:
            del self._running[action]
            self._used = self.files.folder.used()
            self.changes.notify()

    def _retry_later(self, action: Action, error: Exception, order: Order | None) -> None:
        """Try an action again later.

        Args:
            action: the action.
            error: why it failed.
            order: the order about its checkpoint when it began. If it may succeed by the present one, it is
                tried again at once.
        """
        if _may_succeed(action, order, self.files.order(action.attempt)):
            return
        retry = self._retries.setdefault(action, _Retry())
        reason = str(error)
        if retry.last_error != reason:
            logger.warning("cannot carry out %s yet: %s", action, reason)
        retry.last_error, retry.is_paused = reason, True
        seconds = min(FIRST_PAUSE * 2 ** min(retry.failures, MAX_DOUBLINGS), MAX_PAUSE)
        retry.failures += 1
        asyncio.get_running_loop().call_later(seconds, self._end_pause, action, retry)

    def _end_pause(self, action: Action, retry: _Retry) -> None:
        if self._retries.get(action) is retry:
            retry.is_paused = False
            self.changes.notify()

    async def _act(self, action: Action) -> None:
        match action:
            case GetHead(attempt):
                await self.files.ensure_head(attempt)
            case VerifyFile(attempt, name):
                await self.files.verify_file(attempt, await self.files.ensure_head(attempt), name)
            case SyncFile(attempt, name):
                await self.files.sync_file(attempt, name)
            case FetchFile(attempt, name, _):
                await self.files.ensure_file(attempt, name, is_copy=True)
            case DeleteAttempt(attempt):
                self.files.verified.drop_attempt(attempt)
                await self.files.in_thread(lambda: self.files.folder.delete(attempt))
                logger.info("deleted %s", attempt_name(attempt))
                for retry in self._retries.values():
                    retry.is_paused = False  # There is more room.
            case PersistPart(attempt, rank):
                await self._persist(attempt, rank)
            case CommitPersisted(attempt):
                await self._commit(attempt)

    async def _persist(self, attempt: SaveAttempt, rank: int) -> None:
        if (order := self.files.order(attempt)) is None:
            return
        head = await self.files.ensure_head(attempt)
        folder = self.files.folder.attempt(attempt)
        await self._checked(attempt, self._persister.persist(order.checkpoint, head, folder, rank))
        self.files.verified.put_persisted(attempt, head, rank)

    async def _commit(self, attempt: SaveAttempt) -> None:
        if (order := self.files.order(attempt)) is None:
            return
        head = await self.files.ensure_head(attempt)
        path = await self._prepare(order, head)
        if not path:
            # The last thing before the commit: a recovery that follows knows that it may be there.
            unsettled = await self.permits(attempt)
            path = await self._persister.commit(order.checkpoint, head, unsettled)
        self.files.verified.put_committed(attempt, head, path)

    async def _prepare(self, order: Order, head: Head) -> str:
        """Prepare a commit. Files that were removed from shared storage come from the nodes once more."""
        checkpoint = order.checkpoint
        folder = self.files.folder.attempt(checkpoint.attempt)
        try:
            return await self._checked(checkpoint.attempt, self._persister.prepare(checkpoint, head, folder))
        except LostFilesError as error:
            logger.warning("fetching what was removed from shared storage: %s", error)
            for name in error.names:
                await self.files.ensure_file(checkpoint.attempt, name, is_copy=True)
        return await self._checked(checkpoint.attempt, self._persister.prepare(checkpoint, head, folder))

    async def _checked(self, attempt: SaveAttempt, work: Awaitable[T]) -> T:
        """Await work that reads verified files. If a file has changed since, verify it again.

        Raises:
            OSError: the work failed, or a file is damaged.
        """
        try:
            return await work
        except DamageError as error:
            await self.files.verify_again(attempt, error.damage.file)
            raise OSError(str(error)) from error


async def _no_permit(attempt: SaveAttempt) -> Sequence[LocalCheckpoint]:
    raise OSError("the coordinator has not been reached yet")


PERSISTING, FETCHING, HEADS, VERIFYING, SYNCING = "persisting", "fetching", "heads", "verifying", "syncing"


def _kind(action: Action) -> str:
    """Return what an action competes with. A silent peer or slow storage must not delay what is here."""
    match action:
        case PersistPart() | CommitPersisted():
            return PERSISTING
        case FetchFile():
            return FETCHING
        case GetHead():
            return HEADS
        case SyncFile():
            return SYNCING
        case _:
            return VERIFYING


def _may_succeed(action: Action, before: Order | None, now: Order | None) -> bool:
    """Return whether an action that failed by an earlier order may succeed by the present one."""
    if before is None or now is None:
        return before is not now
    if before.checkpoint != now.checkpoint:
        return True
    return isinstance(action, GetHead | FetchFile | CommitPersisted) and before.sources != now.sources
