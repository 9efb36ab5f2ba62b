"""Limits the connections of one IP address, which gRPC does not: it accepts them by itself."""

import asyncio
import math
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from muster.serving.connections import copy_of, plain

OPEN_FILES = "/proc/self/fd"
INTERVAL = 0.25
"""Seconds between two looks at the connections."""
SHARE = 50
"""The pause between two looks is at least so many times as long as a look takes of a CPU."""
TELL_INTERVAL = 10.0
"""Seconds between two reports of the connections that have been ended."""


class ConnectionLimit:
    """Ends the newest connections of an address that has too many. The older ones stay.

    Args:
        port: the server's own port. Unix sockets have no addresses, and so no limit.
        most: connections of one address.
        ended: is told of an address and of how many of its connections have been ended since it was told.
    """

    def __init__(self, port: int, most: int, ended: Callable[[str, int], None]) -> None:
        self._port = port
        self._most = most
        self._ended = ended
        self._addresses: dict[int, str | None] = {}
        """By the inode of a socket, the oldest first: the address of its peer; None: not of this server."""

    async def keep(self) -> None:
        """Look at the connections again and again."""
        unreported: Counter[str] = Counter()
        reported_at = -math.inf
        while True:
            now = time.monotonic()
            ended, seconds = await asyncio.to_thread(self._timed_look)
            unreported.update(ended)
            if unreported and now - reported_at >= TELL_INTERVAL:
                for address, count in unreported.items():
                    self._ended(address, count)
                unreported.clear()
                reported_at = now
            await asyncio.sleep(max(INTERVAL, SHARE * seconds))

    def _timed_look(self) -> tuple[Counter[str], float]:
        began = time.thread_time()
        return self.look(), time.thread_time() - began

    def look(self) -> Counter[str]:
        """End the connections beyond the limit.

        Returns:
            How many were ended, by address.
        """
        files = os.listdir(OPEN_FILES)  # noqa: PTH208  # a path for each file takes ten times as long
        if len(files) <= self._most:
            return Counter()
        found: dict[int, int] = {}
        for name in files:
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(name)
        for inode in self._addresses.keys() - found.keys():
            del self._addresses[inode]
        for inode, file in sorted(found.items()):
            if inode not in self._addresses:
                with suppress(OSError):
                    self._addresses[inode] = self._address_of(file)
        return self._end_newest(found)

    def _end_newest(self, files: dict[int, int]) -> Counter[str]:
        counts: Counter[str] = Counter()
        ended: Counter[str] = Counter()
        for inode, address in self._addresses.items():
            if address is None:
                continue
            counts[address] += 1
            if counts[address] > self._most:
                # The copy keeps the connection. Its file may have been closed and its number reused before.
                with suppress(OSError), copy_of(files[inode]) as connection:
                    if os.fstat(connection.fileno()).st_ino == inode:
                        connection.shutdown(socket.SHUT_RDWR)
                        ended[address] += 1
        return ended

    def _address_of(self, file: int) -> str | None:
        with copy_of(file) as connection:
            own = connection.getsockname()
            if not isinstance(own, tuple) or own[1] != self._port:
                return None
            try:
                return plain(connection.getpeername()[0])
            except OSError:
                return None  # It listens, or its peer has gone.
