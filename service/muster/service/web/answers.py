"""Answers that are made aside from the loop, and given again while they are fresh."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from aiohttp import web

FRESH_FOR = 1.0
"""Seconds that an answer is given again, so that a hundred viewers cost what one does."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a viewer is sent."""

    status: int
    content_type: str
    plain: bytes
    zipped: bytes


class Answers:
    """Answers by what was asked for; each is made once while it is fresh.

    Args:
        in_turn: whether one is made at a time.
    """

    def __init__(self, *, in_turn: bool = True) -> None:
        self._kept: dict[object, asyncio.Task[Answer]] = {}
        self._turn: AbstractAsyncContextManager[None] = asyncio.Lock() if in_turn else nullcontext()

    async def get(self, key: object, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer for a key; ``make`` makes it if there is none."""
        task = self._kept.get(key)
        if task is None:
            task = self._kept[key] = asyncio.ensure_future(self._make(make))
            task.add_done_callback(lambda _: self._forget_later(key))
        # A viewer who goes away does not take the answer from the others.
        return await asyncio.shield(task)

    async def _make(self, make: Callable[[], Awaitable[Answer]]) -> Answer:
        async with self._turn:
            return await make()

    def _forget_later(self, key: object) -> None:
        asyncio.get_running_loop().call_later(FRESH_FOR, self._kept.pop, key, None)


async def rendered(render: Callable[[], bytes], content_type: str, status: int = 200) -> Answer:
    """Render in a thread, since what was looked at is frozen, and the loop has barriers to decide."""

    def answer() -> Answer:
        plain = render()
        return Answer(status, content_type, plain, gzip.compress(plain, 1))

    return await asyncio.to_thread(answer)


def response(request: web.Request, answer: Answer) -> web.Response:
    """The answer as it is sent to this viewer."""
    headers = {"Cache-Control": "no-store", "Content-Type": answer.content_type, "Vary": "Accept-Encoding"}
    body = answer.plain
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        headers["Content-Encoding"] = "gzip"
        body = answer.zipped
    return web.Response(status=answer.status, body=body, headers=headers)
