"""A replica that does not lead answers every call, and says who does."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc import standby
from muster.service.rpc.server import METHODS
from muster.service.rpc.standby import StandbyHandler

OWN, FIRST, SECOND = "a:7550", "b:7550", "c:7550"


class News:
    """A cluster of which the test decides the leader."""

    def __init__(self, leader: str = "") -> None:
        self.leader = leader
        self.waiting = 0
        """How often someone has begun to wait."""
        self._counted = asyncio.Event()
        self._news = asyncio.Event()

    async def waits(self, count: int) -> None:
        """Until someone has begun to wait so often."""
        while self.waiting < count:
            self._counted.clear()
            await self._counted.wait()

    def leader_elsewhere(self) -> str:
        return self.leader

    def addresses(self) -> list[str]:
        return [OWN, FIRST]

    @property
    def news(self) -> asyncio.Event:
        self.waiting += 1
        self._counted.set()
        return self._news

    def say(self, leader: str) -> None:
        self.leader = leader
        news, self._news = self._news, asyncio.Event()
        news.set()


class Context:
    def __init__(self, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata


class Details:
    def __init__(self, method: str) -> None:
        self.method = method


def call(handler: StandbyHandler, **metadata: str) -> Any:
    method: Any = Details(next(iter(METHODS)))
    pairs = [(key.replace("_", "-"), value) for key, value in metadata.items()]
    return handler.service(method).stream_stream(None, Context(pairs))


async def refused(handler: StandbyHandler, **metadata: str) -> Refusal:
    with pytest.raises(Refusal) as caught:
        async with asyncio.timeout(PATIENCE):
            await call(handler, **metadata)
    return caught.value


@pytest.mark.parametrize("method", METHODS)
async def test_every_method_is_refused(method: str):
    details: Any = Details(method)
    with pytest.raises(Refusal) as caught:
        await StandbyHandler(News(FIRST)).service(details).stream_stream(None, Context())
    assert caught.value.reason is Reason.NOT_LEADER


async def test_another_method_is_not_its_own():
    details: Any = Details("/grpc.health.v1.Health/Check")
    assert StandbyHandler(News(FIRST)).service(details) is None


async def test_refusal_names_the_leader_in_text_and_metadata():
    refusal = await refused(StandbyHandler(News(FIRST)))
    assert refusal.message == f"this replica does not lead: {FIRST} does. Call it there."
    assert refusal.metadata == {"leader": FIRST, "replicas": f"{OWN},{FIRST}"}


async def test_standby_says_that_no_replica_leads():
    refusal = await refused(StandbyHandler(News()))
    assert "no other one does" in refusal.message
    assert refusal.metadata == {"replicas": f"{OWN},{FIRST}"}


async def test_caller_without_a_leader_hears_of_it_at_once():
    assert (await refused(StandbyHandler(News(FIRST)), muster_not_leader="")).metadata["leader"] == FIRST


@pytest.mark.parametrize("known", ["", FIRST])
async def test_caller_that_cannot_reach_the_leader_hears_of_the_next_one(
    known: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(standby, "HOLD_SECONDS", PATIENCE)
    news = News(known)
    handler = StandbyHandler(news)
    waiting = asyncio.create_task(refused(handler, muster_not_leader=FIRST))
    await news.waits(1)
    news.say(known)  # Something else has changed.
    await news.waits(2)
    assert not waiting.done()
    news.say(SECOND)
    assert (await waiting).metadata["leader"] == SECOND


async def test_call_is_held_for_a_limited_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(standby, "HOLD_SECONDS", 0.01)
    refusal = await refused(StandbyHandler(News(FIRST)), muster_not_leader=FIRST)
    assert refusal.metadata["leader"] == FIRST


async def test_closing_server_holds_no_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(standby, "HOLD_SECONDS", PATIENCE)
    news = News()
    handler = StandbyHandler(news)
    waiting = asyncio.create_task(refused(handler, muster_not_leader=""))
    await news.waits(1)
    handler.close()
    assert (await waiting).reason is Reason.NOT_LEADER


async def test_sdk_that_does_not_know_the_reason_connects_again():
    old = await refused(StandbyHandler(News(FIRST)), user_agent="grpc-python/1.66.2 grpc-c/43.0.0")
    assert old.reason is Reason.COORDINATOR_DRAINING
    ours = await refused(
        StandbyHandler(News(FIRST)),
        user_agent="grpc-python/1.66.2",
        muster_not_leader="",
    )
    assert ours.reason is Reason.NOT_LEADER
