"""Fake metadata servers on loopback: Amazon EC2's, Google's and Azure's, each in a thread of its own."""

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Self, TypeAlias

from aiohttp import web

Fault: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
HUGE = 8 * 1_048_576


class FakeMetadataServer:
    """Serves documents by path until its ``with`` block is left. Any thread may change what it says.

    A fault of a path is what it does instead of answering: see the functions below.
    """

    def __init__(self) -> None:
        self.documents: dict[str, Any] = {}
        """By path: text, or what becomes JSON."""
        self.faults: dict[str, Fault] = {}
        self.asked: list[str] = []
        """Method and path of each request, with its query."""
        self.base = ""
        """Its address."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="metadata server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        site = web.Application()
        site.router.add_route("*", "/{path:.*}", self._serve)
        # An answer that never ends must not hold up the end of a test.
        runner = web.AppRunner(site, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path_qs}")
        fault = self.faults.get(request.path)
        return await (fault or self._answer)(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        if request.path not in self.documents:
            return web.Response(status=404, text="Not Found", headers=self._headers())
        document = self.documents[request.path]
        if isinstance(document, str) and "alt=json" not in request.query_string:
            return web.Response(text=document, headers=self._headers())
        return web.json_response(document, headers=self._headers())

    def _refusal(self, request: web.Request) -> web.Response | None:
        """The answer to a request without what the server wants."""
        raise NotImplementedError

    def _headers(self) -> dict[str, str]:
        return {}


class FakeAws(FakeMetadataServer):
    """Amazon EC2's, which takes tokens alone (IMDSv2)."""

    SPOT = "/latest/meta-data/spot/instance-action"
    REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
    SCHEDULED = "/latest/meta-data/events/maintenance/scheduled"
    TOKEN = "/latest/api/token"

    def __init__(self) -> None:
        super().__init__()
        self.tokens: set[str] = set()
        """Those that it takes; it may forget them."""

    def interrupt(self, action: str = "terminate", seconds: float = 120.0) -> None:
        """Announce the end of the Spot instance."""
        self.documents[self.SPOT] = {"action": action, "time": iso(time.time() + seconds)}

    def recommend_rebalance(self) -> None:
        """Say that the Spot instance may be interrupted."""
        self.documents[self.REBALANCE] = {"noticeTime": iso(time.time())}

    def schedule(self, code: str = "system-reboot", seconds: float = 600.0, **fields: Any) -> None:
        """Schedule an event.

        Args:
            code: its kind.
            seconds: from now until it may begin.
            fields: others of it, or other values.
        """
        event = {
            "NotBefore": imds_time(time.time() + seconds),
            "Code": code,
            "Description": "scheduled reboot",
            "EventId": "instance-event-0d59937288b749b32",
            "NotAfter": imds_time(time.time() + seconds + 3600),
            "State": "active",
        }
        self.documents.setdefault(self.SCHEDULED, []).append({**event, **fields})

    def _refusal(self, request: web.Request) -> web.Response | None:
        if request.path == self.TOKEN:
            seconds = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if request.method != "PUT" or not seconds.isdigit() or not 1 <= int(seconds) <= 21_600:
                return web.Response(status=400)
            token = secrets.token_urlsafe(42)
            self.tokens.add(token)
            return web.Response(text=token, headers={"X-aws-ec2-metadata-token-ttl-seconds": seconds})
        if request.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return web.Response(status=401)
        return None


class FakeGoogle(FakeMetadataServer):
    """Google's."""

    PREFIX = "/computeMetadata/v1/instance"
    PREEMPTED = f"{PREFIX}/preempted"
    MAINTENANCE = f"{PREFIX}/maintenance-event"
    UPCOMING = f"{PREFIX}/upcoming-maintenance"
    POLICY = f"{PREFIX}/scheduling/on-host-maintenance"

    def __init__(self) -> None:
        super().__init__()
        self.documents |= {
            self.PREEMPTED: "FALSE",
            self.MAINTENANCE: "NONE",
            self.UPCOMING: "NONE",
            self.POLICY: "TERMINATE",
        }

    def preempt(self) -> None:
        """Preempt the VM."""
        self.documents[self.PREEMPTED] = "TRUE"

    def maintain(self, event: str = "TERMINATE_ON_HOST_MAINTENANCE") -> None:
        """Begin maintenance of the host."""
        self.documents[self.MAINTENANCE] = event

    def announce_maintenance(self, seconds: float = 600.0) -> None:
        """Announce a window for maintenance of the host."""
        self.documents[self.UPCOMING] = {
            "can_reschedule": "true",
            "latest_window_start_time": iso(time.time() + seconds),
            "maintenance_status": "PENDING",
            "type": "SCHEDULED",
            "window_end_time": iso(time.time() + seconds + 7200),
            "window_start_time": iso(time.time() + seconds),
        }

    def _refusal(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
            return web.Response(status=403)
        return None

    def _headers(self) -> dict[str, str]:
        return {"Metadata-Flavor": "Google"}


class FakeAzure(FakeMetadataServer):
    """Azure's."""

    EVENTS = "/metadata/scheduledevents"
    NAME = "/metadata/instance/compute/name"
    VM = "vmss_0"
    """The VM's name."""

    def __init__(self) -> None:
        super().__init__()
        self.documents |= {self.NAME: self.VM, self.EVENTS: {"DocumentIncarnation": 1, "Events": []}}

    def schedule(self, kind: str = "Preempt", seconds: float = 30.0, **fields: Any) -> None:
        """Schedule an event of this VM.

        Args:
            kind: its type.
            seconds: from now until it may begin.
            fields: others of it, or other values.
        """
        event = {
            "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [self.VM],
            "EventStatus": "Scheduled",
            "NotBefore": http_time(time.time() + seconds),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        before = self.documents[self.EVENTS]
        self.documents[self.EVENTS] = {
            "DocumentIncarnation": before["DocumentIncarnation"] + 1,
            "Events": [*before["Events"], {**event, **fields}],
        }

    def _refusal(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Metadata") != "true" or "api-version" not in request.query:
            return web.Response(status=400)
        return None


def iso(seconds: float) -> str:
    """A time as in ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def http_time(seconds: float) -> str:
    """A time as in HTTP."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")


def imds_time(seconds: float) -> str:
    """A time as in EC2's scheduled events."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%d %b %Y %H:%M:%S GMT")


def answers(status: int, body: str = "", **headers: str) -> Fault:
    """Answer with a status of one's own."""

    async def fault(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body, headers=headers)

    return fault


async def hangs(_: web.Request) -> web.StreamResponse:
    """Take the request, and never answer."""
    await asyncio.Event().wait()
    raise AssertionError


async def trickles(request: web.Request) -> web.StreamResponse:
    """Answer a byte at a time, without end."""
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.01)
    return response


async def huge(request: web.Request) -> web.StreamResponse:
    """Answer more than anyone reads."""
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        for _ in range(HUGE // 65_536):
            await response.write(b" " * 65_536)
    return response


async def truncated(request: web.Request) -> web.StreamResponse:
    """Promise more than comes."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"action": ')
    assert request.transport is not None
    request.transport.close()
    return response
