"""Limits the memory for requests of callers without a token.

When the server reads a message, gRPC receives all of it, up to the largest size that any method takes. Before
that it receives at most the window of HTTP/2, 64 KiB. So the server reads few requests of an address at once.
If one request is large, it does not read the next ones.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from muster.service.core.vocabulary.refusal import limit_exceeded

OPEN_REQUEST_BYTES = 4_096
"""Size limit of one request. A health check has only the name of a service."""
MAX_READS = 1
"""Concurrent reads of one address. Each may receive as much as the largest message."""
READ_TIMEOUT = 2.0
"""Seconds for a request to come. It usually comes with the begin of the call, and others wait meanwhile."""
TURN_TIMEOUT = 3.0
"""Seconds that a request waits for earlier ones."""
BARRED_SECONDS = 10.0
"""Seconds for which an address is barred after a large request."""
MAX_BARRED = 65_536
"""Barred addresses. Beyond that, the oldest is admitted again."""


class OpenReads:
    """Admits reads of requests without a token, by address."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._barred: OrderedDict[str, float] = OrderedDict()

    @asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[None]:
        """Wait until one more request of an address may be read.

        Raises:
            Refusal: LIMIT_EXCEEDED; do not read the request.
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
                f"an earlier request of {address} without a token has not come whole",
                "Send each whole, or show a token.",
            ) from None
        try:
            self._check(address)  # An earlier request may have been large.
            yield
        finally:
            turns.release()

    def bar(self, address: str) -> None:
        """Refuse requests of an address for a while, because it sent a large one."""
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
