"""The options of shared storage, as ranks and keepers have them. Keepers take them from their environment."""

import json
import os
from collections.abc import Mapping
from typing import Any

from muster.checkpoint.storage_options import STORAGE_OPTIONS, storage_options


def options_or_environment(options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the options that ranks use: those that are given, or else those of the environment.

    Raises:
        ValueError: the variable holds no JSON object.
    """
    said = os.environ.get(STORAGE_OPTIONS, "")
    if options is not None or not said:
        return options
    return storage_options(said)


def keeper_environment(options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the variables by which a keeper that this process starts gets the same options.

    Raises:
        ValueError: they cannot be handed to another process.
    """
    if not options:
        return {}
    try:
        return {STORAGE_OPTIONS: json.dumps(dict(options))}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"storage_options with local=…: keepers are other processes, and get them as JSON: {error}. Give "
            "texts, numbers, lists and dictionaries, or let the store's library find the rest by itself."
        ) from None
