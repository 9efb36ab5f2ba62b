"""What comes and goes on the coordinator of the soak."""

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import grpc

from benchmarks.soaking.rank import Rank
from lab import aio
from muster.v1 import (
    barrier_pb2,
    common_pb2,
    coordinator_pb2,
    rendezvous_pb2,
    run_pb2,
    store_pb2,
)

STUCK = 60.0
"""Seconds after which a scenario that has not ended is a failure."""
Joining = grpc.aio.UnaryStreamCall[rendezvous_pb2.JoinRequest, rendezvous_pb2.JoinResponse]
FAULTS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED}
RESIDENTS = 8
"""Ranks of the job that stays."""
GENERATION_SECONDS = 120.0
"""How often that job restarts."""


class Churn:
    """What comes and goes.

    Args:
        endpoint: of the coordinator.
        page: the URL of its HTTP port.
        chance: decides what comes.
        begin: the time of the start, of the monotonic clock.
        web: for the HTTP port.
    """

    def __init__(
        self, endpoint: str, page: str, chance: random.Random, begin: float, web: aiohttp.ClientSession
    ) -> None:
        self._endpoint = endpoint
        self._page = page
        self._chance = chance
        self._begin = begin
        self._web = web
        self._numbers = 0
        self.done: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self.scenarios: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.calm, 6),
            (self.timed_out, 2),
            (self.voted, 2),
            (self.vanished, 3),
            (self.killed, 1),
            (self.long_polls, 2),
            (self.rounds, 4),
            (self.keys, 4),
            (self.sessions, 4),
            (self.watched, 2),
            (self.looked_at, 4),
            (self.wrong, 4),
            (self.evicted, 2),
        ]

    def _name(self) -> str:
        self._numbers += 1
        return f"job-{self._numbers:06}"

    @contextlib.asynccontextmanager
    async def _channel(self) -> AsyncIterator[grpc.aio.Channel]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._endpoint, options=options) as channel:
            yield channel

    @contextlib.asynccontextmanager
    async def _job(
        self, run_id: str, present: int, world_size: int, generation: int = 0
    ) -> AsyncIterator[list[Rank]]:
        """Ranks on one connection; those that do not leave are gone with it."""
        async with self._channel() as channel:
            stub = aio.sessions(channel)
            ranks = [Rank(stub.Connect(), number) for number in range(present)]
            await asyncio.gather(*(rank.enter(run_id, world_size, generation=generation) for rank in ranks))
            yield ranks

    async def _close(self, run_id: str, *, abort_barriers: bool = False) -> None:
        async with self._channel() as channel:
            request = rendezvous_pb2.CloseRequest(
                run_id=run_id, by="soak", reason="done", abort_barriers=abort_barriers
            )
            await aio.rendezvous(channel).Close(request)

    async def one(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Play one scenario; how it ends is counted."""
        name = getattr(scenario, "__name__", "")
        try:
            async with asyncio.timeout(STUCK):
                await scenario()
            self.done[name] += 1
        except grpc.aio.AioRpcError as error:
            self.answers[error.code().name] += 1
            if error.code() in FAULTS or name != "wrong":
                self.failures.append(f"{name}: {error.code().name}: {error.details()}")
        except (AssertionError, TimeoutError, aiohttp.ClientError, OSError) as error:
            self.failures.append(f"{name}: {error!r}")

    async def refused(self, call: Awaitable[Any]) -> grpc.StatusCode:
        """The code with which a call is refused."""
        code = grpc.StatusCode.OK
        try:
            await call
        except grpc.aio.AioRpcError as error:
            code = error.code()
            self.answers[code.name] += 1
        assert code not in FAULTS, code
        return code

    async def calm(self) -> None:
        """Ranks meet some times, and leave; some runs are closed."""
        run_id, size = self._name(), self._chance.randint(2, 8)
        async with self._job(run_id, size, size) as ranks:
            for _ in range(self._chance.randint(1, 8)):
                outcomes = await asyncio.gather(*(rank.arrive() for rank in ranks))
                assert set(outcomes) == {common_pb2.OUTCOME_RELEASED}
                await asyncio.sleep(self._chance.random())
            await asyncio.gather(*(rank.leave() for rank in ranks))
        if self._chance.random() < 0.5:
            await self._close(run_id)

    async def timed_out(self) -> None:
        """One rank does not come."""
        run_id, size = self._name(), self._chance.randint(2, 6)
        async with self._job(run_id, size - 1, size) as ranks:
            for _ in range(2):
                outcomes = await asyncio.gather(*(rank.arrive(0.5) for rank in ranks))
                assert set(outcomes) == {common_pb2.OUTCOME_TIMED_OUT}
            await asyncio.gather(*(rank.leave() for rank in ranks))

    async def voted(self) -> None:
        """One rank fails."""
        run_id, size = self._name(), self._chance.randint(2, 6)
        async with self._job(run_id, size, size) as ranks:
            votes = [None] * (size - 1) + ["the disk is full: " + "x" * self._chance.randint(0, 2_000)]
            outcomes = await asyncio.gather(
                *(rank.arrive(failure=why) for rank, why in zip(ranks, votes, strict=True))
            )
            assert set(outcomes) == {common_pb2.OUTCOME_ABORTED}
            await asyncio.gather(*(rank.leave() for rank in ranks))

    async def vanished(self) -> None:
        """One rank's stream breaks while the others wait; sometimes it comes back in time."""
        run_id, size = self._name(), self._chance.randint(2, 6)
        async with self._job(run_id, size, size) as ranks, self._channel() as channel:
            waiting = [asyncio.create_task(rank.arrive()) for rank in ranks[:-1]]
            ranks[-1].vanish()
            if self._chance.random() < 0.5:
                again = Rank(aio.sessions(channel).Connect(), size - 1)
                await again.enter(run_id, size)
                waiting.append(asyncio.create_task(again.arrive()))
            outcomes = set(await asyncio.gather(*waiting))
            assert outcomes <= {common_pb2.OUTCOME_RELEASED, common_pb2.OUTCOME_MEMBER_LOST}
            assert len(outcomes) == 1

    async def killed(self) -> None:
        """A process with four ranks is killed while they wait for a fifth. Costly, so not often."""
        if self._chance.random() < 0.7:
            return
        arguments = [
            sys.executable,
            "-m",
            "lab.crowd",
            self._endpoint,
            "0",
            "4",
            "5",
            "1",
            self._name(),
        ]
        process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.DEVNULL)
        try:
            await asyncio.sleep(2)
        finally:
            # Their barrier waits for ever, so that only a kill ends them.
            process.kill()
            await process.wait()

    async def long_polls(self) -> None:
        """Arrivals without a session; one caller gives up, and asks again."""
        run_id = self._name()
        async with self._channel() as channel:
            stub = aio.barriers(channel)

            def arrive(rank: int) -> barrier_pb2.ArriveRequest:
                return barrier_pb2.ArriveRequest(
                    run_id=run_id, prefix="poll", rank=rank, world_size=3, sequence=0, timeout_ms=20_000
                )

            assert (
                await self.refused(stub.Arrive(arrive(0), timeout=0.5)) is grpc.StatusCode.DEADLINE_EXCEEDED
            )
            answers = await asyncio.gather(*(stub.Arrive(arrive(rank)) for rank in range(3)))
            assert {one.decision.outcome for one in answers} == {common_pb2.OUTCOME_RELEASED}
            abort = barrier_pb2.AbortRequest(run_id=run_id, prefix="poll", reason="nothing is open")
            assert await self.refused(stub.Abort(abort)) is grpc.StatusCode.FAILED_PRECONDITION

    async def rounds(self) -> None:
        """Nodes come together, one leaves, another comes, and the run is closed or left."""
        run_id = self._name()
        async with self._channel() as channel:
            stub = aio.rendezvous(channel)

            def join(node: int, attempt: int) -> Joining:
                return stub.Join(
                    rendezvous_pb2.JoinRequest(
                        run_id=run_id,
                        node=rendezvous_pb2.Node(incarnation=f"node-{node}", address=f"10.0.0.{node}", pid=1),
                        attempt=attempt,
                        min_nodes=2,
                        max_nodes=3,
                        join_timeout_ms=20_000,
                        last_call_timeout_ms=300,
                        keep_alive_timeout_ms=2_000,
                        protocol_version=1,
                    )
                )

            async def admitted(call: Joining) -> int:
                while True:
                    answer = await aio.read(call)
                    assert answer is not None
                    if answer.HasField("round_complete"):
                        return int(answer.round_complete.round)

            calls = [join(node, 1) for node in range(3)]
            assert len(set(await asyncio.gather(*map(admitted, calls)))) == 1
            leave = rendezvous_pb2.LeaveRequest(run_id=run_id, incarnation="node-2", reason="soak")
            assert (await stub.Leave(leave)).had_place
            calls[0].cancel()
            calls = [join(node, attempt) for node, attempt in ((0, 2), (1, 2), (7, 1))]
            assert len(set(await asyncio.gather(*map(admitted, calls)))) == 1
            await stub.Get(rendezvous_pb2.RendezvousServiceGetRequest(run_id=run_id))
            if self._chance.random() < 0.5:
                await self._close(run_id, abort_barriers=True)
            for call in calls:
                call.cancel()

    async def keys(self) -> None:
        """A store is written to, waited on, and partly emptied."""
        run_id = self._name()
        async with self._channel() as channel:
            stub = aio.stores(channel)
            waiting = asyncio.ensure_future(
                stub.Wait(store_pb2.WaitRequest(run_id=run_id, keys=["k/9"], timeout_ms=20_000))
            )
            for number in range(10):
                value = bytes(self._chance.randint(0, 4_096))
                entry = store_pb2.KeyValue(key=f"k/{number}", value=value)
                operation = store_pb2.OperationId(client=f"{run_id}-c", number=number + 1)
                request = store_pb2.SetRequest(run_id=run_id, entries=[entry], operation=operation)
                await stub.Set(request)
            await waiting
            for _ in range(5):
                await stub.Add(store_pb2.AddRequest(run_id=run_id, key="n", amount=-3))
            await stub.Append(store_pb2.AppendRequest(run_id=run_id, key="a", value=b"more"))
            await stub.CompareSet(store_pb2.CompareSetRequest(run_id=run_id, key="c", desired=b"1"))
            absent = store_pb2.StoreServiceGetRequest(run_id=run_id, keys=["absent"], timeout_ms=200)
            assert await self.refused(stub.Get(absent)) is grpc.StatusCode.DEADLINE_EXCEEDED
            await stub.Delete(store_pb2.DeleteRequest(run_id=run_id, key="k/1"))
            await stub.DeletePrefix(store_pb2.DeletePrefixRequest(run_id=run_id, prefix="k/"))
            assert (await stub.NumKeys(store_pb2.NumKeysRequest(run_id=run_id))).count == 3

    async def sessions(self) -> None:
        """Sessions over and over, in one of ten runs that come back."""
        run_id = f"again-{self._chance.randrange(10)}"
        async with self._channel() as channel:
            stub = aio.sessions(channel)
            for number in range(8):
                rank = Rank(stub.Connect(), number)
                await rank.enter(run_id, 8, prefix=f"p{number}")
                if number % 2:
                    await rank.leave()
                else:
                    rank.vanish()

    async def watched(self) -> None:
        """Someone watches for a while, and goes."""
        async with self._channel() as channel:
            call = aio.runs(channel).Watch(run_pb2.WatchRequest())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._chance.uniform(0.5, 4)):
                    while await call.read() is not grpc.aio.EOF:
                        pass
            call.cancel()

    async def looked_at(self) -> None:
        """People and Prometheus look."""
        async with self._channel() as channel:
            runs = aio.runs(channel)
            found = (await runs.List(run_pb2.RunServiceListRequest())).runs
            run_id = self._chance.choice(found).run_id if found else "none"
            await self.refused(runs.Members(run_pb2.MembersRequest(run_id=run_id)))
            barriers = aio.barriers(channel)
            await self.refused(
                barriers.List(barrier_pb2.BarrierServiceListRequest(run_id=run_id, history=20))
            )
            status = aio.coordinators(channel)
            await status.Status(coordinator_pb2.StatusRequest())
        for path in ("/", "/status.json", f"/runs/{run_id}", "/metrics", "/readyz", "/nothing"):
            async with self._web.get(self._page + path) as response:
                await response.read()
                assert response.status in (200, 404), (path, response.status)

    async def wrong(self) -> None:
        """Bytes that are no request, and requests that cannot be."""
        async with self._channel() as channel:
            data = random.randbytes(self._chance.randint(1, 200))
            set_key: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
            set_key = channel.unary_unary("/muster.v1.StoreService/Set")
            await self.refused(set_key(b"\xff" + data))
            runs = aio.runs(channel)
            await self.refused(runs.Get(run_pb2.RunServiceGetRequest(run_id=f"no-{self._name()}")))
            connect: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
            connect = channel.stream_stream("/muster.v1.SessionService/Connect")
            call = connect()
            await call.write(b"\xff" + data)
            while await call.read() is not grpc.aio.EOF:
                pass
            self.answers[(await call.code()).name] += 1
            await Rank(aio.sessions(channel).Connect(), -1).enter("wrong", 1)

    async def evicted(self) -> None:
        """A rank is sent away while another waits for it."""
        run_id = self._name()
        async with self._job(run_id, 2, 3) as ranks, self._channel() as channel:
            waiting = asyncio.create_task(ranks[0].arrive())
            await asyncio.sleep(0.2)
            request = run_pb2.EvictRequest(run_id=run_id, rank=1, reason="soak")
            assert (await aio.runs(channel).Evict(request)).members
            assert await waiting == common_pb2.OUTCOME_MEMBER_LOST
            assert await self.refused(ranks[1].hear("decision")) is grpc.StatusCode.PERMISSION_DENIED

    async def resident(self) -> None:
        """Play a job that stays: a barrier each second, and a restart now and then."""
        while True:
            generation = int((time.monotonic() - self._begin) / GENERATION_SECONDS)
            async with self._job("resident", RESIDENTS, RESIDENTS, generation=generation) as ranks:
                until = time.monotonic() + GENERATION_SECONDS
                while time.monotonic() < until:
                    await asyncio.gather(*(rank.arrive() for rank in ranks))
                    await asyncio.sleep(1)
            self.done["resident"] += 1

    async def run(self, rate: float, seconds: float) -> None:
        """Begin so many scenarios in a second."""
        acts, weights = zip(*self.scenarios, strict=True)
        staying = asyncio.create_task(self.resident())
        async with asyncio.TaskGroup() as group:
            number = 0
            while (due := number / rate) < seconds:
                await asyncio.sleep(max(0.0, self._begin + due - time.monotonic()))
                assert not staying.done(), staying.exception()
                group.create_task(self.one(self._chance.choices(acts, weights)[0]))
                number += 1
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)
