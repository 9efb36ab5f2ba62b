"""Peers without a token that send large or compressed requests: neither memory nor other callers suffer."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from lab import aio
from lab.hostile import windows
from lab.hostile.connections import PREFACE, answer_pings
from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.relay import Relay
from muster.service.security.grants import Role
from muster.v1 import coordinator_pb2, coordinator_pb2_grpc, store_pb2, store_pb2_grpc
from tests.support.tokens import SECRETS, bearing, tokens

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
    endpoint: str,
    method: str,
    compression: grpc.Compression,
    metadata: tuple[tuple[str, str], ...] = (),
    size: int = SIZE,
) -> Counter[grpc.StatusCode]:
    """Call a method with large requests on a few connections at once; how the calls ended."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    channels = [grpc.aio.insecure_channel(endpoint, options=options) for _ in range(4)]
    request = bytes(size)

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


def test_answers_that_a_worker_does_not_read_are_bounded(guarded: Coordinator):
    token = bearing(SECRETS[Role.WORKER])
    keys = [f"key-{number}" for number in range(8)]
    with grpc.insecure_channel(guarded.endpoint) as connection:
        store = store_pb2_grpc.StoreServiceStub(connection)
        for key in keys:
            entries = [store_pb2.KeyValue(key=key, value=bytes(1 << 20))]
            store.Set(store_pb2.SetRequest(run_id="a-1", entries=entries), metadata=token, timeout=PATIENCE)
        before = peak(guarded.pid)
        request = store_pb2.StoreServiceGetRequest(run_id="a-1", keys=keys, timeout_ms=1_000)
        # A stream is read when it is iterated, and this one is not.
        get: Any = connection.unary_stream("/muster.v1.StoreService/Get")
        calls = [get(request.SerializeToString(), metadata=token) for _ in range(60)]
        # Those that are being written make room for the others, which wait for their places unmade.
        (slow, *_) = guarded.logged("reader.slow")
        # 32 MiB of answers, of which 16 are with gRPC as well.
        assert peak(guarded.pid) < before + 32 + 16 + ROOM, peak(guarded.pid)
        assert slow["reader"] == "worker at 127.0.0.1 (/muster.v1.StoreService/Get)"
        for call in calls:
            call.cancel()


def test_reader_with_tiny_flow_control_windows_loses_its_connection(guarded: Coordinator):
    """gRPC keeps what it cannot send for as long as the connection lives, whatever becomes of the call."""
    token = bearing(SECRETS[Role.WORKER])
    keys = [f"key-{number}" for number in range(8)]
    request = store_pb2.StoreServiceGetRequest(run_id="a-1", keys=keys, timeout_ms=1_000)
    honest = store_pb2.StoreServiceGetRequest(run_id="a-1", keys=keys[:1], timeout_ms=1_000)
    # Two answers fill what one address may have; the third needs the room.
    calls = [windows.call(number, windows.GET, SECRETS[Role.WORKER], request) for number in (1, 3, 5)]
    with grpc.insecure_channel(guarded.endpoint) as channel:
        store = store_pb2_grpc.StoreServiceStub(channel)
        for key in keys:
            entries = [store_pb2.KeyValue(key=key, value=bytes(1 << 20))]
            store.Set(store_pb2.SetRequest(run_id="a-1", entries=entries), metadata=token, timeout=PATIENCE)

        async def read() -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
            writer.write(PREFACE + windows.TINY + b"".join(calls))
            try:
                async with asyncio.timeout(PATIENCE):
                    return await answer_pings(reader, writer)
            finally:
                writer.close()

        assert asyncio.run(read()) == "closed"
        (slow, *_) = guarded.logged("reader.slow")
        assert (slow["reader"], slow["bytes"] > 8 << 20) == (
            "worker at 127.0.0.1 (/muster.v1.StoreService/Get)",
            True,
        )
        store.Get(honest, metadata=token, timeout=PATIENCE)


def get_calls(coordinator: Coordinator) -> int:
    """How many calls of ``StoreService.Get`` have begun."""
    begins = 'grpc_server_started_total{grpc_method="Get",grpc_service="muster.v1.StoreService"'
    lines = coordinator.get("/metrics")[1].splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(begins))


def test_awaited_value_reaches_all_ranks_behind_one_address(guarded: Coordinator):
    ranks, value = 200, bytes(1 << 20)
    token = bearing(SECRETS[Role.WORKER])
    key = store_pb2.StoreServiceGetRequest(run_id="a-1", keys=["key"], timeout_ms=int(PATIENCE * 1000))

    async def get(number: int) -> int:
        options = [("grpc.use_local_subchannel_pool", 1), ("number", number)]
        async with grpc.aio.insecure_channel(guarded.endpoint, options=options) as channel:
            found = await aio.stores(channel).Get(key, metadata=token, timeout=PATIENCE)
            return len(found.values[0])

    async def broadcast() -> list[int]:
        getting = [asyncio.create_task(get(number)) for number in range(ranks)]
        await asyncio.to_thread(until, lambda: get_calls(guarded) == ranks)
        async with grpc.aio.insecure_channel(guarded.endpoint) as channel:
            entries = [store_pb2.KeyValue(key="key", value=value)]
            request = store_pb2.SetRequest(run_id="a-1", entries=entries)
            await aio.stores(channel).Set(request, metadata=token)
        return await asyncio.gather(*getting)

    assert asyncio.run(broadcast()) == [len(value)] * ranks


def test_compressed_message_is_refused_unread_by_relay(guarded: Coordinator, tmp_path: Path):
    extra = (f"--tokens-file={tmp_path / 'tokens.toml'}",)
    listen = f"127.0.0.1:{free_port()}"
    with Relay(tmp_path, guarded.endpoint, listen=listen, extra=extra) as relay:
        before = peak(relay.pid)
        token = bearing(SECRETS[Role.WORKER])
        ended = asyncio.run(send(relay.listen, CONNECT, grpc.Compression.Gzip, token))
        assert ended == {grpc.StatusCode.UNIMPLEMENTED: REQUESTS}
        assert peak(relay.pid) < before + ROOM


def test_message_beyond_what_a_coordinator_takes_is_refused_by_relay(guarded: Coordinator, tmp_path: Path):
    listen = f"127.0.0.1:{free_port()}"
    with Relay(tmp_path, guarded.endpoint, listen=listen) as relay:
        before = peak(relay.pid)
        ended = asyncio.run(send(relay.listen, CONNECT, grpc.Compression.NoCompression, size=40 << 20))
        assert ended == {grpc.StatusCode.RESOURCE_EXHAUSTED: REQUESTS}
        assert peak(relay.pid) < before + ROOM
