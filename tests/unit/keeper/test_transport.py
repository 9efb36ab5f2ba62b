"""Requests to keepers that answer, fall silent, end, or are no longer peers."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from lab.authority import Authority
from lab.patience import PATIENCE, until
from muster.client.credentials import Credentials
from muster.keeper import transport as module
from muster.keeper.tls import Tls
from muster.keeper.transport import HttpTransport, TransportError, read_all

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel"


class Peer:
    """A keeper on a socket.

    Args:
        answer: returns the bytes of the answer to the n-th request; None: it stays silent.
        tls: its context; None: without TLS.
    """

    def __init__(self, answer: Callable[[int], bytes | None], tls: ssl.SSLContext | None = None) -> None:
        self._answer = answer
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self.requests = 0
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def opened(self) -> int:
        """The connections that were opened to it."""
        return len(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
                self._connections.append(connection)
            while self._received(connection):
                with self._lock:
                    self.requests += 1
                    number = self.requests
                if (answer := self._answer(number)) is not None:
                    connection.sendall(answer)
        except OSError:
            pass

    def _received(self, connection: socket.socket) -> bool:
        data = b""
        while not data.endswith(b"\r\n\r\n"):
            more = connection.recv(65_536)
            if not more:
                return False
            data += more
        return True

    def close_connections(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # Its client has closed it, or it belongs to the TLS socket now.
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def stop(self) -> None:
        self._listener.close()
        self.close_connections()


@pytest.fixture
def peer_of() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(answer: Callable[[int], bytes | None], tls: ssl.SSLContext | None = None) -> Peer:
        made.append(Peer(answer, tls))
        return made[-1]

    yield make
    for peer in made:
        peer.stop()


@pytest.fixture
def transport() -> Iterator[HttpTransport]:
    made = HttpTransport(lambda: "token")
    yield made
    made.close()


def in_time(work: Callable[[], bytes], peer: Peer) -> bytes:
    """Run a call that a defect would keep waiting for ever; then stop the peer, which ends it."""
    with ThreadPoolExecutor(1) as threads:
        try:
            return threads.submit(work).result(PATIENCE)
        finally:
            peer.stop()


def _read(transport: HttpTransport, url: str) -> bytes:
    return read_all(transport.open(url, "/f"), 10)


def fill_idle(transport: HttpTransport, peer: Peer, count: int) -> None:
    """Leave idle connections to a peer."""
    streams = [transport.open(peer.url, "/f") for _ in range(count)]
    for stream in streams:
        assert read_all(stream, 10) == b"hello"


def test_read_from_a_silent_peer_ends_with_tls_and_without(
    peer_of: Callable[..., Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "READ_TIMEOUT", 0.1)
    authority = Authority(tmp_path)
    pair = authority.issue("node")
    tls = Tls(Credentials(ca=authority.ca, cert=pair.cert, key=pair.key))
    transport = HttpTransport(lambda: "token", tls.for_calling)
    for context in (None, tls.for_serving()):
        peer = peer_of(lambda _: HALF, context)
        with pytest.raises(TransportError, match="broke off"):
            in_time(partial(_read, transport, peer.url), peer)
    transport.close()


def test_request_to_a_silent_peer_waits_for_one_timeout(
    peer_of: Callable[..., Peer], transport: HttpTransport, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "READ_TIMEOUT", 0.1)
    peer = peer_of(lambda number: OK if number <= module.MAX_IDLE else None)
    fill_idle(transport, peer, module.MAX_IDLE)
    with pytest.raises(TransportError, match="does not answer"):
        transport.open(peer.url, "/f")
    assert peer.requests == module.MAX_IDLE + 1
    assert peer.opened == module.MAX_IDLE


def test_request_is_sent_over_one_new_connection_if_the_peer_has_restarted(
    peer_of: Callable[..., Peer], transport: HttpTransport
):
    peer = peer_of(lambda _: OK)
    fill_idle(transport, peer, module.MAX_IDLE)
    peer.close_connections()
    assert read_all(transport.open(peer.url, "/f"), 10) == b"hello"
    assert peer.opened == module.MAX_IDLE + 1
    assert [len(idle) for idle in transport._idle.values()] == [1]


def test_connections_to_former_peers_are_closed_and_not_kept_again(
    peer_of: Callable[..., Peer], transport: HttpTransport
):
    stays, leaves = peer_of(lambda _: OK), peer_of(lambda _: OK)
    for peer in (stays, leaves):
        fill_idle(transport, peer, 3)
    open_now = transport.open(leaves.url, "/f")
    transport.keep_only({stays.url})
    assert {url: len(idle) for url, idle in transport._idle.items()} == {stays.url: 3}
    assert read_all(open_now, 10) == b"hello"
    assert leaves.url not in transport._idle


def test_body_that_ends_early_is_an_error(peer_of: Callable[..., Peer], transport: HttpTransport):
    peer = peer_of(lambda _: HALF)
    stream = transport.open(peer.url, "/f")
    until(lambda: peer.requests, "no request comes")
    peer.close_connections()
    with pytest.raises(TransportError, match="broke off"):
        read_all(stream, 10)


def test_answer_of_a_keeper_that_is_about_to_close_is_read(
    peer_of: Callable[..., Peer], transport: HttpTransport
):
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 200000\r\n\r\n" + bytes(200_000)
    peer = peer_of(lambda _: closing)
    assert read_all(transport.open(peer.url, "/f"), 300_000) == bytes(200_000)
    assert not transport._idle
