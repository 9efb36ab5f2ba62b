"""The addresses of an endpoint: ``HOST:PORT`` of coordinators, and sockets of relays on this machine."""

from collections.abc import Collection, Mapping
from urllib.parse import quote

from muster.client.errors import EnvironmentValueError

SOCKET = "unix://"
"""The start of a socket's address; its absolute path follows."""
MAX_PATH_BYTES = 107
"""Bytes that the path of a socket may have on Linux."""


def checked(endpoint: str) -> str:
    """Return the addresses of an endpoint, each once, with commas between.

    Args:
        endpoint: ``HOST:PORT`` or ``unix:///PATH``, or several with commas between.

    Raises:
        EnvironmentValueError: a part of it is neither; the message names it, and says what to do.
    """
    addresses = list(dict.fromkeys(map(str.strip, endpoint.split(","))))
    for address in addresses:
        if fault := _fault(address):
            where = f'endpoint "{address}"' if address == endpoint else f'endpoint "{endpoint}": "{address}"'
            raise EnvironmentValueError(f"{where} {fault}")
    return ",".join(addresses)


def relays_of(endpoint: str) -> list[str]:
    """Return the addresses of an endpoint that are sockets."""
    return [address for address in endpoint.split(",") if is_socket(address)]


def is_address(text: str) -> bool:
    """Return whether a text is ``HOST:PORT``, or ``unix:///PATH`` with a path that a socket may have."""
    return not _fault(text)


def is_socket(address: str) -> bool:
    """Return whether an address is a socket of this machine."""
    return address.startswith(SOCKET)


def host_of(address: str) -> str:
    """Return the host of ``HOST:PORT``, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def tls_name(address: str, configured: Mapping[str, Collection[str]]) -> str:
    """Return the name that the certificate of an address must have; empty: the address's host.

    Args:
        address: the address to call.
        configured: for each configured address, the addresses that its name resolves to.
    """
    if address in configured:
        return ""
    for name, resolved in configured.items():
        if address in resolved:
            return host_of(name)
    # A replica named this address. It gets the token, so it must be one of those that were configured.
    return next((host_of(name) for name in configured if not is_socket(name)), "")


def target_of(address: str) -> str:
    """Return gRPC's form of an address: a socket's is a URI."""
    return SOCKET + quote(address.removeprefix(SOCKET)) if is_socket(address) else address


def _fault(address: str) -> str:
    """Return why a text is no address, and what to do; empty for an address."""
    # gRPC also accepts ``unix:PATH``. But ``unix:7550`` is a port of a host called unix.
    if address.startswith("unix:/"):
        return _fault_of_path(address.removeprefix(SOCKET))
    host, _, port = address.rpartition(":")
    if host.strip("[]") and port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65_536:
        return ""
    return (
        "is not host:port, such as muster.example:7550, nor the socket of a relay, such as "
        "unix:///run/muster/relay.sock. Several have commas between."
    )


def _fault_of_path(path: str) -> str:
    instead = "name one such as unix:///run/muster/relay.sock."
    if not path.startswith("/") or path.endswith("/") or not path.isprintable():
        return f"is not {SOCKET} and the absolute path of a socket: {instead}"
    length = len(path.encode())
    if length > MAX_PATH_BYTES:
        return f"has a path of {length} bytes; a socket's may have {MAX_PATH_BYTES}: {instead}"
    return ""
