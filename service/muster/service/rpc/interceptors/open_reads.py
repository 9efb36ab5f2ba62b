"""Bounds what is read of callers that have no token.

gRPC receives all of a message, up to the largest that any method takes, as soon as the server reads it.
Before that it takes no more than the window of HTTP/2, 64 KiB. So few requests of an address are read at
once. If one is large, the next ones are not read at all.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from muster.service.core.vocabulary.refusal import limit_exceeded

OPEN_REQUEST_BYTES = 4_096
"""Of one request; that of a health check is the name of a service."""
MAX_READS = 4
"""Requests of an address that are read at once."""
TURN_TIMEOUT = 1.0
"""Seconds that a request waits for those before it."""
BARRED_SECONDS = 10.0
"""Seconds for which nothing is read of an address that has sent a large request."""
MAX_BARRED = 65_536
"""Addresses that are remembered for that; the first one is forgotten."""


class OpenReads:
    """Lets requests without a token be read, by the address that they come from."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._barred: OrderedDict[str, float] = OrderedDict()

    @asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[None]:
        """Wait until one more request of an address may be read.

        Raises:
            Refusal: LIMIT_EXCEEDED; its request is not to be read.
        """
        self._check(address)
        turns = self._turns.setdefault(address, asyncio.Semaphore(MAX_READS))
        try:
            async with asyncio.timeout(TURN_TIMEOUT):
                await turns.acquire()
        except TimeoutError:
            raise limit_exceeded(
                "max_open_reads",
                MAX_READS,
                f"{MAX_READS} requests of {address} without a token have not come whole",
                "Send each whole, or show a token.",
            ) from None
        try:
            self._check(address)  # One of those before it may have been large.
            yield
        finally:
            turns.release()

    def bar(self, address: str) -> None:
        """Read nothing of an address for a while: it has sent a large request."""
        self._barred[address] = asyncio.get_running_loop().time() + BARRED_SECONDS
        self._barred.move_to_end(address)
        if len(self._barred) > MAX_BARRED:
            self._barred.popitem(last=False)

    def _check(self, address: str) -> None:
        until = self._barred.get(address)
        if until is None:
            return
        if until <= asyncio.get_running_loop().time():
            del self._barred[address]
            return
        raise limit_exceeded(
            "max_open_request_bytes",
            OPEN_REQUEST_BYTES,
            f"{address} sent a larger request without a token",
            f"Its next ones are not read for {BARRED_SECONDS:g} s.",
        )
