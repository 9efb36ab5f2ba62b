"""A keeper's HTTP paths. Other keepers may get files and notes; the other paths are for the node's ranks."""

import asyncio
import hmac
import logging
import os
from base64 import b64encode
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import web

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.local_folder import attempt_name, find_attempt
from muster.keeper.coordinator_stream import CoordinatorLink
from muster.keeper.fetching import DamagedSourcesError, NoSourceError
from muster.keeper.keeper import Keeper
from muster.keeper.transport import AbsentError, Transport, TransportError, read_all
from muster.keeper.vocabulary import Attachment

logger = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20
"""Largest body of a request, in bytes: ``take`` names the notes of all ranks."""
MAX_NOTE = 2**30
"""Largest note that is fetched from another keeper, in bytes."""
PIECE = 2**20
"""Bytes that are read and encrypted at once, over TLS."""
MAX_NUMBER = 2**31 - 1
"""Largest number in a request: the ranks of the protocol are of type ``int32``."""
ATTACH_PATIENCE = 5.0
"""Seconds for which ``attach`` waits for the coordinator. The rank repeats the request."""
SERVE_PATIENCE = 5.0
"""Seconds for which a request waits for a file that is here, but not verified yet."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RefusedError(Exception):
    """A request is refused.

    Args:
        status: the HTTP status.
        error: the reason, for people.
    """

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class KeeperApi:
    """A keeper's HTTP paths.

    Args:
        keeper: answers the requests.
        transport: fetches notes from other keepers.
        threads: run calls that wait for a disk or the network.
        token: the token that this node's ranks must show.
    """

    def __init__(self, keeper: Keeper, transport: Transport, threads: Executor, token: str) -> None:
        self._keeper = keeper
        self._transport = transport
        self._threads = threads
        self.token = token
        self.is_ending = False
        """Whether the process that the keeper follows has ended."""
        self.was_asked = False
        """Whether a rank has tried to attach since then."""
        self.link: CoordinatorLink | None = None
        """None: the keeper is still starting."""

    def for_peers(self) -> web.Application:
        """Return the application for other keepers."""
        app = web.Application(middlewares=[_refusals])
        app.router.add_get("/files/{attempt}/{name}", self._file)
        app.router.add_get("/notes/{attempt}/{note}", self._note)
        return app

    def for_ranks(self) -> web.Application:
        """Return the application for the ranks of this node."""
        app = web.Application(middlewares=[_refusals], client_max_size=MAX_BODY)
        app.router.add_get("/files/{attempt}/{name}", self._file)
        app.router.add_get("/notes/{attempt}/{note}", self._note)
        app.router.add_post("/attach", self._for_a_rank(self._attach))
        app.router.add_post("/take", self._for_a_rank(self._take))
        app.router.add_post("/fetch", self._for_a_rank(self._fetch))
        app.router.add_get("/status", self._for_a_rank(self._status))
        return app

    # ------------------------------------------------------------------ tokens

    def _for_a_rank(self, handler: Handler) -> Handler:
        async def checked(request: web.Request) -> web.StreamResponse:
            self._check(request, self.token)
            return await handler(request)

        return checked

    def _check(self, request: web.Request, *tokens: str) -> None:
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        matches = [
            hmac.compare_digest(shown.encode("utf-8", "replace"), token.encode()) for token in tokens if token
        ]
        if scheme.lower() != "bearer" or not any(matches):
            raise RefusedError(401, "this keeper serves only the keepers and ranks of its run")

    # ------------------------------------------------------------------ files and notes

    async def _file(self, request: web.Request) -> web.StreamResponse:
        self._check(request, self._keeper.peers.token, self.token)
        attempt, name = _attempt(request.match_info["attempt"]), request.match_info["name"]
        if not self._keeper.files.has(attempt, name):
            await self._keeper.changes.until(
                lambda: (
                    self._keeper.files.has(attempt, name) or not self._keeper.files.may_come(attempt, name)
                ),
                SERVE_PATIENCE,
            )
        if "verify" in request.query:
            await self._keeper.files.verify_again(attempt, name)
        if not self._keeper.files.has(attempt, name):
            raise RefusedError(404, f"no verified {name} of {attempt_name(attempt)} is here")
        path = self._keeper.files.folder.file(attempt, name)
        return await self._encrypted(request, path) if request.secure else web.FileResponse(path)

    async def _encrypted(self, request: web.Request, path: Path) -> web.StreamResponse:
        """Send a file over TLS: ``sendfile`` cannot, and asyncio's fallback reads only 16 KiB at a time."""
        try:
            asked = request.http_range
        except ValueError as error:
            raise RefusedError(416, str(error)) from error
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            first, end, _ = asked.indices(size)
            if first >= end and asked != slice(None, None, 1):
                raise RefusedError(416, f"{path.name} has {size} bytes")
            response = web.StreamResponse(status=200 if asked == slice(None, None, 1) else 206)
            response.content_length = end - first
            if response.status == 206:
                response.headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
            await response.prepare(request)
            while first < end:
                piece = await self._in_thread(
                    partial(os.pread, file.fileno(), min(PIECE, end - first), first)
                )
                if not piece:
                    break
                await response.write(piece)
                first += len(piece)
        return response

    async def _note(self, request: web.Request) -> web.StreamResponse:
        self._check(request, self._keeper.peers.token, self.token)
        attempt, note = _attempt(request.match_info["attempt"]), request.match_info["note"]
        return web.Response(body=await self._in_thread(lambda: self._read_note(attempt, note)))

    def _read_note(self, attempt: SaveAttempt, note: str) -> bytes:
        try:
            return self._keeper.files.folder.note(attempt, note).read_bytes()
        except (OSError, ValueError):
            raise RefusedError(404, f"no note {note} of {attempt_name(attempt)} is here") from None

    # ------------------------------------------------------------------ ranks

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        said = await _object(request)
        generation, world_size, rank, replicas = (
            _number(said, key) for key in ("generation", "world_size", "rank", "replicas")
        )
        if self.is_ending:
            self.was_asked = True
            self._keeper.changes.notify()
            raise RefusedError(503, "the process that this keeper follows has ended, and so does the keeper")
        if self.link is None:
            raise RefusedError(503, "the keeper is still starting")
        if not self._keeper.attach(generation, world_size, rank, replicas):
            newer = self._keeper.attachment
            raise RefusedError(
                409,
                f"generation {generation} is over: the keeper keeps for generation "
                f"{newer.generation if newer else 0}",
            )
        wanted = Attachment(generation, world_size, frozenset({rank}), replicas)
        if not await self.link.attached(wanted, ATTACH_PATIENCE):
            said_last = self.link.said or "it has not taken the report in yet"
            raise RefusedError(503, f"the coordinator has not heard of this rank: {said_last}")
        return web.json_response({"id": self._keeper.id})

    async def _take(self, request: web.Request) -> web.StreamResponse:
        said = await _object(request)
        attempt = _attempt(said.get("attempt"))
        wanted = said.get("notes")
        if not isinstance(wanted, list):
            raise RefusedError(400, "notes is no list")
        reads = []
        for one in wanted:
            match one:
                case [int(rank), str(note)]:
                    reads.append(self._reading(attempt, rank, note))
                case _:
                    raise RefusedError(400, f"{one!r} is not a rank and its note")
        notes = await asyncio.gather(*map(self._in_thread, reads))
        return web.json_response({"notes": [b64encode(note).decode() for note in notes]})

    def _reading(self, attempt: SaveAttempt, rank: int, note: str) -> Callable[[], bytes]:
        """Return a function that reads a rank's note, here or at another keeper."""
        mine = self._keeper.attachment
        if mine is not None and rank in mine.ranks:
            return lambda: self._read_note(attempt, note)
        url = self._keeper.peers.of_rank(rank)
        if url is None:
            raise RefusedError(503, f"no keeper of rank {rank} is known yet")

        def read() -> bytes:
            path = f"/notes/{attempt_name(attempt)}/{quote(note, safe='')}"
            try:
                return read_all(self._transport.open(url, path), MAX_NOTE)
            except AbsentError as error:
                raise RefusedError(404, f"the note of rank {rank}: {error}") from error
            except TransportError as error:
                raise RefusedError(503, f"the note of rank {rank}: {error}") from error

        return read

    async def _fetch(self, request: web.Request) -> web.StreamResponse:
        said = await _object(request)
        attempt, name, again = _attempt(said.get("attempt")), said.get("name"), said.get("verify", False)
        if not isinstance(name, str):
            raise RefusedError(400, "name is no text")
        if said.get("pieces") is True and (urls := self._keeper.files.elsewhere(attempt, name)):
            return web.json_response({"urls": urls, "token": self._keeper.peers.token})
        try:
            path = await self._keeper.files.path_of(attempt, name, again=again is True)
        except NoSourceError as error:
            raise RefusedError(404, str(error)) from error
        except DamagedSourcesError as error:
            raise RefusedError(410, str(error)) from error
        except (OSError, ValueError) as error:
            raise RefusedError(503, str(error)) from error
        return web.json_response({"path": str(path)})

    async def _status(self, request: web.Request) -> web.StreamResponse:
        report = self._keeper.report()
        checkpoints = []
        orders = {} if self._keeper.files.orders is None else self._keeper.files.orders.orders
        for attempt in sorted({*report.holdings, *orders}, reverse=True):
            holding, order = report.holdings.get(attempt), orders.get(attempt)
            checkpoints.append(
                {
                    "attempt": attempt_name(attempt),
                    "step": None if order is None else order.checkpoint.step,
                    "level": "" if order is None else order.level,
                    "ranks": [] if holding is None else sorted(holding.ranks),
                }
            )
        return web.json_response(
            {
                "id": self._keeper.id,
                "used": report.used,
                "quota": report.quota,
                "free": self._keeper.files.folder.free(),
                "checkpoints": checkpoints,
            }
        )

    async def _in_thread(self, work: Callable[[], bytes]) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every refusal as JSON: ``{"error": …}``."""
    try:
        return await handler(request)
    except RefusedError as error:
        return web.json_response({"error": str(error)}, status=error.status)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)


async def _object(request: web.Request) -> dict[str, Any]:
    try:
        said = await request.json()
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise RefusedError(400, "the request is no JSON object")
    return said


def _attempt(name: object) -> SaveAttempt:
    attempt = find_attempt(name) if isinstance(name, str) else None
    if attempt is None:
        raise RefusedError(404, f"{name!r} is no attempt, such as 3-17")
    return attempt


def _number(said: dict[str, Any], key: str) -> int:
    value = said.get(key)
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise RefusedError(400, f"{key} = {value!r} is no whole number from 0 up")
    return value
