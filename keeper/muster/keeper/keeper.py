"""A keeper: carries out its orders, and knows what to report."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.damage import DamageError
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
    VerifyFile,
    decide,
    holding,
)
from muster.keeper.reporting import Report
from muster.keeper.vocabulary import (
    PERSISTED,
    Attachment,
    Head,
    LocalCheckpoint,
    Orders,
    Peers,
    Transfer,
    attempt_name,
)

logger = logging.getLogger(__name__)

MAX_FILES = 3
"""Files that are verified or fetched at the same time for orders."""
FIRST_REST = 0.2
MAX_REST = 10.0
"""Seconds until an action that failed is tried again; the time doubles."""


class Persister(Protocol):
    """Copies checkpoints to shared storage."""

    async def persist(self, checkpoint: LocalCheckpoint, head: Head, folder: Path, rank: int) -> None:
        """Copy a rank's part.

        Raises:
            OSError: it cannot be read here, or written there.
            ValueError: the checkpoint cannot be committed there.
        """

    async def commit(self, checkpoint: LocalCheckpoint, head: Head, folder: Path) -> str:
        """Commit a checkpoint of which all parts are there; return its path.

        Raises:
            OSError: it cannot be committed.
            ValueError: it can never be.
        """


@dataclass(slots=True)
class _Rest:
    """An action that failed."""

    failures: int = 0
    said: str = ""
    waits: bool = False
    """Whether its next try is not due yet."""


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
        """Rings when there may be something to report, and when anything is learned."""
        self._persister = persister
        self._transfers = transfers
        self._running: dict[Action, asyncio.Task[None]] = {}
        self._rests: dict[Action, _Rest] = {}
        self._complete = False
        """Whether all that an earlier life has left has been verified."""
        self._used = files.folder.used()

    # ------------------------------------------------------------------ what is known

    def take_orders(self, orders: Orders) -> None:
        """Take all that this keeper is to hold."""
        self.files.orders = orders
        for attempt, order in orders.orders.items():
            self.files.shelf.drop_other(attempt, order.checkpoint.manifest)
        self._rests = {
            action: rest for action, rest in self._rests.items() if action.attempt in orders.orders
        }
        for rest in self._rests.values():
            rest.waits = False  # There may be other sources now.
        self.changes.ring()

    def take_peers(self, peers: Peers) -> None:
        """Take the keepers of the run."""
        self.peers = peers
        self.changes.ring()

    def attach(self, generation: int, world_size: int, rank: int, replicas: int) -> bool:
        """Keep for a rank.

        Returns:
            False if the rank is of an earlier generation than others were.
        """
        known = self.attachment
        if known is not None and generation < known.generation:
            return False
        ranks = {rank}
        if known is not None and (known.generation, known.world_size) == (generation, world_size):
            ranks |= known.ranks
        self.attachment = Attachment(generation, world_size, frozenset(ranks), replicas)
        self.changes.ring()
        return True

    def report(self) -> Report:
        """Return all that the coordinator is to know."""
        holdings = {}
        for attempt in sorted(self.files.shelf.attempts()):
            kept = self.files.shelf.kept(attempt)
            if (one := holding(attempt, kept, self.files.order(attempt))) is not None:
                holdings[attempt] = one
        return Report(
            self.attachment, holdings, self._used, self.files.quota, self._complete, self._transfers()
        )

    # ------------------------------------------------------------------ at the start

    async def verify_all(self) -> None:
        """Verify what an earlier life has left, the newest attempt first."""
        for attempt in sorted(self.files.folder.attempts(), reverse=True):
            try:
                await self.files.verify_attempt(attempt)
            except (OSError, ValueError) as error:
                logger.warning("%s is not used: %s", self.files.folder.attempt(attempt), error)
        self._complete = True
        self.changes.ring()

    # ------------------------------------------------------------------ the orders

    async def run(self) -> None:
        """Carry out the orders until cancelled."""
        try:
            # The bell rings for more than there is to do, and the decision costs little.
            while True:
                rung = self.changes.next()
                if self.files.orders is not None:
                    self._begin(self.files.orders)
                await rung.wait()
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
        return {attempt: self.files.shelf.kept(attempt) for attempt in attempts}

    def _begin(self, orders: Orders) -> None:
        busy = {*self._running, *(action for action, rest in self._rests.items() if rest.waits)}
        for action in decide(Situation(orders, self._kept(orders), busy)):
            alike = [one for one in self._running if _persists(one) == _persists(action)]
            if len(alike) < (1 if _persists(action) else MAX_FILES):
                task = asyncio.create_task(self._carry_out(action), name=f"muster-keeper-{action}")
                self._running[action] = task

    async def _carry_out(self, action: Action) -> None:
        try:
            await self._act(action)
        except (OSError, ValueError) as error:
            self._rest(action, error)
        except Exception as error:  # A fault of this program must not stop the other orders.
            logger.exception("cannot carry out %s", action)
            self._rest(action, error)
        else:
            self._rests.pop(action, None)
        finally:
            del self._running[action]
            self._used = self.files.folder.used()
            self.changes.ring()

    def _rest(self, action: Action, error: Exception) -> None:
        rest = self._rests.setdefault(action, _Rest())
        said = str(error)
        if rest.said != said:
            logger.warning("cannot carry out %s yet: %s", action, said)
        rest.said, rest.waits = said, True
        seconds = min(FIRST_REST * 2**rest.failures, MAX_REST)
        rest.failures += 1
        asyncio.get_running_loop().call_later(seconds, self._rested, action, rest)

    def _rested(self, action: Action, rest: _Rest) -> None:
        if self._rests.get(action) is rest:
            rest.waits = False
            self.changes.ring()

    async def _act(self, action: Action) -> None:
        match action:
            case GetHead(attempt):
                await self.files.head(attempt)
            case VerifyFile(attempt, name):
                await self.files.verified(attempt, await self.files.head(attempt), name)
            case FetchFile(attempt, name, _):
                await self.files.file(attempt, name, is_copy=True)
            case DeleteAttempt(attempt):
                self.files.shelf.drop_attempt(attempt)
                await self.files.in_thread(lambda: self.files.folder.delete(attempt))
                logger.info("deleted %s", attempt_name(attempt))
            case PersistPart(attempt, rank):
                await self._persist(attempt, rank)
            case CommitPersisted(attempt):
                await self._commit(attempt)

    async def _persist(self, attempt: SaveAttempt, rank: int) -> None:
        if (order := self.files.order(attempt)) is None:
            return
        head = await self.files.head(attempt)
        try:
            await self._persister.persist(order.checkpoint, head, self.files.folder.attempt(attempt), rank)
        except DamageError as error:
            # It was whole when it was verified.
            await self.files.verify_again(attempt, error.damage.file)
            raise OSError(str(error)) from error
        self.files.shelf.put_persisted(attempt, rank)

    async def _commit(self, attempt: SaveAttempt) -> None:
        if (order := self.files.order(attempt)) is None:
            return
        head = await self.files.head(attempt)
        path = await self._persister.commit(order.checkpoint, head, self.files.folder.attempt(attempt))
        self.files.shelf.put_committed(attempt, path)


def _persists(action: Action) -> bool:
    return isinstance(action, PersistPart | CommitPersisted)
