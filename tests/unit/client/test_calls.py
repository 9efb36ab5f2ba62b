"""The options of channels, and how a call's failure is read."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from muster.client.calls import channel_options, error_info, explain, reason_of, search_on
from muster.client.replicas import Replicas, Search, Target
from muster.v1 import session_pb2 as pb
from muster.v1 import session_pb2_grpc
from tests.support.rich_status import rich_status


def test_keepalive_is_set_in_every_timer_that_grpc_has_for_it():
    options = dict(channel_options(Target("a:1", keepalive_ms=1234)))
    timers = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    assert [options[timer] for timer in timers] == [1234] * 3
    assert options["grpc.http2.max_pings_without_data"] == 0, "or the pings stop"


class Failed(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"


def test_failed_call_is_explained_by_its_status():
    assert explain(Failed()) == "UNAVAILABLE: connection refused"


def test_call_that_ran_out_of_time_says_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Failed, "code", lambda _: grpc.StatusCode.DEADLINE_EXCEEDED)
    monkeypatch.setattr(Failed, "details", lambda _: "Deadline Exceeded")
    assert explain(Failed()) == "timeout (DEADLINE_EXCEEDED: Deadline Exceeded)"


def test_failure_without_a_status_is_shown_unchanged():
    assert explain(grpc.RpcError("odd")) == "RpcError('odd')"


def test_error_of_a_socket_is_not_explained_by_tls_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_TLS_KEY", "without a certificate")
    monkeypatch.setattr(Failed, "details", lambda _: "failed to connect: unix:/run/relay.sock: Socket closed")
    assert explain(Failed()) == "UNAVAILABLE: failed to connect: unix:/run/relay.sock: Socket closed"


# ---------------------------------------------------------------------- refusals, on gRPC's asyncio side

RELAY = "unix:///r"


class Refusing(session_pb2_grpc.SessionServiceServicer):
    """Ends each stream with a status."""

    def __init__(self, status: grpc.Status) -> None:
        self._status = status

    async def Connect(self, requests: Any, context: Any) -> AsyncIterator[pb.ConnectResponse]:  # noqa: N802
        await context.abort_with_status(self._status)
        yield pb.ConnectResponse()


@asynccontextmanager
async def refused(status: grpc.Status, socket: Path) -> AsyncIterator[grpc.aio.AioRpcError]:
    """How a stream to a server that refuses it ends."""
    server = grpc.aio.server()
    session_pb2_grpc.add_SessionServiceServicer_to_server(Refusing(status), server)
    server.add_insecure_port(f"unix://{socket}")
    await server.start()
    try:
        yield await failed(socket)
    finally:
        await server.stop(None)


async def failed(socket: Path) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(f"unix://{socket}") as channel:
        # It sends nothing: grpc.aio loses the status of a call that ends during a write.
        stub: Any = session_pb2_grpc.SessionServiceStub(channel)
        call = stub.Connect()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    return caught.value


async def test_refusal_is_read_from_an_asyncio_call(tmp_path: Path):
    status = rich_status("NOT_LEADER", "b leads.", leader="b:1", replicas="a:1,b:1")
    async with refused(status, tmp_path / "s") as error:
        assert explain(error) == "UNAVAILABLE: b leads."
        assert reason_of(error) == "NOT_LEADER"
        assert dict(error_info(error).metadata) == {"leader": "b:1", "replicas": "a:1,b:1"}
        search = Search(Replicas("a:1"))
        assert (search_on(search, error), search.target.address) == (0.0, "b:1")


@pytest.mark.parametrize("reason", ["RELAY_CUT_OFF", "COORDINATOR_DRAINING"])
async def test_address_that_stops_or_is_cut_off_is_left_at_once(tmp_path: Path, reason: str):
    async with refused(rich_status(reason, "elsewhere."), tmp_path / "s") as error:
        search = Search(Replicas(f"{RELAY},a:1"))
        search.answered()
        assert (search_on(search, error), search.target.address) == (0.0, "a:1")


async def test_relay_that_has_lost_the_coordinator_is_called_again(tmp_path: Path):
    async with refused(rich_status("UPSTREAM_LOST", "the relay has lost it."), tmp_path / "s") as error:
        search = Search(Replicas(f"{RELAY},a:1"))
        search.answered()
        assert (search_on(search, error) > 0, search.target.address) == (True, RELAY)


async def test_asyncio_failure_without_a_reason_has_none(tmp_path: Path):
    error = await failed(tmp_path / "nobody")
    assert reason_of(error) == ""
    assert "No such file or directory" in explain(error)


async def test_address_that_refuses_the_token_is_left_if_there_is_a_relay(tmp_path: Path):
    status = rich_status("TOKEN_MISSING", "no token.", grpc.StatusCode.UNAUTHENTICATED)
    async with refused(status, tmp_path / "s") as error:
        alone, relayed = Search(Replicas("a:1,b:1")), Search(Replicas(f"a:1,b:1,{RELAY}"))
        assert relayed.failed("nobody there") == 0.0
        assert (search_on(alone, error) > 0, alone.target.address) == (True, "a:1")
        assert (search_on(relayed, error), relayed.target.address) == (0.0, "b:1")
        assert (search_on(relayed, error) > 0, relayed.target.address) == (True, "a:1")
