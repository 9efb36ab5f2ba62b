"""The allowed values of the settings of saves."""

import math
from pathlib import Path

from muster.client.protocol import MAX_COPIES


def check_timeout(timeout: float) -> None:
    """Refuse a timeout that is not usable.

    Args:
        timeout: seconds.

    Raises:
        ValueError: it is not a finite number above 0.
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout = {timeout}: it must be a finite number of seconds above 0.")


def check_local(local: str | Path | None, replicas: int, persist_every: int) -> None:
    """Refuse settings of local saves that are not usable.

    Args:
        local: the folder on each node; None: there are no local saves.
        replicas: further nodes for each part.
        persist_every: which saves go to shared storage.

    Raises:
        ValueError: one is not usable, or is given without ``local``.
    """
    for name, value, least, default in (("replicas", replicas, 0, 1), ("persist_every", persist_every, 1, 1)):
        if value < least:
            raise ValueError(f"{name} = {value}: it must be at least {least}.")
        if local is None and value != default:
            raise ValueError(f"{name} = {value} is of local saves. Give local=…, or leave it out.")
    if replicas > MAX_COPIES:
        raise ValueError(f"replicas = {replicas}: it must be at most {MAX_COPIES}.")
