"""Reads pieces of a file from other keepers, without fetching the whole file.

A replicated tensor is written by one rank and read by all, so each rank needs small pieces of others' parts.
"""

import http.client
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

READ_TIMEOUT = 30.0
"""Longest time in seconds until a keeper sends the next bytes."""


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """Where a file is."""

    urls: tuple[str, ...]
    """The file's URL on each keeper that has it."""
    token: str
    """The bearer token for these keepers."""


class RemoteFile:
    """A file on other nodes, open for reading. Threads may share it.

    Args:
        place: where it is.
        verify: whether its keeper is to verify it again first, since wrong bytes were read from it.
    """

    def __init__(self, place: RemotePlace, *, verify: bool = False) -> None:
        self.place = place
        self._verify = verify
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._host = ""

    def read(self, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from an offset on; fewer only at the file's end.

        Raises:
            FileNotFoundError: no keeper can send it; the message has the error of each.
        """
        buffer = bytearray(length)
        return bytes(buffer[: self.read_into(offset, memoryview(buffer))])

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from an offset on.

        Returns:
            How many bytes it got: fewer than its length only at the file's end.

        Raises:
            FileNotFoundError: no keeper can send it; the message has the error of each.
        """
        if not buffer.nbytes:
            return 0
        failures: list[str] = []
        with self._lock:
            for url in self.place.urls:
                try:
                    return self._get(url, offset, buffer)
                except (OSError, http.client.HTTPException) as error:
                    failures.append(f"{url}: {error}")
                    self._disconnect()
        raise FileNotFoundError("no keeper can send it: " + "; ".join(failures))

    def close(self) -> None:
        """Close the connection, after the read that another thread may be at. A later read opens its own."""
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _get(self, url: str, offset: int, buffer: memoryview) -> int:
        parts = urlsplit(url)
        if self._connection is None or self._host != parts.netloc:
            self._disconnect()
            self._connection = http.client.HTTPConnection(parts.netloc, timeout=READ_TIMEOUT)
            self._host = parts.netloc
        headers = {
            "Authorization": f"Bearer {self.place.token}",
            "Range": f"bytes={offset}-{offset + buffer.nbytes - 1}",
        }
        self._connection.request("GET", parts.path + ("?verify=1" if self._verify else ""), headers=headers)
        with self._connection.getresponse() as response:
            if response.status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                response.read()
                return 0
            if response.status != http.client.PARTIAL_CONTENT:
                raise http.client.HTTPException(f"HTTP status {response.status} {response.reason}")
            self._verify = False
            return _fill(response, buffer)


def _fill(response: http.client.HTTPResponse, buffer: memoryview) -> int:
    got = 0
    while got < buffer.nbytes and (count := response.readinto(buffer[got:])):
        got += count
    if got < buffer.nbytes and response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return got


def can_read(urls: Sequence[str]) -> bool:
    """Return whether a rank can read from these keepers itself. It has no certificate for HTTPS."""
    return bool(urls) and all(url.startswith("http://") for url in urls)
