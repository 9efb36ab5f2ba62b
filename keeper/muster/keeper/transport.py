"""The data plane: reads files of other keepers over HTTP, in several threads.

A thread has a connection to itself while it reads an answer, and reads into a buffer that it uses again.
Without TLS, the other keeper sends with ``sendfile``, so no byte passes through its interpreter.
"""

import http.client
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Protocol, TypeAlias
from urllib.parse import SplitResult, urlsplit

CONNECT_TIMEOUT = 5.0
"""Seconds for one attempt to connect."""
READ_TIMEOUT = 20.0
"""Seconds without a byte after which a connection counts as dead."""
MAX_IDLE = 8
"""Idle connections that are kept for each keeper."""
READ_AHEAD = 65_536
"""Largest number of bytes of the body that is taken from the buffer of the headers."""
RECEIVE_BUFFER = 4 * 2**20
"""Size in bytes of the kernel's receive buffer of a connection."""
MAX_ERROR = 2_000
"""Largest number of bytes that are read of an error's text."""

_Answered: TypeAlias = tuple[http.client.HTTPConnection, socket.socket, http.client.HTTPResponse]


class TransportError(OSError):
    """A keeper did not answer, or broke off. The message names its URL, and says why."""


class AbsentError(TransportError):
    """A keeper says that it does not have what was asked for."""


class Stream(Protocol):
    """The bytes that a keeper sends. One thread uses it."""

    def read_into(self, buffer: memoryview) -> int:
        """Receive the next bytes.

        Returns:
            How many bytes the buffer got; 0: the stream has ended.

        Raises:
            TransportError: the connection broke.
        """

    def close(self) -> None:
        """Release the connection."""


class Transport(Protocol):
    """Fetches bytes from other keepers. Several threads use it."""

    def open(self, url: str, path: str, offset: int = 0, length: int | None = None) -> Stream:
        """Ask a keeper for bytes.

        Args:
            url: the keeper's.
            path: such as ``/files/3-7/__0_0.distcp``; quoted, perhaps with a query.
            offset: of the first byte.
            length: how many bytes; None: all that follow.

        Raises:
            AbsentError: the keeper does not have the file, or not that much of it.
            TransportError: it did not answer, or refused.
        """

    def keep_only(self, urls: Collection[str]) -> None:
        """Release the connections to all other keepers, and keep none to them from now on."""


