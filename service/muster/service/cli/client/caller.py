"""The name of the user that runs a command."""

import getpass
import os
import socket

from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.limits import Limits


def caller() -> str:
    """Return ``user@host``, for people, as long as the coordinator accepts a name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a user id without a name.
        user = f"uid {os.getuid()}"
    name = report.printable(f"{user}@{socket.gethostname()}").encode()
    return name[: Limits().max_name_bytes].decode(errors="ignore")
