"""Patterns of run ids and node names in tokens, for the coordinator and the command."""

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

_PARTS = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)
_WILD = re.compile(r"[*?\[]")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a run id or a node name matches one of some glob patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def literal(name: str) -> str:
    """Return the pattern that only this name matches."""
    return _WILD.sub(r"[\g<0>]", name)


def overlap(one: str, other: str) -> bool:
    """Return whether a run id may match both patterns. A set in brackets counts as any character."""
    first, second = _PARTS.findall(one), _PARTS.findall(other)
    todo = [(0, 0)]
    seen = set(todo)
    while todo:
        at, there = todo.pop()
        if (at, there) == (len(first), len(second)):
            return True
        mine, theirs = (
            parts[place] if place < len(parts) else "" for parts, place in ((first, at), (second, there))
        )
        steps = set()
        if "*" in (mine, theirs):  # The asterisk matches nothing more, or one more part of the other pattern.
            steps = {(at + 1, there)} if mine else set()
            steps |= {(at, there + 1)} if theirs else set()
        elif mine and theirs and _agree(mine, theirs):
            steps = {(at + 1, there + 1)}
        todo += steps - seen
        seen |= steps
    return False


def overlapping(holders: Sequence[tuple[str, Sequence[str]]]) -> Iterator[tuple[str, str, str, str]]:
    """Find patterns of different holders that may match the same run by accident.

    Equal patterns of two holders are intended, and so is ``*``.

    Args:
        holders: names with their patterns.

    Yields:
        A name, its pattern, another name, and its pattern.
    """
    entries = sorted(
        (_WILD.split(pattern, maxsplit=1)[0], pattern, name)
        for name, patterns in holders
        for pattern in patterns
        if pattern != "*"
    )
    for number, (begin, pattern, name) in enumerate(entries):
        for other_begin, other, other_name in entries[number + 1 :]:
            if not other_begin.startswith(begin):
                break  # They are sorted, so no later one matches.
            if other_name != name and other != pattern and overlap(pattern, other):
                yield name, pattern, other_name, other


def _agree(one: str, other: str) -> bool:
    return one == other or "?" in (one, other) or "[" in (one[0], other[0])