class HttpTransport:
    """Reads over HTTP, or over HTTPS if a peer's URL says so.

    Args:
        token: returns the token that keepers of the run show each other.
        tls: returns this keeper's certificate and the authority of the others; None: without TLS.
    """

    def __init__(self, token: Callable[[], str], tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        self._token = token
        self._tls = tls
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}
        self._kept: Collection[str] | None = None
        """The URLs whose connections are kept for the next request; None: all."""
        self._lock = threading.Lock()

    def open(self, url: str, path: str, offset: int = 0, length: int | None = None) -> "HttpStream":
        """Ask a keeper for bytes."""
        headers = {"Authorization": f"Bearer {self._token()}"}
        if offset or length is not None:
            last = "" if length is None else str(offset + length - 1)
            headers["Range"] = f"bytes={offset}-{last}"
        connection, sock, response = self._request(url, path, headers)
        has_begin = response.status == 206 or (response.status == 200 and not offset)
        if has_begin and response.length is not None:
            return HttpStream(self, url, connection, sock, response)
        said = _text(response)
        connection.close()
        if response.status in (404, 416):
            raise AbsentError(f"{url} does not have {path} from byte {offset} on: {said}")
        raise TransportError(f"{url} refused {path} ({response.status}): {said}")

    def _request(self, url: str, path: str, headers: dict[str, str]) -> _Answered:
        """Send a request. If an idle connection turns out to be closed, send it over a new one.

        Raises:
            TransportError: the keeper does not answer. After a timeout there is no second try, so that a
                silent keeper takes up a thread for ``READ_TIMEOUT`` at most.
        """
        connection = self._take(url)
        try:
            if connection is not None:
                try:
                    return _exchange(connection, path, headers)
                except TimeoutError:
                    raise
                except (OSError, http.client.HTTPException):
                    # A keeper that has closed this one has probably ended, and all idle ones with it.
                    connection.close()
                    self._close_idle([url])
            connection = self._connect(url)
            return _exchange(connection, path, headers)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if connection is not None:
                connection.close()
            self._close_idle([url])
            raise TransportError(f"{url} does not answer: {error!r}") from error

    def _connect(self, url: str) -> http.client.HTTPConnection:
        split = urlsplit(url)
        connection = self._connection(split)
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        return connection

    def _connection(self, split: SplitResult) -> http.client.HTTPConnection:
        if split.scheme == "http":
            return http.client.HTTPConnection(split.hostname or "", split.port, timeout=CONNECT_TIMEOUT)
        if split.scheme != "https":
            raise ValueError(f"{split.geturl()} is no URL of a keeper")
        if self._tls is None:
            raise ValueError("it speaks TLS, and this keeper has no certificate")
        return http.client.HTTPSConnection(
            split.hostname or "", split.port, timeout=CONNECT_TIMEOUT, context=self._tls()
        )

    def _take(self, url: str) -> http.client.HTTPConnection | None:
        with self._lock:
            idle = self._idle.get(url)
            return idle.pop() if idle else None

    def give_back(self, url: str, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for the next request."""
        with self._lock:
            idle = self._idle.setdefault(url, []) if self._kept is None or url in self._kept else None
            if idle is not None and len(idle) < MAX_IDLE:
                idle.append(connection)
                return
        connection.close()

    def keep_only(self, urls: Collection[str]) -> None:
        """Release the connections to all other keepers, and keep none to them from now on."""
        with self._lock:
            self._kept = frozenset(urls)
            gone = self._idle.keys() - self._kept
        self._close_idle(gone)

    def close(self) -> None:
        """Close all idle connections."""
        self.keep_only(())

    def _close_idle(self, urls: Iterable[str]) -> None:
        with self._lock:
            gone = [one for url in urls for one in self._idle.pop(url, ())]
        for connection in gone:
            connection.close()


class HttpStream:
    """The body of an answer."""

    def __init__(
        self,
        transport: HttpTransport,
        url: str,
        connection: http.client.HTTPConnection,
        sock: socket.socket,
        response: http.client.HTTPResponse,
    ) -> None:
        self._transport = transport
        self._url = url
        self._connection = connection
        self._sock = sock
        self._response = response
        self._left = response.length or 0
        """Bytes that are still to come."""
        self._drained = False
        """Whether all that the response has read ahead was taken."""
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        if not self._is_tls:
            _wait_in_the_kernel(sock)

    def read_into(self, buffer: memoryview) -> int:
        """Receive the next bytes."""
        buffer = buffer[: self._left]
        if not buffer:
            return 0
        try:
            count = self._receive(buffer)
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(f"{self._url} broke off: {error!r}") from error
        if not count:
            raise TransportError(f"{self._url} broke off with {self._left:,} bytes still to come")
        self._left -= count
        return count

    def _receive(self, buffer: memoryview) -> int:
        if not self._drained:
            # The response has read ahead, with the headers.
            self._drained = True
            first = self._response.fp.read1(min(len(buffer), READ_AHEAD))
            buffer[: len(first)] = first
            self._drained = len(first) < len(buffer)
            return len(first)
        return self._sock.recv_into(buffer, len(buffer), 0 if self._is_tls else socket.MSG_WAITALL)

    def close(self) -> None:
        """Release the connection. It is used again if the whole answer was read."""
        self._response.close()
        if self._left == 0 and not self._response.will_close:
            self._transport.give_back(self._url, self._connection)
        else:
            self._connection.close()


def read_all(stream: Stream, limit: int) -> bytes:
    """Read a small file.

    Raises:
        TransportError: it has more bytes than the limit, or the connection broke.
    """
    data = bytearray()
    buffer = memoryview(bytearray(65_536))
    try:
        while count := stream.read_into(buffer):
            data += buffer[:count]
            if len(data) > limit:
                raise TransportError(f"it has more than {limit} bytes")
    finally:
        stream.close()
    return bytes(data)


def _exchange(connection: http.client.HTTPConnection, path: str, headers: dict[str, str]) -> _Answered:
    """Send a request, and receive the head of its answer.

    Raises:
        OSError: the connection broke.
        TimeoutError: no byte came within ``READ_TIMEOUT``.
        HTTPException: the answer is not HTTP.
    """
    sock = connection.sock  # The response forgets the socket if the keeper is going to close it.
    sock.settimeout(READ_TIMEOUT)
    connection.request("GET", path, headers=headers)
    return connection, sock, connection.getresponse()


def _wait_in_the_kernel(sock: socket.socket) -> None:
    """Set the timeout in the kernel, so that one call can fill a whole buffer.

    With a timeout of Python's, the socket does not block, and a call returns after each packet. A socket with
    TLS keeps that one: it ignores the kernel's.
    """
    sock.settimeout(None)
    whole, part = divmod(READ_TIMEOUT, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(whole), int(part * 1e6)))


def _text(response: http.client.HTTPResponse) -> str:
    with suppress(OSError, http.client.HTTPException):
        return response.read(MAX_ERROR).decode("utf-8", "replace")
    return ""
