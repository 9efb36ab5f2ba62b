"""Requests of ranks to their keeper."""

import gc
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from muster.keeper.file_store import FileStore
from muster.keeper.folder import KeeperFolder
from muster.keeper.keeper import Keeper
from muster.keeper.server import KeeperApi
from muster.keeper.transport import Stream, TransportError


class NoTransport:
    """No other keeper answers."""

    def open(self, url: str, path: str, offset: int = 0, length: int | None = None) -> Stream:
        raise TransportError(f"{url} does not answer")

    def keep_only(self, urls: Collection[str]) -> None:
        pass


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


async def test_refused_take_leaves_no_read_behind(
    tmp_path: Path, threads: ThreadPoolExecutor, recwarn: pytest.WarningsRecorder
):
    folder = KeeperFolder(tmp_path, "job")
    folder.lock()
    files = FileStore(folder, "k0", NoTransport(), threads, 10**9)
    keeper = Keeper("k0", files, None)  # type: ignore[arg-type]
    keeper.attach(1, 2, 0, 1)
    api = KeeperApi(keeper, NoTransport(), threads, "secret")
    async with TestClient(TestServer(api.for_ranks())) as client:
        for second, status in (([1, "note"], 503), ("junk", 400)):
            answer = await client.post(
                "/take",
                json={"attempt": "1-0", "notes": [[0, "note"], second]},
                headers={"Authorization": "Bearer secret"},
            )
            assert answer.status == status
    gc.collect()
    assert not [one for one in recwarn if "never awaited" in str(one.message)]
