"""Verifies the files of a keeper's folder, and fetches missing ones from other keepers."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.directory import METADATA, sync, sync_file, write_synced
from muster.checkpoint.local_folder import attempt_name
from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestReference
from muster.keeper.change_signal import ChangeSignal
from muster.keeper.fetching import (
    Fetch,
    NoSourceError,
    SilentSourcesError,
    Sources,
    file_path,
    shuffled,
)
from muster.keeper.folder import KeeperFolder, Signature, partial_path
from muster.keeper.orders import wanted_ranks
from muster.keeper.transport import AbsentError, Transport, TransportError, read_all
from muster.keeper.verified_files import VerifiedFiles
from muster.keeper.verifying import file_is_whole, read_head
from muster.keeper.vocabulary import HEAD, Head, Order, Orders

T = TypeVar("T")

CONNECTIONS = 4
"""Pieces of one file that are fetched at the same time."""
ORDERS_PATIENCE = 10.0
"""Seconds for which a rank's request waits for orders that name its checkpoint."""


class QuotaError(OSError):
    """A copy does not fit in the folder."""


class FileStore:
    """Verifies the files of the folder, and fetches missing ones. Only the event loop's thread uses it.

    Args:
        folder: where the files are.
        keeper_id: the keeper's. The order in which sources are asked depends on it.
        transport: fetches bytes from other keepers.
        threads: run calls that wait for a disk or the network.
        quota: bytes that the folder may take.
    """

    def __init__(
        self, folder: KeeperFolder, keeper_id: str, transport: Transport, threads: Executor, quota: int
    ) -> None:
        self.folder = folder
        self.quota = quota
        self.orders: Orders | None = None
        """None until the coordinator has sent the first ones."""
        self.verified = VerifiedFiles(folder)
        self.changes = ChangeSignal()
        """Notified when the files, the orders, the peers or the attached ranks may have changed."""
        self._id = keeper_id
        self._transport = transport
        self._threads = threads
        self._shared: dict[Hashable, asyncio.Task[Any]] = {}
        """Work that several callers may wait for, by its kind and file."""
        self._reserved = 0
        """Bytes that the running fetches still need."""

    def order(self, attempt: SaveAttempt) -> Order | None:
        """Return the order about an attempt."""
        return None if self.orders is None else self.orders.orders.get(attempt)

    def keep_connections(self, urls: Collection[str]) -> None:
        """Keep the connections to these keepers alone."""
        self._transport.keep_only(urls)

    def cancel(self) -> None:
        """Cancel all work."""
        for task in self._shared.values():
            task.cancel()

    async def verify_attempt(self, attempt: SaveAttempt) -> None:
        """Verify the files of an attempt that were in the folder at the start.

        Raises:
            OSError: a file cannot be read.
            ValueError: the manifest is unusable.
        """
        head = await self.in_thread(partial(read_head, self.folder.attempt(attempt)))
        order = self.order(attempt)
        if head is None or (order is not None and head.reference != order.checkpoint.manifest):
            return
        self.verified.put_head(attempt, head)
        here = self.folder.files(attempt)
        names = [name for part in head.parts.values() for name in sorted(part & here)]
        await wait_for_all(self.verify_file(attempt, head, name) for name in names)

    async def path_of(self, attempt: SaveAttempt, name: str, *, again: bool = False) -> Path:
        """Return the path of a verified file of an ordered checkpoint. Fetch the file if it is not here.

        Args:
            attempt: the checkpoint.
            name: the file.
            again: whether to verify the file again first.

        Raises:
            NoSourceError: no order names the checkpoint within ``ORDERS_PATIENCE``, it has no such file, or
                no keeper has the file.
            DamagedSourcesError: all copies are damaged.
            SilentSourcesError: there are no orders yet, or a source does not answer.
            OSError: the file cannot be read or written.
        """
        if not await self.changes.until(lambda: self.order(attempt) is not None, ORDERS_PATIENCE):
            if self.orders is None:
                raise SilentSourcesError("the coordinator has not told this keeper yet what there is")
            raise NoSourceError(f"the coordinator names no checkpoint {attempt_name(attempt)}")
        head = await self.ensure_head(attempt)
        if name not in HEAD and name not in head.manifest.files:
            raise NoSourceError(f"checkpoint {attempt_name(attempt)} has no file {name}")
        if again:
            await self.verify_again(attempt, name)
            await self.ensure_head(attempt)  # A damaged file of the head is replaced.
        await self.ensure_file(attempt, name, is_copy=False)
        return self.folder.file(attempt, name)

    def elsewhere(self, attempt: SaveAttempt, name: str) -> list[str]:
        """Return the URLs of a file at other keepers, if this keeper neither has it nor is to hold it.

        The list is empty if the file is here, if this keeper is to hold it, or if its orders or the manifest
        are not known yet.
        """
        order, head = self.order(attempt), self.verified.head(attempt)
        if order is None or head is None or name in HEAD or self.has(attempt, name):
            return []
        entry = head.manifest.files.get(name)
        if entry is None or entry.rank in wanted_ranks(order):
            return []
        path = file_path(attempt, name)
        return [f"{source.url}{path}" for source in order.sources if entry.rank in source.ranks]

    def has(self, attempt: SaveAttempt, name: str) -> bool:
        """Return whether a file is here and verified."""
        return self.verified.has(attempt, name)

    def may_come(self, attempt: SaveAttempt, name: str) -> bool:
        """Return whether a file is here, verified or not."""
        return name in self.folder.files(attempt)

    async def verify_again(self, attempt: SaveAttempt, name: str) -> bool:
        """Verify a file that was verified before; return whether it is whole."""
        head = self.verified.head(attempt)
        if head is None or not self.has(attempt, name):
            return False
        if name in HEAD:
            found = await self.in_thread(lambda: read_head(self.folder.attempt(attempt), head.reference))
            if found is None:
                self.verified.drop(attempt, name)
                self.changes.notify()
            return found is not None
        return await self.verify_file(attempt, head, name)

    async def ensure_head(self, attempt: SaveAttempt) -> Head:
        """Return an attempt's verified head. Verify or fetch it first if need be.

        Raises:
            FetchError: no source has it, or none answers.
            OSError: it cannot be read or written.
            UnusableManifestError: the manifest names files that no rank writes.
        """
        if all(self.verified.has(attempt, name) for name in HEAD):
            found = self.verified.head(attempt)
            assert found is not None
            return found
        order = self.order(attempt)
        if order is None:
            raise NoSourceError(f"the coordinator no longer names {attempt_name(attempt)}")
        head = await self._once(("head", attempt), lambda: self._get_head(order))
        self._check_current(attempt, head.reference)
        return head

    def _check_current(self, attempt: SaveAttempt, reference: ManifestReference) -> None:
        """Check that the orders name this manifest. A coordinator without its state may give a number twice.

        Raises:
            SilentSourcesError: they do not.
        """
        if not self._is_current(attempt, reference):
            raise SilentSourcesError(f"the manifest of {attempt_name(attempt)} was replaced meanwhile")

    def _is_current(self, attempt: SaveAttempt, reference: ManifestReference) -> bool:
        order = self.order(attempt)
        return order is not None and order.checkpoint.manifest == reference

    async def _get_head(self, order: Order) -> Head:
        checkpoint = order.checkpoint
        attempt, folder = checkpoint.attempt, self.folder.begin(checkpoint.attempt)
        head = await self.in_thread(lambda: read_head(folder, checkpoint.manifest))
        if head is None:
            urls = shuffled((source.url for source in order.sources), self._id)
            await self.in_thread(lambda: self._fetch_head(attempt, folder, checkpoint.manifest, urls))
            head = await self.in_thread(lambda: read_head(folder, checkpoint.manifest))
        if head is None:
            raise SilentSourcesError(f"the manifest of {attempt_name(attempt)} was replaced meanwhile")
        self._check_current(attempt, head.reference)
        self.verified.put_head(attempt, head)
        self.changes.notify()
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
        # In a thread, but the orders are only read: what a rank has written meanwhile is not to be replaced.
        self._check_current(attempt, reference)
        _write(folder / MANIFEST, data)
        _sync_or_forget(fetch.partial)
        fetch.finish(folder / METADATA)
        sync(folder)

    async def ensure_file(self, attempt: SaveAttempt, name: str, *, is_copy: bool) -> None:
        """Verify a file that is here, or fetch it. It can be read then, and may not be on the disk yet.

        Args:
            attempt: the checkpoint.
            name: its file. For a file of the head nothing is done.
            is_copy: whether the quota applies. It does not apply to a file that a rank needs to resume.

        Raises:
            FetchError: no source has the file whole, or none answers.
            QuotaError: the file does not fit into the quota, or on the disk.
            OSError: the file cannot be read or written.
        """
        if self.has(attempt, name) or name in HEAD:
            return
        try:
            await self._once(("file", attempt, name), lambda: self._get_file(attempt, name, is_copy))
        except QuotaError:
            if is_copy:
                raise
            # This call joined a fetch to which the quota applies.
            await self._once(("file", attempt, name), lambda: self._get_file(attempt, name, is_copy=False))

    async def _get_file(self, attempt: SaveAttempt, name: str, is_copy: bool) -> None:
        head = await self.ensure_head(attempt)
        path = self.folder.file(attempt, name)
        if name in self.folder.files(attempt) and await self.verify_file(attempt, head, name):
            return
        order = self.order(attempt)
        entry = head.entry(name)
        having = [source.url for source in order.sources if entry.rank in source.ranks] if order else []
        sources = Sources(shuffled(having, f"{self._id}{name}"), file_path(attempt, name), str(path))
        fetch = Fetch(self._transport, sources, entry, partial_path(path))
        needed = max(entry.size - _size(fetch.partial), 0)
        self._check_space(attempt, name, needed, is_copy)
        self._reserved += needed
        try:
            pieces = await self.in_thread(fetch.missing)
            turns = asyncio.Semaphore(CONNECTIONS)
            await wait_for_all(self._in_turn(turns, partial(fetch.get, piece)) for piece in pieces)
            self._check_current(attempt, head.reference)  # Else it may replace what a rank has written.
            fetch.finish(path)
        finally:
            self._reserved -= needed
        signature = Signature.of(path)
        assert signature is not None
        self.verified.put(attempt, head, name, signature, synced=False)
        self.changes.notify()

    async def sync_file(self, attempt: SaveAttempt, name: str) -> None:
        """Put a verified file on the disk, so that it counts as held.

        Raises:
            OSError: it cannot be written. It must be verified again, by what is on the disk.
        """
        await self._once(("sync", attempt, name), lambda: self._sync_file(attempt, name))

    async def _sync_file(self, attempt: SaveAttempt, name: str) -> None:
        head, path = self.verified.head(attempt), self.folder.file(attempt, name)
        signature = Signature.of(path)
        if head is None or signature is None or not self.has(attempt, name):
            return
        try:
            await self.in_thread(partial(_put_on_disk, path))
        except FileNotFoundError:
            return  # It was deleted meanwhile.
        except OSError:
            self.verified.drop(attempt, name)
            self.changes.notify()
            raise
        if self.has(attempt, name) and Signature.of(path) == signature:
            self.verified.put(attempt, head, name, signature)
            self.changes.notify()

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

    async def verify_file(self, attempt: SaveAttempt, head: Head, name: str) -> bool:
        """Verify a file that is here, put it on the disk, and return whether it is whole.

        A damaged file is deleted, if the orders name this head: by another one, it may be whole.

        Raises:
            OSError: it cannot be read, or written.
        """
        key = ("verify", attempt, name, head.reference)
        return await self._once(key, lambda: self._verify(attempt, head, name))

    async def _verify(self, attempt: SaveAttempt, head: Head, name: str) -> bool:
        path = self.folder.file(attempt, name)
        signature = Signature.of(path)
        whole = signature is not None and await self.in_thread(
            lambda: file_is_whole(path.parent, name, head.entry(name))
        )
        known = self.verified.head(attempt)
        if known is None or known.reference != head.reference:
            return False  # Another manifest was ordered meanwhile; the file is verified against that one.
        if not whole:
            self.verified.drop(attempt, name)
            if self._is_current(attempt, head.reference):
                path.unlink(missing_ok=True)
        elif signature is not None and Signature.of(path) == signature:
            self.verified.put(attempt, head, name, signature, synced=False)
            await self.sync_file(attempt, name)
        else:
            self.verified.drop(attempt, name)
        self.changes.notify()
        return whole

    # ------------------------------------------------------------------ tasks

    async def _once(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Share one task among all callers that ask for the same key while it runs."""
        task = self._shared.get(key)
        if task is None:
            task = self._shared[key] = asyncio.create_task(make())
            task.add_done_callback(lambda _: self._shared.pop(key, None))
        done: T = await asyncio.shield(task)
        return done

    async def _in_turn(self, turns: asyncio.Semaphore, work: Callable[[], None]) -> None:
        async with turns:
            await self.in_thread(work)
        self.changes.notify()  # A long fetch has progressed.

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a call that waits for a disk or the network in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


async def wait_for_all(work: Iterable[Awaitable[object]]) -> None:
    """Wait for all, and raise the first error when all have ended."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _put_on_disk(path: Path) -> None:
    _sync_or_forget(path)
    sync(path.parent)


def _sync_or_forget(path: Path) -> None:
    """Sync a file; if that fails, have the kernel forget what it has of it.

    It may have lost bytes, and the next read must come from the disk.

    Raises:
        OSError: it cannot be synced.
    """
    try:
        sync_file(path)
    except OSError:
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        raise


def _size(path: Path) -> int:
    signature = Signature.of(path)
    return 0 if signature is None else signature.size


def _write(path: Path, data: bytes) -> None:
    draft = partial_path(path)
    write_synced(draft, data)
    draft.rename(path)
