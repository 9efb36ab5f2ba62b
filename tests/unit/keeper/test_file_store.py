"""A keeper's files: verified where they are, and fetched from other keepers where they are not."""

import asyncio
import errno
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.directory import METADATA, sync_file
from muster.checkpoint.manifest import MANIFEST
from muster.keeper import file_store as module
from muster.keeper.fetching import DamagedSourcesError, NoSourceError, SilentSourcesError
from muster.keeper.file_store import FileStore, QuotaError, wait_for_all
from muster.keeper.folder import KeeperFolder
from muster.keeper.transport import AbsentError, TransportError
from muster.keeper.verifying import read_head
from muster.keeper.vocabulary import HEAD, Location, Order, Orders
from tests.support.expect import some
from tests.support.keeping.bytes_stream import BytesStream
from tests.support.keeping.checkpoints import MadeCheckpoint, made_checkpoint

PEER = "http://node-1:1"
OTHER = "http://node-2:1"
MINE, THEIRS = "__0_0.distcp", "__1_0.distcp"
QUOTA = 10**9


class Peers:
    """Other keepers, each with some files."""

    def __init__(self) -> None:
        self.files: dict[str, Mapping[str, bytes]] = {}
        """By URL. A keeper without an entry does not answer."""
        self.asked: list[tuple[str, str]] = []
        self.was_asked = threading.Event()
        self.open_now = threading.Event()
        self.open_now.set()
        self.kept: set[str] = set()

    def open(self, url: str, path: str, offset: int = 0, length: int | None = None) -> BytesStream:
        name = path.rpartition("/")[2]
        self.asked.append((url, name))
        self.was_asked.set()
        assert self.open_now.wait(PATIENCE)
        if url not in self.files:
            raise TransportError(f"{url} does not answer")
        if name not in self.files[url]:
            raise AbsentError(f"{url} has no {name}")
        return BytesStream(self.files[url][name][offset:][:length])

    def keep_only(self, urls: Collection[str]) -> None:
        self.kept = set(urls)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture
def made() -> MadeCheckpoint:
    return made_checkpoint(world_size=2, size=100_000)


@pytest.fixture
def peers(made: MadeCheckpoint) -> Peers:
    peers = Peers()
    peers.files[PEER] = made.files
    return peers


@pytest.fixture
def store(tmp_path: Path, threads: ThreadPoolExecutor, peers: Peers, made: MadeCheckpoint) -> FileStore:
    """The store of a node that holds rank 0's part, and may fetch both parts from one peer."""
    folder = KeeperFolder(tmp_path / "local", "job")
    folder.lock()
    store = FileStore(folder, "k0", peers, threads, QUOTA)
    store.orders = ordered(made, PEER)
    return store


def ordered(made: MadeCheckpoint, *urls: str) -> Orders:
    sources = tuple(Location(url, frozenset({0, 1})) for url in urls)
    return Orders({made.attempt: Order(made.local(), ranks=frozenset({0}), sources=sources)})


