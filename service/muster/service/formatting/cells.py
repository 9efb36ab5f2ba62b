"""Values as short texts, for the cells of tables on a terminal and on the status page."""

from collections.abc import Iterable

from muster.service.core.vocabulary import report

UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
"""Units of bytes. Each unit is 1,024 times the unit before it."""
NOTHING = "-"
"""The text of an empty cell, so that programs can count columns."""


def duration(milliseconds: int) -> str:
    """Format a duration as one word: ``340ms``, ``2.5s``, ``41s``, ``5m20s``, ``7h12m``, ``3d4h``."""
    if milliseconds < 10_000:
        return report.seconds(milliseconds / 1000).replace(" ", "")
    seconds = round(milliseconds / 1000)
    for big, small, units in ((86_400, 3_600, "dh"), (3_600, 60, "hm"), (60, 1, "ms")):
        if seconds >= 2 * big:
            return f"{seconds // big}{units[0]}{seconds % big // small}{units[1]}"
    return f"{seconds}s"


def size(count: int) -> str:
    """Format a number of bytes: ``512 bytes``, ``1.5 GiB``."""
    if count < 1024:
        return f"{count} bytes"
    power = min(len(UNITS), (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:,.1f} {UNITS[power - 1]}"


def steps(lowest: int, highest: int) -> str:
    """Format the training steps of ranks: one step, or the lowest and the highest: ``405-412``."""
    return str(highest) if lowest == highest else f"{lowest}-{highest}"


def standstill(lowest: int, highest: int, lowest_rank: int, still: float) -> str:
    """Name the last rank, and how long ago any rank moved: ``rank 3 is last; none moved for 41s``.

    Args:
        lowest: the step of the last rank.
        highest: the step of the first rank.
        lowest_rank: the last rank.
        still: seconds since any rank took a step.
    """
    behind = f"rank {lowest_rank} is last; " if lowest < highest else ""
    return f"{behind}none moved for {duration(round(still * 1000))}"


def ranks(numbers: Iterable[int]) -> str:
    """Format ranks as ranges, in one word."""
    return report.ranges(numbers).replace(" ", "") or NOTHING
