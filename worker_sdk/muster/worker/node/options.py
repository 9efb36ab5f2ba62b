"""What torchrun's options say about this node and its rendezvous."""

import socket

from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from muster.client.addresses import is_socket
from muster.worker import environment
from muster.worker.node.membership import NodeConfig

DEFAULT_PORT = 7550


def node_config(params: RendezvousParameters) -> NodeConfig:
    """Return the node, and the terms on which it joins.

    Raises:
        ValueError: an option or the node's name is not usable; the message names it.
    """
    interval = whole(params, "keep_alive_interval", 5)
    attempts = whole(params, "keep_alive_max_attempt", 3)
    if not params.run_id:
        raise ValueError("--rdzv-id is empty: the run needs a name, the same on every node.")
    return NodeConfig(
        endpoint=_endpoint(params.endpoint),
        run_id=environment.text("--rdzv-id", params.run_id),
        address=params.local_addr or socket.getfqdn(),
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        join_timeout=whole(params, "join_timeout", 600),
        last_call_timeout=whole(params, "last_call_timeout", 30),
        keep_alive_timeout=interval * attempts,
        connect_timeout=whole(params, "read_timeout", 60),
        call_timeout=whole(params, "heartbeat_timeout", 5),
        name=environment.node_name(),
    )


def whole(params: RendezvousParameters, key: str, default: int) -> int:
    """Return a whole number above 0 of ``--rdzv-conf``.

    Raises:
        ValueError: it is something else.
    """
    value = params.get(key, default)
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(
            f"--rdzv-conf {key}={value}: it must be a whole number above 0, such as {key}={default}."
        )
    return number


def switch(params: RendezvousParameters, key: str, default: bool) -> bool:
    """Return a truth value of ``--rdzv-conf``.

    Raises:
        ValueError: it is something else.
    """
    value = str(params.get(key, default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise ValueError(f"--rdzv-conf {key}={value}: it must be true or false, such as {key}=false.")
    return value in ("true", "1")


def _endpoint(given: str) -> str:
    if not given:
        return environment.endpoint(None)
    addresses = []
    for part in given.split(","):
        if not part.strip():
            raise ValueError(f'--rdzv-endpoint="{given}": there is nothing between two of its commas.')
        addresses.append(_address(part))
    return environment.endpoint(",".join(addresses))


def _address(given: str) -> str:
    if is_socket(given.strip()):
        return given
    host, port = parse_rendezvous_endpoint(given, DEFAULT_PORT)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
