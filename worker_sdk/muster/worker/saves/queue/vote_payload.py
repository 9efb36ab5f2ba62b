"""What a rank says beside its vote that it has written: a number, and a word.

The usual payload is empty, since each rank is sent those of all ranks.
"""

from collections.abc import Mapping

MAX_WORD = 1_000
"""Bytes of a word."""


def encoded(since_abort: int | None, word: bytes) -> bytes:
    """Return the payload.

    Args:
        since_abort: how many saves this rank has made since it aborted; None: it has not.
        word: of the save's own.
    """
    number = b"" if since_abort is None else str(since_abort).encode()
    return number + b" " + word[:MAX_WORD] if word else number


def numbers(payloads: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return the ranks' numbers; empty for a rank that says none."""
    return {rank: payload.partition(b" ")[0] for rank, payload in payloads.items()}


def words(payloads: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return the words of the ranks that say one."""
    found = ((rank, payload.partition(b" ")[2]) for rank, payload in sorted(payloads.items()))
    return {rank: word for rank, word in found if word}
