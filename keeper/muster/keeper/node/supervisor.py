"""Starts a keeper for each run whose ranks ask for one, and starts it again when it ends.

Each run has a process of its own: a fault in one run's keeper, or its memory, is no other run's.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from muster.keeper.node.requests import remove_run, requested_runs, sweep, was_requested
from muster.keeper.settings import UNUSED, KeeperSettings, arguments_of, environment_of

logger = logging.getLogger(__name__)

LOOK_PACE = 0.5
"""Seconds between two looks for new runs. Shared folders of containers do not always tell of changes."""
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
"""Seconds before a keeper that has ended is started again; each pause is twice as long as the one before."""
STEADY = 60.0
"""Seconds after which a life counts as a long one, and the pauses begin again."""
END_TIMEOUT = 5.0
"""Seconds that a keeper has to end after SIGTERM."""

Command = Callable[[str], Sequence[str]]


def run_node_until_stopped(settings: KeeperSettings, patterns: Sequence[str]) -> str | None:
    """Run the keepers of this node, and log to stderr.

    Args:
        settings: of each keeper. Its run is another one for each of them.
        patterns: glob patterns of the runs that get one.

    Returns:
        Why they cannot run; None: this process was told to stop.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    environment = {**os.environ, **environment_of(settings.credentials)}
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        asyncio.run(_run(NodeKeepers(settings, patterns, keeper_command(settings), environment)))
    except OSError as error:
        return str(error)
    return None


def keeper_command(settings: KeeperSettings) -> Command:
    """Return what makes the command of a run's keeper. It ends with this process."""

    def command(run_id: str) -> Sequence[str]:
        mine = replace(settings, run_id=run_id, follow=os.getpid())
        return [sys.executable, "-m", "muster.keeper", *arguments_of(mine)]

    return command


class NodeKeepers:
    """The keepers of one node.

    Args:
        settings: of each keeper.
        patterns: glob patterns of the runs that get one.
        command: makes the command of a run's keeper.
        environment: of the keepers.
    """

    def __init__(
        self,
        settings: KeeperSettings,
        patterns: Sequence[str],
        command: Command,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._local = settings.folder
        self._idle = settings.idle
        self._patterns = patterns
        self._command = command
        self._environment = environment
        self._keepers: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Keep a keeper for each run until cancelled. Then all keepers end.

        Raises:
            OSError: the folder cannot be read.
        """
        try:
            await asyncio.to_thread(sweep, self._local)
            while True:
                for run_id in await asyncio.to_thread(requested_runs, self._local, self._patterns):
                    known = self._keepers.get(run_id)
                    if known is None or known.done():
                        self._keepers[run_id] = asyncio.create_task(self._keep(run_id))
                await asyncio.sleep(LOOK_PACE)
        finally:
            for task in self._keepers.values():
                task.cancel()
            await asyncio.gather(*self._keepers.values(), return_exceptions=True)

    async def _keep(self, run_id: str) -> None:
        """Keep a run's keeper until no rank has used it for long. Then its folder goes, too."""
        pause = FIRST_PAUSE
        while True:
            began = time.monotonic()
            status = await self._life(run_id)
            if status == UNUSED and not was_requested(self._local, run_id, min(self._idle, STEADY)):
                break
            if status != UNUSED:
                logger.warning("the keeper of %s ended with exit status %s", run_id, status)
            pause = FIRST_PAUSE if time.monotonic() - began > STEADY else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)
        logger.info("no rank of %s has used its keeper for %g s: its folder is deleted", run_id, self._idle)
        try:
            await asyncio.to_thread(remove_run, self._local, run_id)
        except OSError as error:
            logger.warning("the folder of %s is not deleted: %s", run_id, error)
            await asyncio.sleep(MAX_PAUSE)

    async def _life(self, run_id: str) -> int | str:
        """Run a keeper until it ends; return its exit status, or why it did not begin."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(run_id), stdin=asyncio.subprocess.DEVNULL, env=self._environment
            )
        except OSError as error:
            return str(error)
        logger.info("the keeper of %s is process %d", run_id, process.pid)
        try:
            return await process.wait()
        except asyncio.CancelledError:
            await _end(process)
            raise


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_TIMEOUT)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _run(keepers: NodeKeepers) -> None:
    """Run keepers until SIGTERM or SIGINT."""
    running = asyncio.ensure_future(keepers.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    with suppress(asyncio.CancelledError):
        await running
