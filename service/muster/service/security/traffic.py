"""Rate limits of one peer and of all peers, and a limit of open streams.

A peer is an IP address, so all clients behind one proxy or NAT are one peer.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, TypeVar

from muster.service.core.vocabulary.refusal import limit_exceeded
from muster.service.security.config import TrafficLimits
from muster.serving.counted import counted

T = TypeVar("T")
StreamKind: TypeAlias = Literal["session", "dialogue"]

BURST_SECONDS = 1.0
"""The burst, as seconds of the rate: the ranks of a node arrive at a barrier together."""
MAX_PEERS = 65_536
"""Peers with a bucket. Beyond that, the least recent one is dropped."""


class TokenBucket:
    """Admits a number of messages each second, and tells further ones how long to wait.

    It has no clock. A waiting message has taken its place, so the next one waits longer.

    Args:
        rate: messages each second.
        burst: messages at once after a pause.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at: float | None = None

    def take(self, now: float) -> float:
        """Take one place.

        Args:
            now: seconds of a monotonic clock.

        Returns:
            Seconds to wait.
        """
        if self._at is not None:
            self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        self._left -= 1
        return max(0.0, -self._left / self._rate)

    def give_back(self) -> None:
        """Give a place back, because the caller no longer waits for it."""
        self._left += 1


class Traffic:
    """Counts the open streams of each peer, and slows down messages and calls.

    Args:
        limits: the limits.
        clock: seconds of a monotonic clock.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        limits: TrafficLimits,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._streams: Counter[tuple[str, StreamKind]] = Counter()
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        rate = limits.max_messages_per_second
        self._everyone = _bucket(rate) if rate else None

    @property
    def paces(self) -> bool:
        """Whether messages have a limit."""
        return self._everyone is not None or self._limits.max_messages_per_second_per_peer > 0

    @contextmanager
    def stream(self, peer: str, kind: StreamKind = "session") -> Iterator[None]:
        """Count a stream of a peer within this block.

        Args:
            peer: the peer.
            kind: each kind has its own limit, so that a store's dialogue takes no place of a session.

        Raises:
            Refusal: LIMIT_EXCEEDED: the peer has too many streams.
        """
        most, key = self._limits.max_sessions_per_peer, (peer, kind)
        if most and self._streams[key] >= most:
            raise limit_exceeded(
                "max_sessions_per_peer", most, f"{self._streams[key]} streams of {peer} are open"
            )
        with counted(self._streams, key):
            yield

    async def pace_peer(self, peer: str) -> None:
        """Wait until the peer's rate admits a message."""
        rate = self._limits.max_messages_per_second_per_peer
        if rate:
            await self._wait(self._bucket_of(peer, rate))

    async def pace_all(self) -> None:
        """Wait until the rate of all peers admits a message.

        Call this last, so that refused callers, and peers beyond their own rate, take nothing from the
        others.
        """
        if self._everyone is not None:
            await self._wait(self._everyone)

    async def _wait(self, bucket: TokenBucket) -> None:
        seconds = bucket.take(self._clock())
        if seconds:
            try:
                await self._sleep(seconds)
            except asyncio.CancelledError:
                bucket.give_back()
                raise

    def _bucket_of(self, peer: str, rate: int) -> TokenBucket:
        bucket = self._buckets.get(peer)
        if bucket is None:
            bucket = self._buckets[peer] = _bucket(rate)
            if len(self._buckets) > MAX_PEERS:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(peer)
        return bucket

    def paced(self, peer: str, read: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        """Return a stream's ``read``, slowed down to the rates of its peer and of all peers.

        Meanwhile the stream is not read, so HTTP/2's flow control stops the sender.
        """
        if not self.paces:
            return read

        async def paced_read() -> T:
            message = await read()
            await self.pace_peer(peer)
            await self.pace_all()
            return message

        return paced_read


def _bucket(rate: int) -> TokenBucket:
    return TokenBucket(rate, rate * BURST_SECONDS)
