"""Who runs a command."""

import getpass
import os
import socket

from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.limits import Limits


def caller() -> str:
    """Who it is, for people: user@host, as the coordinator takes a name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a number that has no name.
        user = f"uid {os.getuid()}"
    name = report.printable(f"{user}@{socket.gethostname()}").encode()
    return name[: Limits().max_name_bytes].decode(errors="ignore")
