"""Peers without a token that send large or compressed requests: neither memory nor other callers suffer."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from muster.service.security.grants import Role
from muster.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.integration.test_security import SECRETS, bearing, tokens
from tests.support.coordinator import Coordinator, free_port
from tests.support.patience import PATIENCE
from tests.support.relay import Relay

REQUESTS = 32
SIZE = 16 << 20
"""Bytes of each, just below what the coordinator takes of those that have a token."""
ROOM = 100
"""MiB by which a process may have grown at the most: six requests."""
CHECK = "/grpc.health.v1.Health/Check"
CONNECT = "/muster.v1.SessionService/Connect"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Coordinator]:
    (tmp_path / "tokens.toml").write_text(tokens())
    extra = (f"--tokens-file={tmp_path / 'tokens.toml'}",)
    with Coordinator(tmp_path, state="memory:", extra=extra) as running:
        yield running


def peak(pid: int) -> int:
    """The most memory that a process has had, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


async def send(
    endpoint: str, method: str, compression: grpc.Compression, metadata: tuple[tuple[str, str], ...] = ()
) -> Counter[grpc.StatusCode]:
    """Call a method with large requests on a few connections at once; how the calls ended."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    channels = [grpc.aio.insecure_channel(endpoint, options=options) for _ in range(4)]
    request = bytes(SIZE)

    async def call(number: int) -> grpc.StatusCode:
        try:
            made: Any = channels[number % len(channels)].unary_unary(method)
            await made(request, compression=compression, metadata=metadata, timeout=PATIENCE)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    try:
        return Counter(await asyncio.gather(*(call(number) for number in range(REQUESTS))))
    finally:
        for channel in channels:
            await channel.close()


def test_compressed_request_is_refused_unread_by_coordinator(guarded: Coordinator):
    before = peak(guarded.pid)
    ended = asyncio.run(send(guarded.endpoint, CHECK, grpc.Compression.Gzip))
    assert ended == {grpc.StatusCode.UNIMPLEMENTED: REQUESTS}
    assert peak(guarded.pid) < before + ROOM


def test_large_request_without_token_is_not_read_again(guarded: Coordinator):
    before = peak(guarded.pid)
    ended = asyncio.run(send(guarded.endpoint, CHECK, grpc.Compression.NoCompression))
    assert set(ended) <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert ended[grpc.StatusCode.RESOURCE_EXHAUSTED] >= REQUESTS // 2
    assert peak(guarded.pid) < before + ROOM
    # Callers with a token are none of its concern.
    with grpc.insecure_channel(guarded.endpoint) as connection:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(connection)
        stub.Status(coordinator_pb2.StatusRequest(), metadata=bearing(SECRETS[Role.VIEWER]), timeout=PATIENCE)


def test_compressed_message_is_refused_unread_by_relay(guarded: Coordinator, tmp_path: Path):
    extra = (f"--tokens-file={tmp_path / 'tokens.toml'}",)
    listen = f"127.0.0.1:{free_port()}"
    with Relay(tmp_path, guarded.endpoint, listen=listen, extra=extra) as relay:
        before = peak(relay.pid)
        token = bearing(SECRETS[Role.WORKER])
        ended = asyncio.run(send(relay.listen, CONNECT, grpc.Compression.Gzip, token))
        assert ended == {grpc.StatusCode.UNIMPLEMENTED: REQUESTS}
        assert peak(relay.pid) < before + ROOM