def damaged(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def fail(_: Path) -> None:
    raise OSError(errno.EIO, "bad disk")


def flip(path: Path) -> None:
    path.write_bytes(damaged(path.read_bytes()))


# ---------------------------------------------------------------------- what is here


async def test_files_that_were_here_at_the_start_are_verified(store: FileStore, made: MadeCheckpoint):
    made.write(store.folder.path, [0, 1], head=True)
    assert not store.has(made.attempt, MINE)
    await store.verify_attempt(made.attempt)
    assert all(store.has(made.attempt, name) for name in made.files)


async def test_damaged_file_is_deleted_and_the_others_are_verified(store: FileStore, made: MadeCheckpoint):
    made.write(store.folder.path, [0, 1], head=True)
    flip(store.folder.file(made.attempt, MINE))
    await store.verify_attempt(made.attempt)
    assert (store.has(made.attempt, MINE), store.has(made.attempt, THEIRS)) == (False, True)
    assert not store.may_come(made.attempt, MINE)


async def test_attempt_with_another_manifest_than_ordered_is_not_verified(
    store: FileStore, made: MadeCheckpoint
):
    made.write(store.folder.path, [0], head=True)
    other = made_checkpoint(world_size=2, number=1)
    store.orders = Orders({made.attempt: Order(other.local())})
    await store.verify_attempt(made.attempt)
    assert store.verified.attempts() == set()


async def test_file_that_was_verified_against_another_manifest_does_not_count(
    store: FileStore, made: MadeCheckpoint
):
    """A disk may have an attempt of the same name from before the coordinator lost its state."""
    old = made_checkpoint(world_size=2, size=90_000)
    assert old.attempt == made.attempt
    old.write(store.folder.path, [0], head=True)
    heads = []
    for one in (old, made):
        one.write(store.folder.path, [], head=True)
        heads.append(some(read_head(store.folder.attempt(one.attempt))))
    store.verified.put_head(made.attempt, heads[0])
    verifying = asyncio.create_task(store.verify_file(made.attempt, heads[0], MINE))
    await asyncio.sleep(0)  # It has begun.
    store.verified.put_head(made.attempt, heads[1])
    assert not await verifying
    assert not store.has(made.attempt, MINE)
    assert not await store.verify_file(made.attempt, heads[1], MINE)
    assert not store.may_come(made.attempt, MINE)


async def test_file_is_not_deleted_by_a_manifest_that_is_not_ordered(store: FileStore, made: MadeCheckpoint):
    """A node may die before the manifest has come of what its ranks have written over an earlier attempt."""
    old = made_checkpoint(world_size=2, size=90_000)
    old.write(store.folder.path, [0], head=True)
    made.write(store.folder.path, [0])
    orders, store.orders = store.orders, None
    await store.verify_attempt(made.attempt)
    assert store.verified.kept(made.attempt).manifest_digest == bytes.fromhex(old.local().manifest.digest)
    assert not store.has(made.attempt, MINE)
    store.orders = orders
    store.verified.drop_other(made.attempt, made.local().manifest)
    assert await store.verify_file(made.attempt, await store.ensure_head(made.attempt), MINE)


async def test_fetch_does_not_count_when_another_manifest_is_ordered_meanwhile(
    store: FileStore, made: MadeCheckpoint, peers: Peers
):
    await store.ensure_head(made.attempt)
    peers.open_now.clear()
    peers.was_asked.clear()
    fetching = asyncio.create_task(store.ensure_file(made.attempt, THEIRS, is_copy=True))
    await store.in_thread(lambda: peers.was_asked.wait(PATIENCE))
    new = made_checkpoint(world_size=2, size=90_000)
    new.write(store.folder.path, [1])
    store.orders = ordered(new, PEER)
    peers.open_now.set()
    with pytest.raises(SilentSourcesError, match="replaced meanwhile"):
        await fetching
    assert not store.has(made.attempt, THEIRS)
    assert store.folder.file(made.attempt, THEIRS).read_bytes() == new.files[THEIRS], "a rank wrote it"


async def test_file_that_was_written_to_since_counts_no_longer(store: FileStore, made: MadeCheckpoint):
    made.write(store.folder.path, [0], head=True)
    await store.verify_attempt(made.attempt)
    path = store.folder.file(made.attempt, MINE)
    path.write_bytes(path.read_bytes() + b"more")
    assert not store.has(made.attempt, MINE)
    assert store.may_come(made.attempt, MINE), "it may be verified, or written, yet"


@pytest.mark.parametrize("name", ["../keeper.json", "a/b", "", "."])
def test_name_that_leads_elsewhere_is_not_here(store: FileStore, made: MadeCheckpoint, name: str):
    assert not store.has(made.attempt, name)


@pytest.mark.parametrize("name", [MINE, *HEAD])
async def test_file_is_verified_again_when_it_is_asked_for(
    store: FileStore, made: MadeCheckpoint, name: str, monkeypatch: pytest.MonkeyPatch
):
    made.write(store.folder.path, [0], head=True)
    assert not await store.verify_again(made.attempt, name), "it was never verified"
    await store.verify_attempt(made.attempt)
    assert await store.verify_again(made.attempt, name)
    # A disk that returns other bytes changes no signature.
    monkeypatch.setattr(module, "file_is_whole", lambda *_: False)
    monkeypatch.setattr(module, "read_head", lambda *_: None)
    assert not await store.verify_again(made.attempt, name)
    assert not store.has(made.attempt, name)


# ---------------------------------------------------------------------- what comes from others


async def test_file_is_fetched_with_the_head_and_recorded(
    store: FileStore, made: MadeCheckpoint, peers: Peers, monkeypatch: pytest.MonkeyPatch
):
    path = await store.path_of(made.attempt, MINE)
    assert path.read_bytes() == made.files[MINE]
    assert store.has(made.attempt, MINE)
    assert store.verified.attempts() == {made.attempt}
    asked = len(peers.asked)
    with monkeypatch.context() as patched:
        patched.setattr(module, "file_is_whole", lambda *_: pytest.fail("it is read again"))
        assert await store.path_of(made.attempt, MINE) == path
    assert len(peers.asked) == asked, "what is here is not fetched again"
    assert sorted(one.name for one in path.parent.iterdir()) == sorted([MINE, *HEAD]), "no draft is left"


async def test_fetched_file_can_be_read_before_it_is_on_the_disk_and_is_held_only_then(
    store: FileStore, made: MadeCheckpoint, monkeypatch: pytest.MonkeyPatch
):
    await store.ensure_head(made.attempt)
    syncs, may_sync = threading.Event(), threading.Event()

    def wait(_: Path) -> None:
        syncs.set()
        may_sync.wait(PATIENCE)

    monkeypatch.setattr(module, "sync_file", wait)
    path = await store.path_of(made.attempt, MINE)
    assert path.read_bytes() == made.files[MINE]
    syncing = asyncio.create_task(store.sync_file(made.attempt, MINE))
    kept = store.verified.kept(made.attempt)
    assert (kept.unsynced, kept.holds(0)) == (frozenset({MINE}), False)
    may_sync.set()
    await syncing
    kept = store.verified.kept(made.attempt)
    assert (kept.unsynced, kept.holds(0)) == (frozenset[str](), True)
    syncs.clear()
    may_sync.clear()
    verifying = asyncio.create_task(store.verify_again(made.attempt, MINE))
    await store.in_thread(lambda: syncs.wait(PATIENCE))
    assert store.verified.kept(made.attempt).holds(0), "it is not changed"
    may_sync.set()
    assert await verifying


@pytest.mark.parametrize("lost", [True, False])
async def test_file_that_cannot_be_put_on_the_disk_is_verified_again(
    store: FileStore, made: MadeCheckpoint, monkeypatch: pytest.MonkeyPatch, lost: bool
):
    """After a sync that failed, the next may succeed, though the bytes are lost."""
    path = await store.path_of(made.attempt, MINE)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="bad disk"):
        patched.setattr(module, "sync_file", fail)
        await store.sync_file(made.attempt, MINE)
    assert not store.has(made.attempt, MINE)
    assert path.exists(), "it may be the only copy"
    if lost:
        flip(path)
    await store.path_of(made.attempt, MINE)
    await store.sync_file(made.attempt, MINE)
    assert path.read_bytes() == made.files[MINE]
    assert store.verified.kept(made.attempt).holds(0)


