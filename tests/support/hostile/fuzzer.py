"""Says what no client should: ``python -m tests.support.hostile.fuzzer ENDPOINT SEED COUNT``.

Many calls at once, to every method in turn, and scripts on session streams. Prints ``half`` when half of the
messages are answered, and at the end a line of JSON: by method, how many messages were sent and what was
answered; and what should not have been answered. Each message follows from the seed. The order in which they
come does not, since many are on their way at once, nor how many more than COUNT there are: see ``GOOD``.

A message counts when the coordinator has dealt with it: when it answered the call, or a later message of
the stream.
"""

import asyncio
import itertools
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import grpc
import uvloop
from google.protobuf.descriptor import ServiceDescriptor
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from muster.service.core.checks import MAX_GENERATION
from muster.service.rpc.server import SERVICES
from muster.v1 import session_pb2
from tests.support.hostile.garbage import RUNS, TEXTS, Source

AT_ONCE = 64
CHANNELS = 4
MESSAGES_OF_A_KIND = 60
MESSAGES_ON_STREAMS = 600
STREAMS = 0.1
"""The part of all calls that is sessions."""
SAID_ON_A_STREAM = 60
CALLS_PER_SUFFIX = 2_000
"""The number of calls that use the same runs. Later calls use runs with another suffix."""
PATIENCE = 0.15
"""Seconds for calls that may wait for others."""
WAITING = {
    "BarrierService.Arrive",
    "StoreService.Get",
    "StoreService.Wait",
    "LocalCheckpointService.Commit",
    "LocalCheckpointService.Recover",
}
STUCK = 120.0
"""Seconds for any other: a loaded machine needs long."""
GIVEN_UP = 0.05
"""The part of all calls that is cancelled right after its start."""
TOO_LARGE = 3 << 20
"""Bytes of a message that gRPC itself refuses, at the bounds that the test sets."""
OWN = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
"""Codes that a call may end with since the fuzzer gave it up."""
FAULTS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
ENDED_UNDER_A_WRITE = "Internal error from Core"
SESSION = "/muster.v1.SessionService/Connect"
ALL_SERVICES: tuple[ServiceDescriptor, ...] = (
    *SERVICES,
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
"""Those of Muster, and those that stand beside them."""
ALL_METHODS = {f"/{service.full_name}/{m.name}": m for service in ALL_SERVICES for m in service.methods}
GOOD = {"welcome", "group_joined", "decision"}
"""Answers to what is said well. Few barriers are decided, and by chance none: then more is said."""
MOST = 10
"""Times the messages that it was asked for."""
ConnectRequest = session_pb2.ConnectRequest


class Fuzzer:
    """Counts what is said and answered.

    Args:
        endpoint: of the coordinator.
        seed: of everything that is said.
        count: of messages, at least.
    """

    def __init__(self, endpoint: str, seed: int, count: int) -> None:
        self._seed = seed
        self._count = count
        self._calls = [name for name in ALL_METHODS if name != SESSION]
        kinds = {
            method.input_type: MESSAGES_ON_STREAMS if name == SESSION else MESSAGES_OF_A_KIND
            for name, method in ALL_METHODS.items()
        }
        self._source = Source(kinds, seed)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channels = [grpc.aio.insecure_channel(endpoint, options=options) for _ in range(CHANNELS)]
        self.sent: Counter[str] = Counter()
        self.answers: dict[str, Counter[str]] = defaultdict(Counter)
        self.wrong: Counter[str] = Counter()
        self._next = 0

    async def run(self) -> None:
        """Say it all."""
        await asyncio.gather(*(self._work() for _ in range(AT_ONCE)))
        for channel in self._channels:
            await channel.close()

    async def _work(self) -> None:
        while self._goes_on():
            number, self._next = self._next, self._next + 1
            chance = random.Random(self._seed * 1_000_003 + number)
            channel = self._channels[number % CHANNELS]
            suffix = str(number // CALLS_PER_SUFFIX)
            if chance.random() < STREAMS:
                await self._session(channel, chance, suffix)
            else:
                # In turn, so that each gets as much.
                await self._call(channel, self._calls[number % len(self._calls)], chance, suffix)

    def _goes_on(self) -> bool:
        sent = self.sent.total()
        return sent < self._count or (not self.answers[SESSION].keys() >= GOOD and sent < MOST * self._count)

    def _counted(self, method: str, answer: str, messages: int = 1) -> None:
        before = self.sent.total()
        self.sent[method] += messages
        self.answers[method][answer] += 1
        if before < self._count // 2 <= self.sent.total():
            print("half", flush=True)

    # ------------------------------------------------------------------ calls

    async def _call(self, channel: grpc.aio.Channel, method: str, chance: random.Random, suffix: str) -> None:
        kind = ALL_METHODS[method]
        data = self._source.data(kind.input_type, chance, suffix)
        if chance.random() < 0.0005:
            data = bytes(TOO_LARGE)
        waits = kind.server_streaming or f"{kind.containing_service.name}.{kind.name}" in WAITING
        hurried = chance.random() < GIVEN_UP
        patience = 0.005 * chance.random() if hurried else PATIENCE * chance.random() if waits else STUCK
        if kind.client_streaming:
            stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
            await self._listen(stream(iter([data]), timeout=patience), method, data)
            return
        if kind.server_streaming:
            answers: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
            await self._listen(answers(data, timeout=patience), method, data)
            return
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        call = ask(data, timeout=patience)
        if hurried and chance.random() < 0.5:
            await asyncio.sleep(chance.choice([0, 0.001]))
            call.cancel()
        await self._ended(call, method, data, given_up=waits or hurried)

    async def _listen(self, call: Any, method: str, data: bytes) -> None:
        try:
            async for _ in call:
                pass
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass  # Its status is looked at below; only the call is ever cancelled.
        await self._ended(call, method, data, given_up=True)

    async def _ended(self, call: Any, method: str, data: bytes, *, given_up: bool) -> None:
        """Look at how a call ended, whose answer is of no interest."""
        code, details = await call.code(), await call.details()
        reason = reason_of(await call.trailing_metadata())
        if details == ENDED_UNDER_A_WRITE:
            # The client's word for it. What the coordinator meant is in its metrics.
            self._counted(method, "ended under a write")
            return
        answer = f"{code.name} {reason}".strip()
        self._counted(method, answer)
        explained = (
            code is grpc.StatusCode.OK
            or reason
            or (code in OWN and given_up)
            or len(data) >= TOO_LARGE
            or not method.startswith("/muster.v1.")  # Those beside ours have no reasons.
        )
        if code in FAULTS or not explained:
            self.wrong[f"{method}: {answer}: {details}: for {data[:60]!r}"] += 1

    # ------------------------------------------------------------------ sessions

    async def _session(self, channel: grpc.aio.Channel, chance: random.Random, suffix: str) -> None:
        """One stream, from its first message to an end of some kind."""
        method, kind = SESSION, ALL_METHODS[SESSION].input_type
        connect: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        call = connect()
        script = Script(self._source, kind, chance, suffix)
        heard: list[bytes] = []
        fence = asyncio.Event()

        async def hear() -> None:
            try:
                async for data in call:
                    heard.append(data)
                    if script.fence in data:
                        fence.set()
            except (grpc.aio.AioRpcError, asyncio.CancelledError):
                pass  # Its status is looked at below; only the call is ever cancelled.
            fence.set()

        hearing = asyncio.create_task(hear())
        said, passed = 0, False
        try:
            async with asyncio.timeout(STUCK):
                for data in script.body:
                    if call.done():
                        break
                    await call.write(data)
                    said += 1
                await call.write(script.fence_message)
                await fence.wait()
                passed = not call.done()
                await self._end(call, script, chance)
                await hearing
        except TimeoutError:
            self.wrong[f"{method}: stuck after {said} messages"] += 1
            call.cancel()
            await hearing
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            passed = False  # It ended under a write.
            await hearing
        for data in heard:
            self._look_at(method, data)
        # A stream that ended early has dealt with what it answered, and perhaps with more.
        dealt_with = said + 1 if passed else min(said, len(heard) + 1)
        code = await call.code()
        reason = reason_of(await call.trailing_metadata())
        if await call.details() == ENDED_UNDER_A_WRITE:
            self._counted(method, "ended under a write", max(1, dealt_with))
            return
        self._counted(method, f"ended: {code.name} {reason}".strip(), max(1, dealt_with))
        if code in FAULTS or not (code is grpc.StatusCode.OK or reason or code in OWN):
            self.wrong[f"{method}: {code.name}: {await call.details()}"] += 1

    @staticmethod
    async def _end(call: Any, script: "Script", chance: random.Random) -> None:
        """Half-close and listen on, say something that ends it, or be gone."""
        what = chance.randrange(4)
        if what == 0:
            await call.done_writing()
            await asyncio.sleep(0.01)
            call.cancel()
        elif what == 1:
            call.cancel()
        else:
            await call.write(script.goodbye if what == 2 else b"\xff" + chance.randbytes(8))
            await call.done_writing()

    def _look_at(self, method: str, data: bytes) -> None:
        response = session_pb2.ConnectResponse.FromString(data)
        what: str = response.WhichOneof("message") or "nothing"
        if what == "refusal":
            info = ErrorInfo()
            response.refusal.error_info.Unpack(info)
            what += f" {info.reason}"
            if info.domain != "muster" or not info.reason or not response.refusal.message:
                self.wrong[f"{method}: a refusal without a reason: {response.refusal}"] += 1
        self.answers[method][what] += 1


class Script:
    """What is said on one stream.

    Args:
        source: where messages come from.
        kind: of what is said on it.
        chance: decides.
        suffix: of the names of the runs.
    """

    def __init__(self, source: Source, kind: Any, chance: random.Random, suffix: str) -> None:
        self._source = source
        self._kind = kind
        self._chance = chance
        self._suffix = suffix
        # Refused, since nobody joined that group; and answered after all that was said before.
        prefix = f"fence-{chance.randrange(10**9)}"
        self.fence = prefix.encode()
        arrive = session_pb2.Arrive(prefix=prefix, arrivals=[session_pb2.Arrival(rank=0)], timeout_ms=1)
        self.fence_message = ConnectRequest(arrive=arrive).SerializeToString()
        self.goodbye = ConnectRequest(goodbye=session_pb2.Goodbye(reason="fuzzed")).SerializeToString()
        self._alone = chance.random() < 0.5
        """Whether its run is its own."""
        self.body = self._body()

    def _body(self) -> list[bytes]:
        begin = self._chance.random()
        if begin < 0.1:
            return [self._source.data(self._kind, self._chance, self._suffix)]
        if begin < 0.2:
            return [self._one("hello").SerializeToString()]
        ranks = self._chance.sample(range(4), self._chance.randint(1, 4))
        body = [self._hello(ranks).SerializeToString()]
        wanted = self._chance.randint(1, 2 * SAID_ON_A_STREAM)
        going_well = self._going_well(ranks) if self._alone else iter(())
        while len(body) < wanted:
            message = next(going_well, None) if self._chance.random() < 0.5 else None
            if message is None:
                message = self._one(self._chance.choice(["join_group", "arrive"]))
            # The same again, now and then; and in no order.
            body += [message.SerializeToString()] * self._chance.choice([1, 1, 1, 2])
        if self._chance.random() < 0.1:
            # A second Hello, a Goodbye or anything else in the middle of it.
            data = self._source.data(self._kind, self._chance, self._suffix)
            body.insert(self._chance.randrange(1, len(body) + 1), data)
        return body

    def _going_well(self, ranks: list[int]) -> Iterator[ConnectRequest]:
        """What a worker would say, so that barriers are decided beside all that is refused."""
        size = len(ranks) + self._chance.choice([0, 0, 1])
        join = session_pb2.JoinGroup(prefix="own", world_size=max(size, *ranks, 0) + 1, participants=ranks)
        yield ConnectRequest(join_group=join)
        for sequence in itertools.count():
            for rank in ranks:
                arrival = session_pb2.Arrival(rank=rank, payload=self._chance.randbytes(3))
                if self._chance.random() < 0.1:
                    arrival.failure = self._chance.choice(TEXTS)
                arrive = session_pb2.Arrive(
                    prefix="own", sequence=sequence, timeout_ms=10_000, arrivals=[arrival]
                )
                yield ConnectRequest(arrive=arrive)

    def _one(self, kind: str) -> ConnectRequest:
        """Draw a message of this kind from the pool."""
        while True:
            message = self._source.message(self._kind, self._chance, self._suffix)
            assert isinstance(message, ConnectRequest)
            if message.WhichOneof("message") == kind:
                return message

    def _hello(self, ranks: list[int]) -> ConnectRequest:
        """One that is welcome, as far as it depends on itself."""
        chance = self._chance
        # Now and then a process that is there already, whose other stream then ends.
        number = chance.randrange(8) if chance.random() < 0.1 else chance.randrange(10**9)
        processes = [
            session_pb2.Process(rank=rank, incarnation=f"process-{number}", host="fuzz", pid=rank)
            for rank in ranks
        ]
        run_id, generation = f"{chance.choice(RUNS)}-{self._suffix}", 0
        if self._alone:
            run_id, generation = self.fence.decode(), chance.choice([0, 1, MAX_GENERATION + 1])
        elif run_id.startswith(RUNS[-1]):
            # Nobody else is heard in this one then.
            generation = MAX_GENERATION
        hello = session_pb2.Hello(
            run_id=run_id, generation=generation, processes=processes, protocol_version=1
        )
        return ConnectRequest(hello=hello)


def reason_of(trailing: Any) -> str:
    """The reason in a call's status; empty without one of ours."""
    for key, value in trailing or ():
        if key == "grpc-status-details-bin":
            info = ErrorInfo()
            details = Status.FromString(value).details
            if details and details[0].Unpack(info) and info.domain == "muster":
                return str(info.reason)
    return ""


async def main(endpoint: str, seed: int, count: int) -> None:
    fuzzer = Fuzzer(endpoint, seed, count)
    await fuzzer.run()
    print(json.dumps({"sent": fuzzer.sent, "answers": fuzzer.answers, "wrong": fuzzer.wrong}))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
