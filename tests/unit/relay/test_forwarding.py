"""Which failed calls a relay repeats, and what its caller receives."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from lab.patience import PATIENCE
from muster.client.calls import ELSEWHERE, reason_of
from muster.relay.authenticator import AllowAll
from muster.relay.forwarding import MAX_UNREAD_BYTES_PER_ADDRESS, CallForwarder
from muster.relay.listen_address import parse_listen_address
from muster.relay.server import RelayConfig, RelayServer, start
from muster.relay.stats import RelayStats
from muster.relay.upstream import Upstream
from muster.serving.options import READ_TIMEOUT
from muster.serving.writes import Writes
from tests.support.rich_status import rich_status
from tests.support.world.virtual_time import START, in_virtual_time

JOIN = "/muster.v1.RendezvousService/Join"
OPERATE = "/muster.v1.StoreService/Operate"
Turn = Callable[[Any], Awaitable[None]]
"""How a call is served."""


class Coordinator(grpc.GenericRpcHandler):
    """Serves each call as the test says, one after the other."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.connections: list[str] = []
        """Over which each call came."""
        self.all_here = asyncio.Barrier(1)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def call(_: bytes, context: Any) -> None:
            self.connections.append(context.peer())
            turn = self.turns.pop(0)
            await self.all_here.wait()
            await turn(context)

        return grpc.stream_stream_rpc_method_handler(call)


def says(*words: bytes, then: grpc.Status | None = None) -> Turn:
    """Answers, and ends well or with a status."""

    async def turn(context: Any) -> None:
        for word in words:
            await context.write(word)
        if then is not None:
            await context.abort_with_status(then)

    return turn


def breaks(*words: bytes) -> Turn:
    """Answers, and ends as a connection does that is lost."""

    async def turn(context: Any) -> None:
        await says(*words)(context)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    return turn


def echoes(times: int, then: grpc.Status | None = None) -> Turn:
    """Answers each request with itself, so often; ends then, or refuses the next with a status."""

    async def turn(context: Any) -> None:
        for _ in range(times):
            request = await context.read()
            if request is grpc.aio.EOF:
                return
            await context.write(request)
        if then is not None:
            await context.read()
            await context.abort_with_status(then)

    return turn


