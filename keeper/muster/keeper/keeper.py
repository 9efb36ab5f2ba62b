"""A keeper: carries out its orders, verifies and fetches files, and knows what to report."""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.directory import METADATA, sync, write_synced
from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestReference
from muster.keeper.bell import Bell
from muster.keeper.fetching import (
    Fetch,
    NoSourceError,
    SilentSourcesError,
    Sources,
    file_path,
    in_order,
)
from muster.keeper.folder import KeeperFolder, Signature, partial_path
from muster.keeper.orders import (
    Action,
    CommitPersisted,
    DeleteAttempt,
    FetchFile,
    GetHead,
    PersistPart,
    Situation,
    VerifyFile,
    decide,
    holding,
)
from muster.keeper.reporting import Report
from muster.keeper.shelf import Shelf
from muster.keeper.transport import AbsentError, Transport, TransportError, read_all
from muster.keeper.verifying import file_is_whole, read_head
from muster.keeper.vocabulary import (
    HEAD,
    Attachment,
    Head,
    LocalCheckpoint,
    Order,
    Orders,
    Peers,
    attempt_name,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_FILES = 3
"""Files that are verified or fetched at the same time for orders."""
MAX_PERSISTING = 1
"""Parts that are copied to shared storage at the same time."""
FIRST_REST = 0.2
MAX_REST = 10.0
"""Seconds until an action that failed is tried again; the time doubles."""
ORDERS_PATIENCE = 10.0
"""Seconds that a rank's request waits for the orders that name its checkpoint."""


class QuotaError(OSError):
    """A copy does not fit in the folder."""


class Persister(Protocol):
    """Copies checkpoints to shared storage."""

    async def persist(self, checkpoint: LocalCheckpoint, head: Head, folder: Path, rank: int) -> None:
        """Copy a rank's part.

        Raises:
            OSError: it cannot be written there.
        """

    async def commit(self, checkpoint: LocalCheckpoint, head: Head, folder: Path) -> str:
        """Commit a checkpoint of which all parts are there; return its path.

        Raises:
            OSError: it cannot be committed.
        """


@dataclass(slots=True)
class _Rest:
    """An action that failed."""

    failures: int = 0
    said: str = ""
    waits: bool = False
    """Whether its next try is not due yet."""


class Keeper:
    """Carries out the orders of one run on this node.

    Args:
        folder: locked by this process.
        keeper_id: the folder's.
        transport: how bytes come from other keepers.
        threads: run what waits for disks and networks.
        quota: bytes that the folder may take.
        persister: copies to shared storage.
    """

    def __init__(
        self,
        folder: KeeperFolder,
        keeper_id: str,
        transport: Transport,
        threads: Executor,
        quota: int,
        persister: Persister,
    ) -> None:
        self.folder = folder
        self.id = keeper_id
        self.quota = quota
        self.peers = Peers()
        self.orders: Orders | None = None
        self.attachment: Attachment | None = None
        self.changes = Bell()
        """Rings when what there is to report may have changed, or what is known of the run."""
        self._transport = transport
        self._threads = threads
        self._persister = persister
        self._shelf = Shelf(folder)
        self._running: dict[Action, asyncio.Task[None]] = {}
        self._resting: dict[Action, _Rest] = {}
        self._shared: dict[Hashable, asyncio.Task[Any]] = {}
        """Work that several callers may wait for, by what it is."""
        self._reserved = 0
        """Bytes of the files that are being fetched."""
        self._complete = False
        """Whether all that an earlier life has left has been verified."""
        self._wake = asyncio.Event()
        self._used = folder.used()

    # ------------------------------------------------------------------ what is known

    def take_orders(self, orders: Orders) -> None:
        """Take all that this keeper is to hold."""
        self.orders = orders
        for attempt, order in orders.orders.items():
            self._shelf.drop_other(attempt, order.checkpoint.manifest)
        self._resting = {
            action: rest for action, rest in self._resting.items() if action.attempt in orders.orders
        }
        for rest in self._resting.values():
            rest.waits = False  # There may be other sources now.
        self._changed()

    def take_peers(self, peers: Peers) -> None:
        """Take the keepers of the run."""
        self.peers = peers
        self._changed()

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
        self._changed()
        return True

    def order(self, attempt: SaveAttempt) -> Order | None:
        """Return the order about an attempt."""
        return None if self.orders is None else self.orders.orders.get(attempt)

    @property
    def used(self) -> int:
        """The bytes that the folder took after the last action."""
        return self._used

    def report(self) -> Report:
        """Return all that the coordinator is to know."""
        holdings = {}
        for attempt in sorted(self._shelf.attempts()):
            if (one := holding(attempt, self._shelf.kept(attempt), self.order(attempt))) is not None:
                holdings[attempt] = one
        return Report(self.attachment, holdings, self._used, self.quota, self._complete)

    def _changed(self) -> None:
        self._wake.set()
        self.changes.ring()

    # ------------------------------------------------------------------ at the start

    async def verify_all(self) -> None:
        """Verify what an earlier life has left, the newest attempt first."""
        for attempt in sorted(self.folder.attempts(), reverse=True):
            try:
                await self._verify_attempt(attempt)
            except (OSError, ValueError) as error:
                logger.warning("%s is not used: %s", self.folder.attempt(attempt), error)
        self._complete = True
        self._changed()

    async def _verify_attempt(self, attempt: SaveAttempt) -> None:
        head = await self._in_thread(partial(read_head, self.folder.attempt(attempt)))
        order = self.order(attempt)
        if head is None or (order is not None and head.reference != order.checkpoint.manifest):
            return
        self._shelf.put_head(attempt, head)
        here = self.folder.files(attempt)
        names = [name for part in head.parts.values() for name in sorted(part & here)]
        await _all(self._verified(attempt, head, name) for name in names)

    # ------------------------------------------------------------------ the orders

    async def run(self) -> None:
        """Carry out the orders until cancelled."""
        try:
            while True:
                self._wake.clear()
                if self.orders is not None:
                    self._begin(self.orders)
                await self._wake.wait()
        finally:
            for task in (*self._running.values(), *self._shared.values()):
                task.cancel()

    def outstanding_persists(self) -> bool:
        """Return whether orders to copy to shared storage are not carried out yet."""
        if self.orders is None:
            return False
        actions = decide(Situation(self.orders, self._kept(self.orders)))
        return any(isinstance(action, PersistPart | CommitPersisted) for action in actions)

    def _kept(self, orders: Orders) -> dict[SaveAttempt, Any]:
        return {one: self._shelf.kept(one) for one in self.folder.attempts() | set(orders.orders)}

    def _begin(self, orders: Orders) -> None:
        busy = {*self._running, *(action for action, rest in self._resting.items() if rest.waits)}
        for action in decide(Situation(orders, self._kept(orders), busy)):
            limit = MAX_PERSISTING if isinstance(action, PersistPart | CommitPersisted) else MAX_FILES
            alike = isinstance(action, PersistPart | CommitPersisted)
            running = sum(isinstance(one, PersistPart | CommitPersisted) == alike for one in self._running)
            if running >= limit:
                continue
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
            self._resting.pop(action, None)
        finally:
            del self._running[action]
            self._used = self.folder.used()
            self._changed()

    def _rest(self, action: Action, error: Exception) -> None:
        rest = self._resting.setdefault(action, _Rest())
        said = str(error)
        if rest.said != said:
            logger.warning("cannot carry out %s yet: %s", action, said)
        rest.said, rest.waits = said, True
        seconds = min(FIRST_REST * 2**rest.failures, MAX_REST)
        rest.failures += 1
        asyncio.get_running_loop().call_later(seconds, self._rested, action, rest)

    def _rested(self, action: Action, rest: _Rest) -> None:
        if self._resting.get(action) is rest:
            rest.waits = False
            self._wake.set()

    async def _act(self, action: Action) -> None:
        match action:
            case GetHead(attempt):
                await self._head(attempt)
            case VerifyFile(attempt, name):
                await self._verified(attempt, await self._head(attempt), name)
            case FetchFile(attempt, name, _):
                await self._file(attempt, name, is_copy=True)
            case DeleteAttempt(attempt):
                self._shelf.drop_attempt(attempt)
                await self._in_thread(lambda: self.folder.delete(attempt))
                logger.info("deleted %s", attempt_name(attempt))
            case PersistPart(attempt, rank):
                if (order := self.order(attempt)) is not None:
                    head, folder = await self._head(attempt), self.folder.attempt(attempt)
                    await self._persister.persist(order.checkpoint, head, folder, rank)
                    self._shelf.put_persisted(attempt, rank)
            case CommitPersisted(attempt):
                if (order := self.order(attempt)) is not None:
                    head, folder = await self._head(attempt), self.folder.attempt(attempt)
                    path = await self._persister.commit(order.checkpoint, head, folder)
                    self._shelf.put_committed(attempt, path)

    # ------------------------------------------------------------------ files

    async def present(self, attempt: SaveAttempt, name: str, *, again: bool = False) -> Path:
        """Return the path of a verified file of an ordered checkpoint. It is fetched if it is not here.

        Args:
            attempt: the checkpoint.
            name: the file.
            again: whether to verify it again.

        Raises:
            NoSourceError: no order names the checkpoint, it has no such file, or no keeper has it.
            OSError: it cannot be fetched, read or written.
        """
        if not await self.changes.until(lambda: self.order(attempt) is not None, ORDERS_PATIENCE):
            if self.orders is None:
                raise SilentSourcesError("the coordinator has not told this keeper yet what there is")
            raise NoSourceError(f"the coordinator names no checkpoint {attempt_name(attempt)}")
        head = await self._head(attempt)
        if name not in HEAD and name not in head.manifest.files:
            raise NoSourceError(f"checkpoint {attempt_name(attempt)} has no file {name}")
        if again:
            await self.verify_again(attempt, name)
        await self._file(attempt, name, is_copy=False)
        return self.folder.file(attempt, name)

    def has(self, attempt: SaveAttempt, name: str) -> bool:
        """Return whether a file is here and verified."""
        try:
            return self._shelf.has(attempt, name)
        except ValueError:
            return False  # The name leads out of the folder.

    def may_come(self, attempt: SaveAttempt, name: str) -> bool:
        """Return whether a file is here, and may be verified soon."""
        return name in self.folder.files(attempt)

    async def verify_again(self, attempt: SaveAttempt, name: str) -> bool:
        """Verify a file that was verified before; return whether it is whole."""
        head = self._shelf.head(attempt)
        if head is None or not self.has(attempt, name):
            return False
        if name in HEAD:
            found = await self._in_thread(lambda: read_head(self.folder.attempt(attempt), head.reference))
            if found is None:
                self._shelf.drop(attempt, name)
                self._changed()
            return found is not None
        return await self._verified(attempt, head, name)

    async def _head(self, attempt: SaveAttempt) -> Head:
        """Return an attempt's verified head; get it if it is not here.

        Raises:
            FetchError: it cannot be fetched.
        """
        if all(self._shelf.has(attempt, name) for name in HEAD):
            found = self._shelf.head(attempt)
            assert found is not None
            return found
        order = self.order(attempt)
        if order is None:
            raise NoSourceError(f"the coordinator no longer names {attempt_name(attempt)}")
        return await self._once(("head", attempt), lambda: self._get_head(order))

    async def _get_head(self, order: Order) -> Head:
        checkpoint = order.checkpoint
        attempt, folder = checkpoint.attempt, self.folder.begin(checkpoint.attempt)
        head = await self._in_thread(lambda: read_head(folder, checkpoint.manifest))
        if head is None:
            urls = in_order((source.url for source in order.sources), self.id)
            await self._in_thread(lambda: self._fetch_head(attempt, folder, checkpoint.manifest, urls))
            head = await self._in_thread(lambda: read_head(folder, checkpoint.manifest))
        if head is None:
            raise SilentSourcesError(f"the manifest of {attempt_name(attempt)} was replaced meanwhile")
        self._shelf.put_head(attempt, head)
        self._changed()
        return head

    def _fetch_head(
        self, attempt: SaveAttempt, folder: Path, reference: ManifestReference, urls: list[str]
    ) -> None:
        """Fetch the manifest and torch's metadata; a thread calls it."""
        sources = Sources(urls, "", f"the manifest of {attempt_name(attempt)}")
        while True:
            url, _ = sources.next()
            try:
                stream = self._transport.open(url, file_path(attempt, MANIFEST))
                data = read_all(stream, reference.size)
                if not reference.matches(data):
                    raise AbsentError(f"{url} has another manifest")
                _write(folder / MANIFEST, data)
                break
            except AbsentError as error:
                sources.absent[url] = str(error)
            except TransportError as error:
                sources.silent[url] = str(error)
        head = Head(reference, Manifest.decode(data))
        where = Sources(urls, file_path(attempt, METADATA), METADATA)
        fetch = Fetch(self._transport, where, head.entry(METADATA), partial_path(folder / METADATA))
        for piece in fetch.missing():
            fetch.get(piece)
        fetch.finish(folder / METADATA)
        sync(folder)

    async def _file(self, attempt: SaveAttempt, name: str, *, is_copy: bool) -> None:
        """See that a file is here and verified.

        Args:
            attempt: the checkpoint.
            name: its file.
            is_copy: whether the quota binds it. It does not bind a recovery.
        """
        if not self.has(attempt, name) and name not in HEAD:
            await self._once(("file", attempt, name), lambda: self._get_file(attempt, name, is_copy))

    async def _get_file(self, attempt: SaveAttempt, name: str, is_copy: bool) -> None:
        head = await self._head(attempt)
        path = self.folder.file(attempt, name)
        if name in self.folder.files(attempt) and await self._verified(attempt, head, name):
            return
        order = self.order(attempt)
        entry = head.entry(name)
        having = [source.url for source in order.sources if entry.rank in source.ranks] if order else []
        sources = Sources(in_order(having, f"{self.id}{name}"), file_path(attempt, name), str(path))
        fetch = Fetch(self._transport, sources, entry, partial_path(path))
        needed = max(entry.size - _size(fetch.partial), 0)
        self._check_space(attempt, name, needed, is_copy)
        self._reserved += needed
        try:
            pieces = await self._in_thread(fetch.missing)
            await _all(self._in_thread(partial(fetch.get, piece)) for piece in pieces)
            await self._in_thread(lambda: fetch.finish(path))
            signature = Signature.of(path)
            await self._in_thread(lambda: sync(path.parent))
        finally:
            self._reserved -= needed
        assert signature is not None
        self._shelf.put(attempt, name, signature)
        self._changed()

    def _check_space(self, attempt: SaveAttempt, name: str, needed: int, is_copy: bool) -> None:
        where = f"{attempt_name(attempt)}/{name} ({needed:,} bytes)"
        free = self.folder.free()
        if needed > free:
            raise QuotaError(
                errno.ENOSPC,
                f"no room for {where}: {self.folder.path} has {free:,} free bytes. Free some of its disk.",
            )
        used = self.folder.used() + self._reserved
        if is_copy and used + needed > self.quota:
            raise QuotaError(
                errno.EDQUOT,
                f"no room for the copy {where}: {self.folder.path} uses {used:,} of its quota of "
                f"{self.quota:,} bytes. Raise --quota, or keep fewer checkpoints.",
            )

    async def _verified(self, attempt: SaveAttempt, head: Head, name: str) -> bool:
        """Verify a file that is here; delete it if it is damaged. Return whether it is whole."""
        return await self._once(("verify", attempt, name), lambda: self._verify(attempt, head, name))

    async def _verify(self, attempt: SaveAttempt, head: Head, name: str) -> bool:
        path = self.folder.file(attempt, name)
        signature = Signature.of(path)
        whole = signature is not None and await self._in_thread(
            lambda: file_is_whole(path.parent, name, head.entry(name))
        )
        if whole and signature is not None and Signature.of(path) == signature:
            self._shelf.put(attempt, name, signature)
        else:
            self._shelf.drop(attempt, name)
            if not whole:
                path.unlink(missing_ok=True)
        self._changed()
        return whole

    # ------------------------------------------------------------------ tasks

    async def _once(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do something once, for all that ask for it meanwhile."""
        task = self._shared.get(key)
        if task is None:
            task = self._shared[key] = asyncio.create_task(make())
            task.add_done_callback(lambda _: self._shared.pop(key, None))
        done: T = await asyncio.shield(task)
        return done

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


async def _all(work: Iterable[Awaitable[object]]) -> None:
    """Wait for all, and raise the first error only when none runs any more."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _size(path: Path) -> int:
    signature = Signature.of(path)
    return 0 if signature is None else signature.size


def _write(path: Path, data: bytes) -> None:
    draft = partial_path(path)
    write_synced(draft, data)
    draft.rename(path)
