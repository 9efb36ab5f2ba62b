"""What a rank hands in at the barriers of a save."""

import re

from muster.client.protocol import MAX_STEP
from muster.worker.errors import MusterError

DONE, NOT_YET, GIVEN_UP = b"", b"not yet", b"given up"
"""The words of a save under way. The usual word is empty: each rank is sent those of all."""
WORDS = frozenset({DONE, NOT_YET, GIVEN_UP})
BEGINS = b"\0"
"""How the first word of a save begins, which says which save it is; no path has this in it."""
REUSED = b"\1"
"""Comes before the name of a save that does not come after all others of this rank."""
MAX_NAME = 64
"""Bytes of a save's name in that word, at most: its end, where the steps are."""
STEP = re.compile(r"(?:step|checkpoint|ckpt|iter|iteration)[\W_]?([0-9]+)", re.IGNORECASE)
"""Finds the training step in a save's name."""


def is_of_a_save(word: bytes) -> bool:
    """Return whether a rank that says this at a barrier makes a save."""
    return word in WORDS or word.startswith(BEGINS)


def step_of(name: str) -> int | None:
    """Return the training step in a save's name: ``step-9``, ``checkpoint-500``, ``iter_0000500``.

    Returns:
        None if the name has none.
    """
    found = STEP.findall(name)
    step = int(found[-1]) if found else None
    return step if step is not None and step <= MAX_STEP else None


def name_in(word: bytes) -> str:
    """Return the name of the save that a word begins."""
    return word.removeprefix(BEGINS).removeprefix(REUSED).decode("utf-8", "replace")


def order_of(word: bytes) -> tuple[list[str | int], bytes]:
    """Return the key by which the names of saves are sorted: as people would, by the numbers in them."""
    parts = re.split(r"([0-9]+)", name_in(word))
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], word


def out_of_step(prefix: str, run_id: str, why: str) -> MusterError:
    """Return the error of ranks that do different things at one barrier; nothing may come of that.

    Args:
        prefix: the barrier's group.
        run_id: the training job.
        why: how that is known.
    """
    return MusterError(
        f'the ranks are out of step in group "{prefix}" of run {run_id}: {why}. Call saves and loads in the '
        "same order on all ranks, and restart the job."
    )
