"""A keeper retries failed actions, and keeps connections only to keepers that it may ask again."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from muster.client.protocol import MAX_HOLDINGS
from muster.keeper import file_store
from muster.keeper import keeper as module
from muster.keeper.file_store import FileStore
from muster.keeper.folder import KeeperFolder
from muster.keeper.keeper import Keeper
from muster.keeper.persisting.destination import LostFilesError
from muster.keeper.transport import Stream, Transport, TransportError
from muster.keeper.vocabulary import Head, LocalCheckpoint, Location, Order, Orders, Peers
from tests.support.keeping.bytes_stream import BytesStream
from tests.support.keeping.checkpoints import MadeCheckpoint, made_checkpoint

SOURCE = "http://node-1:1"


class SilentTransport:
    """No keeper answers.

    Args:
        enough: requests after which ``was_asked`` is set.
    """

    def __init__(self, enough: int) -> None:
        self._left = enough
        self._loop = asyncio.get_running_loop()
        self.was_asked = asyncio.Event()
        self.kept: set[str] = set()

    def open(self, url: str, path: str, offset: int = 0, length: int | None = None) -> Stream:
        self._left -= 1
        if not self._left:
            self._loop.call_soon_threadsafe(self.was_asked.set)
        raise TransportError(f"{url} does not answer")

    def keep_only(self, urls: Collection[str]) -> None:
        self.kept = set(urls)


class FakePersister:
    """Needs files on this node for a commit.

    Args:
        needed: their names.
    """

    def __init__(self, *needed: str) -> None:
        self._needed = needed
        self.was_prepared = asyncio.Event()

    async def persist(self, checkpoint: LocalCheckpoint, head: Head, folder: Path, rank: int) -> None:
        raise NotImplementedError

    async def prepare(self, checkpoint: LocalCheckpoint, head: Head, folder: Path) -> str:
        if gone := [name for name in self._needed if not (folder / name).exists()]:
            raise LostFilesError(gone, "/shared/step_10")
        self.was_prepared.set()
        return "/shared/step_10"

    async def commit(
        self, checkpoint: LocalCheckpoint, head: Head, unsettled: Sequence[LocalCheckpoint]
    ) -> str:
        raise NotImplementedError


class OneSource:
    """A keeper that has all files of a checkpoint."""

    def __init__(self, made: MadeCheckpoint) -> None:
        self._made = made

    def open(self, url: str, path: str, offset: int = 0, length: int | None = None) -> BytesStream:
        return BytesStream(self._made.files[path.rpartition("/")[2]][offset:][:length])

    def keep_only(self, urls: Collection[str]) -> None:
        pass


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def keeper_in(
    folder: Path, transport: Transport, threads: ThreadPoolExecutor, persister: FakePersister | None = None
) -> Keeper:
    local = KeeperFolder(folder, "job")
    local.lock()
    files = FileStore(local, "k0", transport, threads, 10**9)
    return Keeper("k0", files, persister or FakePersister())


def orders_from(*sources: Location) -> Orders:
    made = made_checkpoint()
    return Orders({made.attempt: Order(made.local(), ranks=frozenset({0}), sources=sources)})


async def test_action_that_fails_a_thousand_times_is_tried_again(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MAX_PAUSE", 0.0)
    transport = SilentTransport(enough=1_100)
    keeper = keeper_in(tmp_path, transport, threads)
    keeper.take_orders(orders_from(Location(SOURCE, frozenset({0}))))
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(PATIENCE):
        await transport.was_asked.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_connections_are_kept_to_peers_and_sources_alone(tmp_path: Path, threads: ThreadPoolExecutor):
    transport = SilentTransport(enough=1)
    keeper = keeper_in(tmp_path, transport, threads)
    keeper.take_peers(Peers("token", (Location("http://node-2:1", frozenset({1})),)))
    assert transport.kept == {"http://node-2:1"}
    keeper.take_orders(orders_from(Location(SOURCE, frozenset({0}))))
    assert transport.kept == {"http://node-2:1", SOURCE}
    keeper.take_peers(Peers("token"))
    keeper.take_orders(Orders())
    assert transport.kept == set()


async def test_keeper_reports_ordered_checkpoints_and_then_the_newest(
    tmp_path: Path, threads: ThreadPoolExecutor
):
    keeper = keeper_in(tmp_path, SilentTransport(enough=1), threads)
    made = [made_checkpoint(1, number, size=10) for number in range(MAX_HOLDINGS + 3)]
    for one in made:
        one.write(keeper.files.folder.path, [0], head=True)
    await keeper.verify_all()
    newest = [one.attempt for one in made[3:]]
    assert list(keeper.report().holdings) == newest
    keeper.take_orders(Orders({made[1].attempt: Order(made[1].local(), ranks=frozenset({0}))}))
    assert list(keeper.report().holdings) == [made[1].attempt, *newest[1:]]


def asking(made: MadeCheckpoint, number: int, *urls: str) -> Orders:
    """Orders that name a checkpoint and the sources of its manifest, and ask to confirm a number."""
    sources = tuple(Location(url, frozenset()) for url in urls)
    return Orders({made.attempt: Order(made.local(), sources=sources)}, confirm=number)


@asynccontextmanager
async def running(keeper: Keeper) -> AsyncIterator[None]:
    task = asyncio.create_task(keeper.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def confirmed(keeper: Keeper, number: int) -> None:
    assert await keeper.changes.until(lambda: keeper.report().confirmed == number, PATIENCE)


async def test_orders_are_confirmed_when_all_that_is_here_is_verified(
    tmp_path: Path, threads: ThreadPoolExecutor
):
    """The part was written after the keeper had started."""
    made = made_checkpoint()
    keeper = keeper_in(tmp_path, SilentTransport(enough=1), threads)
    await keeper.verify_all()
    keeper.take_orders(Orders(confirm=6))
    assert keeper.report().confirmed == 6
    made.write(keeper.files.folder.path, [0], head=True)
    keeper.take_orders(asking(made, 7))
    assert keeper.report().confirmed == 0
    async with running(keeper):
        await confirmed(keeper, 7)
    assert keeper.report().holdings[made.attempt].ranks == {0}
    keeper.forget_question()
    assert keeper.report().confirmed == 0, "these orders came on a stream that has ended"


async def test_keeper_waits_for_the_manifest_of_a_part_as_long_as_somebody_has_it(
    tmp_path: Path, threads: ThreadPoolExecutor
):
    made = made_checkpoint()
    keeper = keeper_in(tmp_path, OneSource(made), threads)
    made.write(keeper.files.folder.path, [0])
    keeper.take_orders(asking(made, 1))
    assert keeper.report().confirmed == 1, "nobody has it"
    keeper.take_orders(asking(made, 2, SOURCE))
    assert keeper.report().confirmed == 0
    async with running(keeper):
        await confirmed(keeper, 2)
    assert keeper.report().holdings[made.attempt].ranks == {0}


async def test_keeper_does_not_wait_for_a_manifest_from_a_silent_source(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0)
    made = made_checkpoint()
    transport = SilentTransport(enough=module.PATIENT_FAILURES)
    keeper = keeper_in(tmp_path, transport, threads)
    made.write(keeper.files.folder.path, [0])
    keeper.take_orders(asking(made, 1, SOURCE))
    async with running(keeper):
        await confirmed(keeper, 1)
        assert transport.was_asked.is_set(), "one failure may be by chance"
        keeper.take_orders(asking(made, 1, SOURCE))
        assert keeper.report().confirmed == 1
        keeper.take_orders(asking(made, 1, "http://node-2:1"))
        assert keeper.report().confirmed == 0, "another one may have it"
        await confirmed(keeper, 1)
        keeper.take_orders(asking(made, 2, "http://node-2:1"))
        assert keeper.report().confirmed == 0, "what failed before the question is no answer"
        await confirmed(keeper, 2)


class SlowToFail:
    """One keeper fails when it is told to, and another one answers."""

    def __init__(self, made: MadeCheckpoint) -> None:
        self._answers = OneSource(made)
        self._loop = asyncio.get_running_loop()
        self.was_asked = asyncio.Event()
        self.fail_now = threading.Event()

    def open(self, url: str, path: str, offset: int = 0, length: int | None = None) -> Stream:
        if url != SOURCE:
            return self._answers.open(url, path, offset, length)
        self._loop.call_soon_threadsafe(self.was_asked.set)
        assert self.fail_now.wait(PATIENCE)
        raise TransportError(f"{url} does not answer")

    def keep_only(self, urls: Collection[str]) -> None:
        pass


async def test_failure_of_an_earlier_source_does_not_count_against_the_present_one(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "PATIENT_FAILURES", 1)
    monkeypatch.setattr(module, "FIRST_PAUSE", 10 * PATIENCE)
    made = made_checkpoint()
    transport = SlowToFail(made)
    keeper = keeper_in(tmp_path, transport, threads)
    made.write(keeper.files.folder.path, [0])
    keeper.take_orders(asking(made, 1, SOURCE))
    async with running(keeper):
        await transport.was_asked.wait()
        keeper.take_orders(asking(made, 2, "http://node-2:1"))
        transport.fail_now.set()
        await confirmed(keeper, 2)
    assert keeper.report().holdings[made.attempt].ranks == {0}


async def test_local_checkpoint_is_verified_while_a_source_does_not_answer(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MAX_FILES", 1)
    old, new = made_checkpoint(number=0), made_checkpoint(number=1)
    transport = SlowToFail(old)
    keeper = keeper_in(tmp_path, transport, threads)
    old.write(keeper.files.folder.path, [], head=True)
    sources = (Location(SOURCE, frozenset({0})),)
    orders = {old.attempt: Order(old.local(), ranks=frozenset({0}), sources=sources)}
    keeper.take_orders(Orders(orders))
    async with running(keeper):
        await transport.was_asked.wait()
        new.write(keeper.files.folder.path, [0], head=True)
        keeper.take_orders(Orders({**orders, new.attempt: Order(new.local())}, confirm=1))
        await confirmed(keeper, 1)
        transport.fail_now.set()


async def test_other_sources_do_not_reset_the_failures_to_verify(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    """A file that cannot be read cannot be read by other orders either."""
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0)
    made = made_checkpoint()
    keeper = keeper_in(tmp_path, OneSource(made), threads)
    made.write(keeper.files.folder.path, [0], head=True)
    monkeypatch.setattr(file_store, "file_is_whole", cannot_read)
    keeper.take_orders(asking(made, 1, SOURCE))
    async with running(keeper):
        await confirmed(keeper, 1)
        keeper.take_orders(asking(made, 1, "http://node-2:1"))
        assert keeper.report().confirmed == 1


def cannot_read(folder: Path, name: str, entry: object) -> bool:
    raise OSError("Input/output error")


async def test_part_that_vanished_from_shared_storage_is_fetched_for_the_commit(
    tmp_path: Path, threads: ThreadPoolExecutor
):
    made = made_checkpoint()
    persister = FakePersister("__1_0.distcp")
    keeper = keeper_in(tmp_path, OneSource(made), threads, persister)
    made.write(keeper.files.folder.path, [0], head=True)
    order = Order(
        made.local(persist_to="/shared"),
        ranks=frozenset({0}),
        sources=(Location(SOURCE, frozenset({1})),),
        commit=True,
    )
    keeper.take_orders(Orders({made.attempt: order}))
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(PATIENCE):
        await persister.was_prepared.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    path = keeper.files.folder.file(made.attempt, "__1_0.distcp")
    assert path.read_bytes() == made.files["__1_0.distcp"]


async def test_head_file_that_turns_out_damaged_is_fetched_again(tmp_path: Path, threads: ThreadPoolExecutor):
    made = made_checkpoint()
    keeper = keeper_in(tmp_path, OneSource(made), threads)
    made.write(keeper.files.folder.path, [0], head=True)
    keeper.take_orders(orders_from(Location(SOURCE, frozenset({0}))))
    path = await keeper.files.path_of(made.attempt, ".metadata")
    before = path.stat()
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = await keeper.files.path_of(made.attempt, ".metadata", again=True)
    assert again.read_bytes() == made.files[".metadata"]
