"""The options of a bucket's store, as processes that have no ``storage_options=`` get them."""

import json
from collections.abc import Mapping
from typing import Any

STORAGE_OPTIONS = "MUSTER_STORAGE_OPTIONS"
"""The environment variable: a JSON object with options of fsspec, such as an endpoint."""


def storage_options(text: str) -> Mapping[str, Any]:
    """Read the options from the variable's text; empty: none.

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
