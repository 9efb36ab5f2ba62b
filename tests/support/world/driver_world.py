"""A driver with its engine, its observer, and processes that talk to it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import TypeVar

from muster.service.clock import Clock, SystemClock
from muster.service.core.retention.retention import FOR_EVER, Retention
from muster.service.core.vocabulary.effects import NO_RANKS, Message, Notice
from muster.service.core.vocabulary.events import (
    Arrival,
    Arrive,
    Hello,
    JoinGroup,
    JoinRendezvous,
    ProcessInfo,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, NodeInfo, RendezvousSettings
from muster.service.core.vocabulary.records import RoundRecord
from muster.service.driver import Driver, Outgoing
from muster.service.rpc.codec import encode_session_message
from muster.service.storage.engine import Engine, StorageError
from muster.service.storage.memory import MemoryEngine
from muster.service.telemetry.observers import Observers
from tests.support.world.held_engine import Commit, HeldEngine
from tests.support.world.virtual_time import LoopClock

T = TypeVar("T")


CKPT = "checkpoint"


TTL = 10.0


class CountingEngine(MemoryEngine):
    """Remembers its commits, and fails at the commit of this number."""

    def __init__(self, fail_at: int = 0) -> None:
        super().__init__()
        self.commits: list[Commit] = []
        self._fail_at = fail_at

    def commit(self, writes: Mapping[bytes, bytes | None], cleared: Sequence[bytes] = ()) -> None:
        self.commits.append(Commit(dict(writes), list(cleared)))
        if len(self.commits) == self._fail_at:
            raise StorageError("the disk is full")
        super().commit(writes, cleared)


class Recorder:
    """An observer that remembers all that it hears of."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.rounds: list[RoundRecord] = []
        self.notices: list[Notice] = []
        self.forgotten_runs: list[str] = []
        self.commits = 0

    def decided(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def round_completed(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def noticed(self, notice: Notice) -> None:
        self.notices.append(notice)

    def forgotten(self, run_id: str) -> None:
        self.forgotten_runs.append(run_id)

    def committed(self, seconds: float) -> None:
        assert seconds >= 0
        self.commits += 1


class Rank:
    """A process of the run "job", and the messages that it received."""

    def __init__(self, driver: Driver, rank: int, world_size: int = 2, ordinal: int = 0) -> None:
        self.driver = driver
        self.rank = rank
        self.world_size = world_size
        self.ordinal = ordinal
        self.messages: list[Message] = []
        self.data: list[bytes] = []
        self._changed = asyncio.Event()
        self.id = driver.connect(self)

    def deliver(self, outgoing: Outgoing, ranks: AbstractSet[int] = NO_RANKS) -> None:
        self.messages.append(outgoing.message)
        self.data.append(outgoing.data)
        self._changed.set()

    def hello(self) -> "Rank":
        info = ProcessInfo(self.rank, f"life-{self.rank}", "node", 100 + self.rank, self.ordinal)
        self.driver.submit(Hello(self.id, "job", 0, (info,)))
        self.driver.submit(JoinGroup(self.id, CKPT, self.world_size))
        return self

    def arrive(self, sequence: int = 0, timeout: float = 300.0, failure: str | None = None) -> "Rank":
        arrival = Arrival(self.rank, failure=failure)
        self.driver.submit(Arrive(self.id, CKPT, sequence, timeout, (arrival,)))
        return self

    @property
    def heard(self) -> list[type]:
        return [type(message) for message in self.messages]

    async def hears(self, kind: type[T]) -> T:
        """Wait for a message of a kind, and return the newest."""
        while not (found := [message for message in self.messages if isinstance(message, kind)]):
            self._changed.clear()
            await self._changed.wait()
        return found[-1]


@asynccontextmanager
async def driving(
    engine: Engine,
    observer: Recorder | None = None,
    encode: Callable[[Message], bytes] = encode_session_message,
    clock: Clock | None = None,
    retention: Retention = FOR_EVER,
) -> AsyncIterator[Driver]:
    driver = Driver(
        engine,
        clock=clock or SystemClock(),
        observer=observer or Recorder(),
        encode=encode,
        session_ttl=TTL,
        limits=Limits(),
        retention=retention,
    )
    try:
        yield driver
    finally:
        if isinstance(engine, HeldEngine):
            engine.release()
        await driver.close()


def virtual_driver() -> Driver:
    """A driver over a state in memory, in virtual time."""
    return Driver(
        MemoryEngine(),
        clock=LoopClock(),
        observer=Observers(),
        encode=encode_session_message,
        session_ttl=TTL,
        limits=Limits(),
    )


def join(driver: Driver, round: int | None = None) -> Rank:
    """Join as the only node of a round, or come back to it."""
    node = Rank(driver, 0)
    asked = RendezvousSettings(
        min_nodes=1, max_nodes=1, join_timeout=60.0, last_call_timeout=30.0, keep_alive_timeout=15.0
    )
    info = NodeInfo("life", "node", 1)
    driver.submit(JoinRendezvous(node.id, "job", info, 1, asked, round))
    return node


async def settle() -> None:
    """Run the loop until only a commit can go on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def runs(driver: Driver) -> list[str]:
    return await driver.query(lambda core, _: list(core.runs))


def fault(*_: object) -> None:
    raise RuntimeError("half a step")