class World:
    """A relay before a coordinator.

    Args:
        coordinator: serves what is passed on.
        caller: a channel to the relay.
        relay: the relay.
        stats: its stats.
    """

    def __init__(
        self, coordinator: Coordinator, caller: grpc.aio.Channel, relay: RelayServer, stats: RelayStats
    ) -> None:
        self.coordinator = coordinator
        self.relay = relay
        self.stats = stats
        self._caller = caller

    async def call(self, method: str = JOIN) -> tuple[list[bytes], str]:
        """What is answered to a call, and the reason of its end or its code."""
        call = self.begin(method)
        heard: list[bytes] = []
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                heard.append(data)
        except grpc.aio.AioRpcError as error:
            return heard, reason_of(error) or error.code().name
        return heard, "OK"

    def begin(self, method: str = JOIN) -> Any:
        """A call whose answers are not read until somebody does."""
        make: Any = self._caller.unary_stream(method)
        return make(b"", timeout=PATIENCE)

    def dialogue(self) -> Any:
        """An open one: write to it, and read."""
        make: Any = self._caller.stream_stream(OPERATE)
        return make(timeout=PATIENCE)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    coordinator, stats = Coordinator(), RelayStats()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((coordinator,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listen = parse_listen_address(f"unix://{tmp_path / 's'}")
    relay = await start(RelayConfig(listen=listen, upstream=f"127.0.0.1:{port}", version="0"), stats)
    async with grpc.aio.insecure_channel(listen.target) as caller:
        yield World(coordinator, caller, relay, stats)
    await relay.stop(0)
    await server.stop(0)


@pytest.mark.parametrize("reason", sorted(ELSEWHERE))
async def test_call_is_repeated_at_the_leader_after_reason_to_try_elsewhere(world: World, reason: str):
    world.coordinator.turns = [says(then=rich_status(reason, "not here.")), says(b"yes")]
    assert await world.call() == ([b"yes"], "OK")


@pytest.mark.parametrize(
    "turn",
    [
        breaks(b"one"),
        *(says(b"one", then=rich_status(reason, "not here.")) for reason in sorted(ELSEWHERE)),
    ],
)
async def test_broken_stream_ends_with_upstream_lost(world: World, turn: Turn):
    world.coordinator.turns = [turn]
    assert await world.call() == ([b"one"], "UPSTREAM_LOST")


async def test_coordinators_status_ends_the_callers_stream(world: World):
    closed = rich_status("RUN_CLOSED", "it is over.", grpc.StatusCode.FAILED_PRECONDITION)
    world.coordinator.turns = [says(b"one", then=closed)]
    assert await world.call() == ([b"one"], "RUN_CLOSED")


async def test_refusal_counts_as_an_answer(world: World):
    refused = rich_status("LIMIT_EXCEEDED", "too many.", grpc.StatusCode.RESOURCE_EXHAUSTED)
    world.coordinator.turns = [says(then=refused)]
    assert not world.stats.connected
    assert await world.call() == ([], "LIMIT_EXCEEDED")
    assert world.stats.connected


async def test_call_that_may_have_been_carried_out_is_not_repeated(world: World):
    world.coordinator.turns = [breaks()]
    assert await world.call("/muster.v1.RunService/Forget") == ([], "UNAVAILABLE")
    assert not world.stats.connected


async def test_connection_is_kept_after_a_refusal_and_replaced_after_a_loss(world: World):
    refused = rich_status("RUN_NOT_FOUND", "no such run.", grpc.StatusCode.NOT_FOUND)
    world.coordinator.turns = [says(then=refused), breaks(), says(b"yes")]
    assert await world.call() == ([], "RUN_NOT_FOUND")
    assert await world.call() == ([b"yes"], "OK")
    first, second, third = world.coordinator.connections
    assert first == second
    assert second != third


async def test_lost_connection_stays_open_while_other_calls_use_it(world: World):
    world.coordinator.all_here = asyncio.Barrier(2)
    may_end = asyncio.Event()

    async def stays(context: Any) -> None:
        await may_end.wait()
        await says(b"still here")(context)

    world.coordinator.turns = [breaks(), stays]
    calls = [asyncio.create_task(world.call("/muster.v1.RunService/Forget")) for _ in range(2)]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert [call.result() for call in done] == [([], "UNAVAILABLE")]
    may_end.set()
    assert sorted(await asyncio.gather(*calls)) == [([], "UNAVAILABLE"), ([b"still here"], "OK")]


# ---------------------------------------------------------------------- dialogues


async def ask(dialogue: Any, request: bytes) -> Any:
    await dialogue.write(request)
    return await dialogue.read()


async def last_word(dialogue: Any) -> str:
    """Why there is no answer any more."""
    try:
        answer = await ask(dialogue, b"more")
    except grpc.aio.AioRpcError as error:
        return reason_of(error)
    assert answer is grpc.aio.EOF
    return ""


async def test_dialogue_uses_one_stream_until_its_caller_ends_it(world: World):
    world.coordinator.turns = [echoes(9)]
    dialogue = world.dialogue()
    assert [await ask(dialogue, bytes([number])) for number in range(5)] == [
        b"\0",
        b"\1",
        b"\2",
        b"\3",
        b"\4",
    ]
    await dialogue.done_writing()
    assert await dialogue.read() is grpc.aio.EOF
    assert len(world.coordinator.connections) == 1


async def test_unanswered_dialogue_is_moved_to_the_leader(world: World):
    world.coordinator.turns = [says(then=rich_status("NOT_LEADER", "not here.")), echoes(2)]
    dialogue = world.dialogue()
    assert await ask(dialogue, b"1") == b"1"
    assert await ask(dialogue, b"2") == b"2"


async def test_another_dialogue_can_follow_one_that_the_coordinator_ended(world: World):
    world.coordinator.turns = [echoes(1), echoes(1)]
    for word in (b"1", b"2"):
        dialogue = world.dialogue()
        assert await ask(dialogue, word) == word
        assert await last_word(dialogue) in (
            "",
            "UPSTREAM_LOST",  # It ended while the relay wrote to it.
        )


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (rich_status("LIMIT_EXCEEDED", "too much."), "LIMIT_EXCEEDED"),
        (rich_status("NOT_LEADER", "no more."), "UPSTREAM_LOST"),
        (rich_status("COORDINATOR_DRAINING", "no more."), "UPSTREAM_LOST"),
        # The relay's own token, that is.
        (rich_status("TOKEN_UNKNOWN", "no more."), "UPSTREAM_LOST"),
        (rich_status("TOKEN_EXPIRED", "no more."), "UPSTREAM_LOST"),
    ],
)
async def test_end_of_a_dialogue_tells_refusal_from_lost_upstream(
    world: World, ended: grpc.Status, reason: str
):
    world.coordinator.turns = [echoes(1, ended)]
    dialogue = world.dialogue()
    assert await ask(dialogue, b"1") == b"1"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(dialogue, b"2")
    assert reason_of(caught.value) == reason


