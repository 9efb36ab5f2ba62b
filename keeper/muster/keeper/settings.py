"""The settings of a keeper."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.client.addresses import host_of, is_socket
from muster.client.credentials import ENVIRONMENT, Credentials

NODE_ADDRESS = "MUSTER_NODE_ADDRESS"
LOCAL_QUOTA = "MUSTER_LOCAL_QUOTA"
UPLOAD_RATE = "MUSTER_UPLOAD_RATE"
UNUSED = 3
"""The exit status of a keeper that no rank has used for as long as ``idle``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSettings:
    """The settings of ``muster keep``."""

    folder: Path
    """The user's local folder, in which each run has its own."""
    run_id: str
    endpoint: str
    listen: tuple[str, int] = ("0.0.0.0", 0)
    """The host and port for other keepers; port 0: any."""
    listen_ranks: tuple[str, int] = ("127.0.0.1", 0)
    """The host and port for the ranks of this node."""
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
    idle: float = 0
    """Seconds without a rank after which the keeper ends; 0: it does not end for that."""
    credentials: Credentials = field(default_factory=Credentials)


def arguments_of(settings: KeeperSettings) -> list[str]:
    """Return the arguments of ``python -m muster.keeper`` for settings.

    Credentials and the options of shared storage are not among them: every user that lists processes could
    see them.
    """
    return [
        f"--folder={settings.folder}",
        f"--run-id={settings.run_id}",
        f"--endpoint={settings.endpoint}",
        f"--listen={address_of(*settings.listen)}",
        f"--listen-ranks={address_of(*settings.listen_ranks)}",
        f"--advertise={settings.advertise}",
        f"--failure-domain={settings.failure_domain}",
        f"--quota={settings.quota}",
        f"--upload-rate={settings.upload_rate}",
        f"--follow={settings.follow}",
        f"--idle={settings.idle:g}",
    ]


def environment_of(credentials: Credentials) -> dict[str, str]:
    """Return the variables for credentials that are not from the environment already."""
    values = {
        ENVIRONMENT.token_file: credentials.token_file,
        ENVIRONMENT.token_command: credentials.token_command,
        ENVIRONMENT.ca: credentials.ca,
        ENVIRONMENT.cert: credentials.cert,
        ENVIRONMENT.key: credentials.key,
        ENVIRONMENT.server_name: credentials.server_name,
    }
    return {name: str(value) for name, value in values.items() if value}


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
    return f"{scheme}://{address_of(host, port)}"


def address_of(host: str, port: int) -> str:
    """Return ``HOST:PORT``, as :func:`host_and_port` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
