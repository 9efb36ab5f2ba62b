"""The TCP connections of this process's servers, which gRPC does not show."""

import asyncio
import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path


def address_of(peer: str) -> str:
    """Return the IP address in gRPC's name of a peer: ``ipv4:10.0.0.7:41822``, ``ipv6:%5B::1%5D:41822``."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")


async def end_connection(peer: str) -> bool:
    """End the connection of a peer, and with it all its calls. gRPC then frees what it holds for them.

    Args:
        peer: gRPC's name of it. A Unix socket's peers have no names of their own, so theirs stay open.

    Returns:
        Whether there was one.
    """
    # It looks at each open file, which takes milliseconds for thousands of files.
    return await asyncio.to_thread(_shut, peer)


def _shut(peer: str) -> bool:
    address = address_of(peer)
    if address == peer:
        return False
    wanted = (plain(address), int(peer.rpartition(":")[2]))
    found = False
    for file in Path("/proc/self/fd").iterdir():
        # A copy keeps the connection, even if gRPC closes its own file and the number is reused.
        with suppress(OSError), copy_of(int(file.name)) as connection:
            name = connection.getpeername()
            if isinstance(name, tuple) and (plain(name[0]), name[1]) == wanted:
                connection.shutdown(socket.SHUT_RDWR)
                found = True
    return found


def copy_of(file: int) -> socket.socket:
    """Return a copy of an open file that is a socket.

    Raises:
        OSError: it is closed, or no socket.
    """
    copy = os.dup(file)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def plain(host: str) -> str:
    """Return an IP address in one form, whether a socket for both versions has it or one for IPv4."""
    address = ip_address(host)
    return str(getattr(address, "ipv4_mapped", None) or address)