async def test_part_of_this_node_counts_only_when_it_is_on_the_disk(
    store: FileStore, made: MadeCheckpoint, monkeypatch: pytest.MonkeyPatch
):
    made.write(store.folder.path, [0], head=True)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="bad disk"):
        patched.setattr(module, "sync_file", fail)
        await store.verify_attempt(made.attempt)
    assert not store.verified.kept(made.attempt).holds(0)
    assert store.folder.file(made.attempt, MINE).exists(), "it is the only copy"
    await store.verify_attempt(made.attempt)
    assert store.verified.kept(made.attempt).holds(0)


async def test_head_counts_only_when_it_is_on_the_disk(
    store: FileStore, made: MadeCheckpoint, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patched, pytest.raises(OSError, match="bad disk"):
        patched.setattr(module, "sync_file", fail)
        await store.ensure_head(made.attempt)
    assert not store.may_come(made.attempt, METADATA)
    await store.ensure_head(made.attempt)
    assert store.has(made.attempt, METADATA)


async def test_file_that_is_deleted_while_it_is_synced_is_no_error(
    store: FileStore, made: MadeCheckpoint, monkeypatch: pytest.MonkeyPatch
):
    def delete_and_sync(path: Path) -> None:
        path.unlink()
        sync_file(path)

    await store.path_of(made.attempt, MINE)
    monkeypatch.setattr(module, "sync_file", delete_and_sync)
    await store.sync_file(made.attempt, MINE)
    assert not store.has(made.attempt, MINE)


async def test_file_that_is_damaged_at_one_peer_comes_from_another(
    store: FileStore, made: MadeCheckpoint, peers: Peers
):
    store.orders = ordered(made, PEER, OTHER)
    for bad, good in ((PEER, OTHER), (OTHER, PEER)):
        peers.files = {bad: {**made.files, THEIRS: damaged(made.files[THEIRS])}, good: made.files}
        path = await store.path_of(made.attempt, THEIRS)
        assert path.read_bytes() == made.files[THEIRS]
        path.unlink()


@pytest.mark.parametrize("name", [MANIFEST, METADATA, MINE])
async def test_file_that_only_damaged_copies_have_is_never_handed_out(
    store: FileStore, made: MadeCheckpoint, peers: Peers, name: str
):
    peers.files[PEER] = {**made.files, name: damaged(made.files[name])}
    with pytest.raises((DamagedSourcesError, NoSourceError)):
        await store.path_of(made.attempt, MINE)
    assert not store.has(made.attempt, MINE)
    assert not store.may_come(made.attempt, MINE)


async def test_silence_of_a_peer_is_not_taken_for_absence(
    store: FileStore, made: MadeCheckpoint, peers: Peers
):
    store.orders = ordered(made, PEER, OTHER)
    peers.files = {OTHER: {}}
    with pytest.raises(SilentSourcesError):
        await store.path_of(made.attempt, MINE)
    peers.files = {OTHER: {}, PEER: {}}
    with pytest.raises(NoSourceError):
        await store.path_of(made.attempt, MINE)


async def test_file_that_the_checkpoint_does_not_have_is_refused(store: FileStore, made: MadeCheckpoint):
    with pytest.raises(NoSourceError, match=r"checkpoint 1-0 has no file __7_0\.distcp"):
        await store.path_of(made.attempt, "__7_0.distcp")


async def test_checkpoint_that_no_order_names_is_refused(
    store: FileStore, made: MadeCheckpoint, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "ORDERS_PATIENCE", 0.0)
    with pytest.raises(NoSourceError, match="the coordinator names no checkpoint 9-9"):
        await store.path_of(SaveAttempt(9, 9), MINE)
    store.orders = None
    with pytest.raises(SilentSourcesError, match="has not told this keeper yet"):
        await store.path_of(made.attempt, MINE)


async def test_request_waits_for_the_order_that_names_its_checkpoint(store: FileStore, made: MadeCheckpoint):
    orders, store.orders = store.orders, None
    asked = asyncio.create_task(store.path_of(made.attempt, MINE))
    await asyncio.sleep(0)
    assert not asked.done()
    store.orders = orders
    store.changes.notify()
    async with asyncio.timeout(PATIENCE):
        assert (await asked).read_bytes() == made.files[MINE]


async def test_callers_that_ask_at_the_same_time_share_one_fetch(
    store: FileStore, made: MadeCheckpoint, peers: Peers
):
    peers.open_now.clear()
    asked = [asyncio.create_task(store.path_of(made.attempt, MINE)) for _ in range(5)]
    assert await asyncio.to_thread(peers.was_asked.wait, PATIENCE)
    asked.pop().cancel()
    peers.open_now.set()
    async with asyncio.timeout(PATIENCE):
        paths = await asyncio.gather(*asked)
    assert set(paths) == {store.folder.file(made.attempt, MINE)}
    assert sorted(name for _, name in peers.asked) == sorted([MINE, *HEAD])


async def test_cancelled_work_ends_for_its_callers(store: FileStore, made: MadeCheckpoint, peers: Peers):
    peers.open_now.clear()
    asked = asyncio.create_task(store.ensure_head(made.attempt))
    assert await asyncio.to_thread(peers.was_asked.wait, PATIENCE)
    store.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    peers.open_now.set()  # Its thread ends by itself.


def test_file_of_a_part_that_others_hold_is_named_with_its_addresses(store: FileStore, made: MadeCheckpoint):
    assert store.elsewhere(made.attempt, THEIRS) == [], "its head is not known yet"
    made.write(store.folder.path, [], head=True)
    asyncio.run(store.verify_attempt(made.attempt))
    (url,) = store.elsewhere(made.attempt, THEIRS)
    assert url.startswith(PEER)
    assert url.endswith(f"1-0/{THEIRS}")
    assert store.elsewhere(made.attempt, MINE) == [], "this keeper is to hold it"
    assert store.elsewhere(made.attempt, "__7_0.distcp") == []
    assert store.elsewhere(SaveAttempt(9, 9), THEIRS) == []


def test_connections_are_kept_to_named_keepers_alone(store: FileStore, peers: Peers):
    store.keep_connections([OTHER])
    assert peers.kept == {OTHER}


# ---------------------------------------------------------------------- space


async def test_copy_beyond_the_quota_is_refused_and_a_file_to_resume_from_is_not(
    store: FileStore, made: MadeCheckpoint
):
    await store.ensure_head(made.attempt)
    store.quota = store.folder.used() + len(made.files[MINE]) - 1
    with pytest.raises(
        QuotaError, match=r"no room for the copy 1-0/__0_0\.distcp \(100,000 bytes\)"
    ) as raised:
        await store.ensure_file(made.attempt, MINE, is_copy=True)
    assert raised.value.errno == errno.EDQUOT
    assert not store.may_come(made.attempt, MINE)
    await store.ensure_file(made.attempt, MINE, is_copy=False)
    assert store.has(made.attempt, MINE)


async def test_failed_fetch_leaves_its_room_to_the_next(store: FileStore, made: MadeCheckpoint, peers: Peers):
    await store.ensure_head(made.attempt)
    store.quota = store.folder.used() + len(made.files[MINE]) + 4_096
    peers.files[PEER] = {}
    for _ in range(3):
        with pytest.raises(NoSourceError):
            await store.ensure_file(made.attempt, MINE, is_copy=True)
    peers.files[PEER] = made.files
    await store.ensure_file(made.attempt, MINE, is_copy=True)
    assert store.has(made.attempt, MINE)


async def test_file_that_does_not_fit_on_the_disk_is_refused(
    store: FileStore, made: MadeCheckpoint, monkeypatch: pytest.MonkeyPatch
):
    await store.ensure_head(made.attempt)
    usage = shutil.disk_usage(store.folder.path)._replace(free=99_999)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(QuotaError, match="has 99,999 free bytes") as raised:
        await store.ensure_file(made.attempt, MINE, is_copy=False)
    assert raised.value.errno == errno.ENOSPC


async def test_all_work_ends_before_its_first_error_is_raised():
    ended: list[str] = []

    async def work(name: str, error: Exception | None, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        ended.append(name)
        if error is not None:
            raise error

    with pytest.raises(ValueError, match="first"):
        await wait_for_all(
            [work("a", ValueError("first"), 1), work("b", OSError("second"), 0), work("c", None, 9)]
        )
    assert ended == ["b", "a", "c"]
