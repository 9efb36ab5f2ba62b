"""The name of this machine as its scheduler knows it."""

import os
import socket
from collections.abc import Mapping

from muster.client.errors import EnvironmentValueError

VARIABLES = ("MUSTER_NODE_NAME", "SLURMD_NODENAME")
"""Where the name is said, in the order in which they count. Slurm sets the second one."""
MAX_BYTES = 253
"""The longest name that DNS and Kubernetes know."""


def node_name(host: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """Return the node's name: ``MUSTER_NODE_NAME``, ``SLURMD_NODENAME``, else the host's name.

    Args:
        host: the host's name; empty: what the machine says.
        environ: the environment.

    Raises:
        EnvironmentValueError: a variable holds no name.
    """
    for variable in VARIABLES:
        if environ.get(variable):
            return _checked(variable, environ[variable])
    return host or host_name()


def host_name() -> str:
    """Return the name under which this machine's processes are reported."""
    return socket.gethostname() or "unknown host"


def _checked(variable: str, value: str) -> str:
    # A lone surrogate, which stands for a byte that is not UTF-8, is not printable either.
    if not value.isprintable() or len(value.encode()) > MAX_BYTES:
        raise EnvironmentValueError(
            f"{variable} = {value[:40]!a}: a node's name has printable characters, and at most "
            f"{MAX_BYTES} bytes."
        )
    return value
