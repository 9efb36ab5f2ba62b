"""What stands in a cell of a table, on a terminal or on the status page."""

from collections.abc import Iterable

from muster.service.core.vocabulary import report

UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
"""Units of bytes; each is 1,024 times the one before."""
NOTHING = "-"
"""Stands in a cell that has nothing to say, so that columns can be counted."""


def duration(milliseconds: int) -> str:
    """A duration in one word: ``340ms``, ``2.5s``, ``41s``, ``5m20s``, ``7h12m``, ``3d4h``."""
    if milliseconds < 10_000:
        return report.seconds(milliseconds / 1000).replace(" ", "")
    seconds = round(milliseconds / 1000)
    for big, small, units in ((86_400, 3_600, "dh"), (3_600, 60, "hm"), (60, 1, "ms")):
        if seconds >= 2 * big:
            return f"{seconds // big}{units[0]}{seconds % big // small}{units[1]}"
    return f"{seconds}s"


def size(count: int) -> str:
    """A number of bytes: ``512 bytes``, ``1.5 GiB``."""
    if count < 1024:
        return f"{count} bytes"
    power = min(len(UNITS), (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:,.1f} {UNITS[power - 1]}"


def steps(lowest: int, highest: int) -> str:
    """The training step that ranks are at, or that of the last and that of the first: ``405-412``."""
    return str(highest) if lowest == highest else f"{lowest}-{highest}"


def standstill(lowest: int, highest: int, lowest_rank: int, still: float) -> str:
    """Who is behind in training, and for how long nobody has moved: ``rank 3 is last; none moved for 41s``.

    Args:
        lowest: the step of the last rank.
        highest: the step of the first.
        lowest_rank: the last.
        still: seconds since one of them took a step.
    """
    behind = f"rank {lowest_rank} is last; " if lowest < highest else ""
    return f"{behind}none moved for {duration(round(still * 1000))}"


def ranks(numbers: Iterable[int]) -> str:
    """Ranks, folded into ranges, in one word."""
    return report.ranges(numbers).replace(" ", "") or NOTHING
