"""A relay on a thread of its own, for a process that has something else to do: torchrun's agent."""

import asyncio
import logging
import os
import threading

from muster.relay.counts import Counts
from muster.relay.running import RelayConfig, start

logger = logging.getLogger(__name__)

START_TIMEOUT = 10.0
"""Seconds that a relay has to begin to listen; milliseconds are usual."""


class RelayThread:
    """A relay that runs beside what its process does, and never in its way.

    Args:
        config: what it is to do.

    Raises:
        ListenError: it may not listen there.
        RuntimeError: it cannot begin.
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
        """Where it listens."""
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
        served = await start(self._config, Counts())
        self._started.set()
        await self._stop.wait()
        await served.stop()

    def stop(self, timeout: float = 5.0) -> None:
        """Ask its workers to connect directly, and end it; in a forked child it does nothing.

        Args:
            timeout: seconds to wait for its end.
        """
        if os.getpid() != self._owner or self._loop is None or self._stop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._stop.set)
        except RuntimeError:
            return  # It has ended by itself.
        if self._thread is not threading.current_thread():  # As where the garbage collector calls it.
            self._thread.join(timeout)
