"""A keeper as a process: lock the folder, serve, verify, keep the stream, stop."""

import asyncio
import logging
import os
import secrets
import signal
import ssl
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from importlib.metadata import version
from typing import Any

from aiohttp import web

from muster.keeper.coordinator_stream import CoordinatorLink, KeeperAddress
from muster.keeper.file_store import FileStore
from muster.keeper.folder import FolderInUseError, KeeperFolder
from muster.keeper.keeper import Keeper
from muster.keeper.measuring import MeasuredTransport
from muster.keeper.persisting.persister import SharedStoragePersister
from muster.keeper.server import KeeperApi
from muster.keeper.settings import KeeperSettings, own_host, url_of
from muster.keeper.tls import Tls
from muster.keeper.transport import HttpTransport

logger = logging.getLogger(__name__)

THREADS = 24
"""Threads that fetch and verify. Half of them may wait for peers that have fallen silent."""
FOLLOW_PACE = 1.0
"""Seconds between two looks at the process that is followed, where the kernel does not tell of its end."""
LINGER = 120.0
"""Seconds that a keeper goes on after the followed process, while it has parts to copy to shared storage."""
SHUTDOWN_TIMEOUT = 1.0
"""Seconds that answers may still take when the keeper stops."""
IDLE_PACE = 5.0
"""Seconds between two looks whether a rank is connected."""


class UnusedError(RuntimeError):
    """No rank has used the keeper for as long as its settings say."""


def run_until_stopped(settings: KeeperSettings) -> str | None:
    """Run a keeper in this process, and log to stderr.

    Returns:
        Why it cannot run; None: it was told to stop.

    Raises:
        UnusedError: no rank has used it for long.
    """
    logging.basicConfig(level=logging.INFO, format=log_format(settings.run_id))
    try:
        asyncio.run(run_keeper(settings))
    except (OSError, ValueError, FolderInUseError) as error:
        return str(error)
    return None


def log_format(run_id: str) -> str:
    """Return the format of log lines. They name the run, since the keepers of a node may share a stream."""
    return f"%(asctime)s %(levelname)s {run_id.replace('%', '%%')} %(name)s: %(message)s"


async def run_keeper(settings: KeeperSettings) -> None:
    """Run a keeper until SIGTERM, SIGINT, or the end of the process that it follows.

    Raises:
        FolderInUseError: another keeper runs in the folder.
        OSError: the folder or the port cannot be used.
        UnusedError: no rank has used it for as long as the settings say.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    folder = KeeperFolder(settings.folder, settings.run_id)
    async with AsyncExitStack() as stack:
        folder.lock()
        stack.callback(folder.retract)
        tls = Tls.of(settings.credentials)
        serving = tls.for_serving() if tls is not None else None
        keeper, api = _assemble(settings, folder, tls, stack)
        peers = await _serve(stack, api.for_peers(), *settings.listen, serving)
        ranks = await _serve(stack, api.for_ranks(), *settings.listen_ranks, None)
        host = settings.advertise or await asyncio.to_thread(own_host, settings.endpoint)
        address = KeeperAddress(
            url_of("https" if tls else "http", host, _port(peers)),
            settings.failure_domain,
            settings.node_name,
            version("muster-coordinator"),
        )
        folder.announce(url_of("http", settings.listen_ranks[0], _port(ranks)), api.token, keeper.id)
        logger.info("keeping %s in %s, at %s", settings.run_id, folder.path, address.url)
        if settings.follow:
            stack.callback(loop.create_task(_follow(settings.follow, keeper, api, stop)).cancel)
        unused = asyncio.Event()
        if settings.idle:
            watch = loop.create_task(_watch_use(settings.idle, keeper, ranks, unused))
            stack.callback(watch.cancel)
            watch.add_done_callback(lambda _: stop.set())
        await _until(stop, _work(settings, keeper, api, address))
        if unused.is_set():
            raise UnusedError(f"no rank has used it for {settings.idle:g} s")


def _assemble(
    settings: KeeperSettings, folder: KeeperFolder, tls: Tls | None, stack: AsyncExitStack
) -> tuple[Keeper, KeeperApi]:
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="muster-keeper")
    stack.callback(threads.shutdown, wait=False, cancel_futures=True)
    keepers: list[Keeper] = []
    transport = HttpTransport(lambda: keepers[0].peers.token, tls.for_calling if tls is not None else None)
    stack.callback(transport.close)
    quota = settings.quota or folder.default_quota()
    keeper_id = folder.id()
    measured = MeasuredTransport(transport)
    files = FileStore(folder, keeper_id, measured, threads, quota)
    persister = SharedStoragePersister(settings.run_id, settings.upload_rate, settings.storage_options)
    stack.callback(persister.close)
    keeper = Keeper(keeper_id, files, persister, measured.transfers)
    keepers.append(keeper)
    return keeper, KeeperApi(keeper, transport, threads, secrets.token_hex(32))


async def _work(settings: KeeperSettings, keeper: Keeper, api: KeeperApi, address: KeeperAddress) -> None:
    link = CoordinatorLink(settings.endpoint, settings.run_id, keeper, address, settings.credentials)
    api.link = link
    keeper.permits = link.permit
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keeper.verify_all(), name="muster-keeper-verify")
        tasks.create_task(keeper.run(), name="muster-keeper-orders")
        tasks.create_task(link.run(), name="muster-keeper-link")


async def _serve(
    stack: AsyncExitStack, app: web.Application, host: str, port: int, tls: ssl.SSLContext | None
) -> web.AppRunner:
    """Serve an application until the stack ends."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, host, port, ssl_context=tls)
    await site.start()
    return runner


def _port(runner: web.AppRunner) -> int:
    return int(runner.addresses[0][1])


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Work until the event is set."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working


async def _watch_use(seconds: float, keeper: Keeper, ranks: web.AppRunner, stop: asyncio.Event) -> None:
    """Set the event when no rank was connected, and there was nothing to persist, for some seconds.

    Each rank that lives holds a connection.
    """
    loop = asyncio.get_running_loop()
    used = loop.time()
    while loop.time() - used < seconds:
        await asyncio.sleep(min(IDLE_PACE, seconds / 4))
        if (ranks.server is not None and ranks.server.connections) or keeper.persists():
            used = loop.time()
    stop.set()


async def _follow(process: int, keeper: Keeper, api: KeeperApi, stop: asyncio.Event) -> None:
    """Stop when a process has ended, and what is to be persisted is in shared storage.

    A rank of the next process does not wait for that: its keeper must not end before it does.
    """
    await _ended(process)
    logger.info("process %d has ended", process)
    api.is_ending = True
    await keeper.changes.until(lambda: api.was_asked or not keeper.persists(), LINGER)
    stop.set()


async def _ended(process: int) -> None:
    """Wait until a process has ended."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    except OSError:  # An older kernel, or a sandbox.
        while _runs(process):  # noqa: ASYNC110 – nothing tells of its end
            await asyncio.sleep(FOLLOW_PACE)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
