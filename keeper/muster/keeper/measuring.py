"""Measures how fast bytes come from other keepers, by the fetches that there are anyway."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from muster.client.protocol import MAX_TRANSFERS
from muster.keeper.transport import Stream, Transport
from muster.keeper.vocabulary import Transfer

KEPT = 8
"""Bursts of each keeper that count: about as many as files."""
MIN_BYTES = 8 * 2**20
"""A burst with fewer bytes says more about the latency than about the speed."""
MIN_SECONDS = 10.0
"""A burst counts whatever its size if it took so long."""
MAX_PEERS = MAX_TRANSFERS
"""Keepers that are remembered, beside those from which something comes at the moment."""


@dataclass(slots=True)
class _Peer:
    """Another keeper. A burst is a time during which at least one stream from it is open."""

    open: int = 0
    """Streams."""
    began: float = 0.0
    bytes: int = 0
    """What has come in the burst that goes on."""
    bursts: deque[Transfer] = field(default_factory=lambda: deque(maxlen=KEPT))


class MeasuredTransport:
    """A transport that remembers how fast each keeper sent. Several threads use it.

    The time includes what the receiver does meanwhile, such as digests and writes: that is how long a copy
    takes.

    Args:
        transport: does the work.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        """By URL, the one that was used last at the end."""
        self._lock = threading.Lock()

    def open(self, url: str, path: str, offset: int = 0, length: int | None = None) -> Stream:
        """Ask a keeper for bytes."""
        self._opened(url)
        try:
            stream = self._transport.open(url, path, offset, length)
        except BaseException:
            self.closed(url)
            raise
        return _MeasuredStream(self, url, stream)

    def keep_only(self, urls: Collection[str]) -> None:
        """Release the connections to all other keepers, and keep none to them from now on."""
        self._transport.keep_only(urls)

    def transfers(self) -> Mapping[str, Transfer]:
        """Return what came lately, by the keepers' URLs: no more than one report may name.

        If there is more, keepers with an open stream come first, and then those that were used last.
        """
        with self._lock:
            now = self._clock()
            by_use = sorted(self._peers.items(), key=lambda one: one[1].open > 0)
            sums = {url: _sum([*peer.bursts, *_going_on(peer, now)]) for url, peer in by_use}
        return dict([(url, one) for url, one in sums.items() if one.bytes][-MAX_TRANSFERS:])

    def _opened(self, url: str) -> None:
        with self._lock:
            known = self._peers.pop(url) if url in self._peers else _Peer()
            peer = self._peers[url] = known
            if not peer.open:
                peer.began, peer.bytes = self._clock(), 0
            peer.open += 1
            for other in [one for one, each in self._peers.items() if not each.open][:-MAX_PEERS]:
                del self._peers[other]

    def received(self, url: str, count: int) -> None:
        """Note that bytes have come."""
        with self._lock:
            self._peers[url].bytes += count

    def closed(self, url: str) -> None:
        """Note that a stream has ended."""
        with self._lock:
            peer = self._peers[url]
            ended = _going_on(peer, self._clock()) if peer.open == 1 else []
            peer.bursts.extend(ended)
            peer.open -= 1


class _MeasuredStream:
    def __init__(self, transport: MeasuredTransport, url: str, stream: Stream) -> None:
        self._transport = transport
        self._url = url
        self._stream = stream
        self._is_open = True

    def read_into(self, buffer: memoryview) -> int:
        """Receive the next bytes."""
        count = self._stream.read_into(buffer)
        self._transport.received(self._url, count)
        return count

    def close(self) -> None:
        """Let go of the stream."""
        self._stream.close()
        if self._is_open:
            self._is_open = False
            self._transport.closed(self._url)


def _going_on(peer: _Peer, now: float) -> list[Transfer]:
    """Return the burst that goes on, if it says something about the speed."""
    burst = Transfer(peer.bytes, now - peer.began)
    return [burst] if peer.open and (burst.bytes >= MIN_BYTES or burst.seconds >= MIN_SECONDS) else []


def _sum(bursts: list[Transfer]) -> Transfer:
    return Transfer(sum(one.bytes for one in bursts), round(sum(one.seconds for one in bursts), 3))
