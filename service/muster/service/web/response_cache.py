"""A cache of responses, which are rendered in a thread and reused while they are fresh."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from aiohttp import web

FRESH_FOR = 1.0
"""Seconds for which a response is reused, so that a hundred viewers cost as much as one."""


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """A response without its headers."""

    status: int
    content_type: str
    plain: bytes
    zipped: bytes


class ResponseCache:
    """Caches responses by a key, and makes each once while it is fresh.

    Args:
        in_turn: whether to make one response at a time.
    """

    def __init__(self, *, in_turn: bool = True) -> None:
        self._kept: dict[object, asyncio.Task[CachedResponse]] = {}
        self._turn: AbstractAsyncContextManager[None] = asyncio.Lock() if in_turn else nullcontext()

    async def get(self, key: object, make: Callable[[], Awaitable[CachedResponse]]) -> CachedResponse:
        """Return the response of a key. If the cache does not have it, ``make`` makes it."""
        task = self._kept.get(key)
        if task is None:
            task = self._kept[key] = asyncio.ensure_future(self._make(make))
            task.add_done_callback(lambda _: self._forget_later(key))
        # A viewer that disconnects must not cancel the response for the others.
        return await asyncio.shield(task)

    async def _make(self, make: Callable[[], Awaitable[CachedResponse]]) -> CachedResponse:
        async with self._turn:
            return await make()

    def _forget_later(self, key: object) -> None:
        asyncio.get_running_loop().call_later(FRESH_FOR, self._kept.pop, key, None)


async def rendered(render: Callable[[], bytes], content_type: str, status: int = 200) -> CachedResponse:
    """Render in a thread: the data does not change, and the loop has barriers to decide."""

    def answer() -> CachedResponse:
        plain = render()
        return CachedResponse(status, content_type, plain, gzip.compress(plain, 1))

    return await asyncio.to_thread(answer)


def response(request: web.Request, answer: CachedResponse) -> web.Response:
    """Return the response as this viewer accepts it."""
    headers = {"Cache-Control": "no-store", "Content-Type": answer.content_type, "Vary": "Accept-Encoding"}
    body = answer.plain
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        headers["Content-Encoding"] = "gzip"
        body = answer.zipped
    return web.Response(status=answer.status, body=body, headers=headers)
