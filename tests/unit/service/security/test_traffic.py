"""Token buckets and the bounds of peers, on a clock that the test holds."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.security import traffic
from muster.service.security.config import TrafficLimits
from muster.service.security.traffic import TokenBucket, Traffic


def test_burst_passes_and_then_the_rate_counts():
    bucket = TokenBucket(rate=10, burst=3)
    assert [bucket.take(100.0) for _ in range(3)] == [0, 0, 0]
    assert [bucket.take(100.0) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    # 0.5 s make up for five places, of which three are taken already.
    assert bucket.take(100.5) == 0
    assert bucket.take(100.5) == 0
    assert bucket.take(100.5) == pytest.approx(0.1)


def test_long_pause_saves_no_more_than_a_burst():
    bucket = TokenBucket(rate=10, burst=3)
    bucket.take(0.0)
    assert [bucket.take(1e6) for _ in range(4)] == pytest.approx([0, 0, 0, 0.1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=200), st.integers(1, 50), st.integers(1, 50))
def test_never_more_pass_than_burst_and_rate_allow(pauses: list[float], rate: int, burst: int):
    bucket, now, passed = TokenBucket(rate, burst), 0.0, []
    for pause in pauses:
        now += pause
        passed.append(now + bucket.take(now))
    assert passed == sorted(passed)
    for first in range(0, len(passed), 7):
        for last in range(first, len(passed), 5):
            count = last - first + 1
            assert count <= burst + rate * (passed[last] - passed[first]) + 1 + 1e-6


class World:
    """A clock that only sleeping moves."""

    def __init__(self, **limits: int) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.traffic = Traffic(TrafficLimits(**limits), lambda: self.now, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))

    async def pace(self, peer: str) -> None:
        await self.traffic.pace_peer(peer)
        await self.traffic.pace_all()


async def test_without_bounds_nothing_is_counted_or_wrapped():
    world = World()

    async def read() -> bytes:
        return b""

    assert world.traffic.paced("a", read) is read
    await world.pace("a")
    assert world.slept == []
    assert not world.traffic._buckets


async def test_each_peer_has_a_rate_of_its_own():
    world = World(max_messages_per_second_per_peer=2)
    for _ in range(4):
        await world.pace("a")
    assert world.slept == [0.5, 1.0]
    await world.pace("b")
    assert world.slept == [0.5, 1.0]


async def test_all_peers_share_one_rate():
    world = World(max_messages_per_second=2)
    for peer in "abc":
        await world.pace(peer)
    assert world.slept == [0.5]


async def test_message_is_handed_on_when_there_is_room():
    world = World(max_messages_per_second_per_peer=1)

    async def read() -> bytes:
        return b"message"

    paced = world.traffic.paced("a", read)
    assert [await paced() for _ in range(3)] == [b"message"] * 3
    assert world.slept == [1.0, 2.0]


async def test_cancelled_wait_gives_its_place_back():
    async def cancelled(_: float) -> None:
        raise asyncio.CancelledError

    limits = TrafficLimits(max_messages_per_second=1)
    paced = Traffic(limits, lambda: 0.0, cancelled)
    await paced.pace_all()
    for _ in range(1000):
        with pytest.raises(asyncio.CancelledError):
            await paced.pace_all()
    assert paced._everyone is not None
    assert paced._everyone.take(0.0) == 1.0


async def test_so_many_peers_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(traffic, "MAX_PEERS", 2)
    world = World(max_messages_per_second_per_peer=1)
    for peer in "abac":
        await world.pace(peer)
    assert list(world.traffic._buckets) == ["a", "c"]


def test_peer_has_so_many_streams():
    opened = World(max_sessions_per_peer=1).traffic
    with opened.stream("a"), opened.stream("b"):
        with pytest.raises(Refusal) as caught, opened.stream("a"):
            pass
        assert caught.value.reason is Reason.LIMIT_EXCEEDED
        assert caught.value.metadata == {"limit": "max_sessions_per_peer", "value": "1"}
        assert "1 streams of a are open" in caught.value.message
    with opened.stream("a"):
        pass
    assert not opened._streams
