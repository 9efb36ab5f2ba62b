"""The patterns of a token's runs, as the coordinator and the command read them."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(run_id: str, patterns: Iterable[str]) -> bool:
    """Whether a run is one of those that glob patterns stand for."""
    return any(fnmatchcase(run_id, pattern) for pattern in patterns)
