"""A relay on its own thread, for a process with other work: torchrun's agent."""

import asyncio
import logging
import os
import threading

from muster.relay.server import RelayConfig, start
from muster.relay.stats import RelayStats

logger = logging.getLogger(__name__)

START_TIMEOUT = 10.0
"""Seconds that a relay has to start to listen; milliseconds are usual."""


class RelayThread:
    """A relay that runs beside the other work of its process.

    Args:
        config: its settings.

    Raises:
        ListenError: it may not listen there.
        RuntimeError: it cannot start.
    """

    def __init__(self, config: RelayConfig) -> None:
        self._config = config
        self._owner = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="muster-relay", daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT):
            raise RuntimeError(
                f"the relay at {config.listen.address} did not begin within {START_TIMEOUT:g} s."
            )
        if self._failure is not None:
            raise self._failure

    @property
    def address(self) -> str:
        """The address where it listens."""
        return self._config.listen.address

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._started.is_set():
                logger.exception("the relay at %s broke; its workers connect directly", self.address)
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        served = await start(self._config, RelayStats())
        self._started.set()
        await self._stop.wait()
        await served.stop()

    def stop(self, timeout: float = 5.0) -> None:
        """Ask its workers to connect directly, and end it; do nothing in a forked child.

        Args:
            timeout: seconds to wait for the end.
        """
        if os.getpid() != self._owner or self._loop is None or self._stop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._stop.set)
        except RuntimeError:
            return  # The loop has ended already.
        if self._thread is not threading.current_thread():  # The garbage collector may call it there.
            self._thread.join(timeout)
