"""The settings of a keeper."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.client.addresses import host_of, is_socket
from muster.client.credentials import Credentials

NODE_ADDRESS = "MUSTER_NODE_ADDRESS"
FAILURE_DOMAIN = "MUSTER_FAILURE_DOMAIN"
LOCAL_QUOTA = "MUSTER_LOCAL_QUOTA"
UPLOAD_RATE = "MUSTER_UPLOAD_RATE"
STORAGE_OPTIONS = "MUSTER_STORAGE_OPTIONS"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSettings:
    """The settings of ``muster keep``."""

    folder: Path
    """The user's local folder, in which each run has its own."""
    run_id: str
    endpoint: str
    listen: tuple[str, int] = ("0.0.0.0", 0)
    """The host and port for other keepers; port 0: any."""
    advertise: str = ""
    """The host that other keepers connect to; empty: the one by which the coordinator is reached."""
    failure_domain: str = ""
    node_name: str = ""
    quota: int = 0
    """Bytes; 0: most of the free space."""
    upload_rate: int = 0
    """Bytes a second; 0: without limit."""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What opens an address in shared storage, such as credentials."""
    follow: int = 0
    """The id of the process with which the keeper ends; 0: it ends by a signal."""
    credentials: Credentials = field(default_factory=Credentials)


def storage_options(text: str) -> Mapping[str, Any]:
    """Read the options of shared storage from JSON; empty: none.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        said = json.loads(text or "{}")
    except ValueError:
        said = None  # The text may be a secret, and is not repeated.
    if not isinstance(said, dict):
        raise ValueError(f'{STORAGE_OPTIONS} is no JSON object, such as {{"endpoint_url": "https://…"}}.')
    return said


def own_host(endpoint: str) -> str:
    """Return the address of this machine on the way to the coordinator. Nothing is sent."""
    for address in endpoint.split(","):
        if is_socket(address):
            continue
        host, port = host_of(address), int(address.rpartition(":")[2])
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, place in found:
            try:
                with socket.socket(family, kind, protocol) as way:
                    way.connect(place)
                    return str(way.getsockname()[0])
            except OSError:
                continue
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def url_of(scheme: str, host: str, port: int) -> str:
    """Return the URL of a host, which may be an IPv6 address."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def host_and_port(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``.

    Raises:
        ValueError: it does not have this form.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f'"{text}" is not HOST:PORT with a port from 0 to 65535, such as 0.0.0.0:0')
    return host, int(port)