async def test_dialogue_ends_for_its_caller_when_the_coordinator_ends_it(world: World):
    """Else its caller would hold it, and by it the connection, though nothing can come of it."""
    world.coordinator.turns = [echoes(1)]
    dialogue = world.dialogue()
    assert await ask(dialogue, b"1") == b"1"
    assert await dialogue.read() is grpc.aio.EOF


async def test_stopping_relay_ends_an_idle_dialogue_at_once(world: World):
    world.coordinator.turns = [echoes(9)]
    dialogue = world.dialogue()
    assert await ask(dialogue, b"1") == b"1"
    stopping = asyncio.create_task(world.relay.stop(PATIENCE))
    assert await dialogue.read() is grpc.aio.EOF
    await stopping


async def test_stopping_relay_ends_a_dialogue_after_its_open_answer(world: World):
    handed, goes_on = asyncio.Event(), asyncio.Event()

    async def turn(context: Any) -> None:
        await context.read()
        handed.set()
        await goes_on.wait()
        await context.write(b"answer")
        await context.read()

    world.coordinator.turns = [turn]
    dialogue = world.dialogue()
    await dialogue.write(b"1")
    await handed.wait()
    stopping = asyncio.create_task(world.relay.stop(PATIENCE))
    await asyncio.sleep(0)  # It drains.
    goes_on.set()
    assert await dialogue.read() == b"answer"
    assert await dialogue.read() is grpc.aio.EOF
    await stopping


async def test_answer_is_refused_while_its_address_leaves_others_unread(world: World):
    large = bytes(MAX_UNREAD_BYTES_PER_ADDRESS // 2 + 1)
    handed_over = asyncio.Event()

    async def first(context: Any) -> None:
        await context.write(large)
        handed_over.set()

    world.coordinator.turns += [first, says(large), says(b"small")]
    unread = world.begin()
    await handed_over.wait()
    assert await world.call() == ([], "SLOW_CONSUMER")
    assert await world.call() == ([b"small"], "OK")
    unread.cancel()


@in_virtual_time
async def test_relay_refuses_a_call_if_the_request_does_not_arrive_in_time():
    upstream = Upstream("127.0.0.1:1", name="relay", version="0", stats=RelayStats())

    class Silent:
        refused: grpc.Status

        async def read(self) -> Any:
            await asyncio.Event().wait()

        def peer(self) -> str:
            return "ipv4:10.0.0.7:1"

        def invocation_metadata(self) -> None: ...

        async def abort_with_status(self, status: grpc.Status) -> None:
            self.refused = status

    class Details:
        method = "/muster.v1.StoreService/Set"

    context = Silent()
    handler = CallForwarder(upstream, AllowAll(), RelayStats(), Writes(never_slow)).service(Details())  # type: ignore[arg-type]
    await handler.stream_stream(None, context)
    assert f"must come within {READ_TIMEOUT:g} s" in context.refused.details
    assert asyncio.get_running_loop().time() == START + READ_TIMEOUT


def never_slow(reader: str, size: int) -> None:
    raise AssertionError(f"{reader} has not read {size} bytes")
