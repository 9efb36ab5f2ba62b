"""Check what a metadata server or a scheduler says before it becomes a notice."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeAlias

from muster.watcher.notice import Notice
from muster.watcher.polling import LookError

LEAD = 900.0
"""Seconds before an announced event at which it becomes a notice. Some are announced weeks before."""
MAX_BYTES = 65_536
"""Size of an answer."""
MAX_EVENTS = 256
"""Events in an answer."""
MAX_DISTANCE = 366 * 86_400
"""Seconds between now and a time that is taken for real."""
MAX_REASON = 200
"""Characters of a text that goes into a reason."""
NAME = re.compile(r"[A-Za-z0-9._:/+@-]{1,128}", re.ASCII)

Look: TypeAlias = Callable[[], Awaitable[list[Notice]]]


def document(body: bytes, source: str) -> object:
    """Parse JSON.

    Args:
        body: the text.
        source: its name, for errors.

    Raises:
        LookError: it is not JSON.
    """
    try:
        found: object = json.loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise LookError(f"{source} is not JSON: {printable(body.decode(errors='replace'), 80)!r}.") from None
    return found


def items(value: object, source: str) -> list[Mapping[str, object]]:
    """Return a list of JSON objects.

    Raises:
        LookError: it is something else, or too long.
    """
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise LookError(f"{source} is not a list of objects.")
    if len(value) > MAX_EVENTS:
        raise LookError(f"{source} has more than {MAX_EVENTS} entries.")
    return value


def mapping(value: object, source: str) -> Mapping[str, object]:
    """Return a JSON object.

    Raises:
        LookError: it is something else.
    """
    if not isinstance(value, dict):
        raise LookError(f"{source} is not an object.")
    return value


def text(item: Mapping[str, object], key: str, source: str) -> str:
    """Return a text of a JSON object.

    Raises:
        LookError: it is absent, or something else.
    """
    value = item.get(key)
    if not isinstance(value, str):
        raise LookError(f"{source} has no text {key!r}.")
    return value


def name(item: Mapping[str, object], key: str, source: str) -> str:
    """Return a text that may be a part of a notice's id.

    Raises:
        LookError: it is absent, or has other characters than an id.
    """
    value = text(item, key, source)
    if not NAME.fullmatch(value):
        raise LookError(f"{source}: {key!r} is not an identifier: {printable(value, 80)!r}.")
    return value


def when(value: str, now: float, source: str) -> float:
    """Parse a time: ISO 8601 with an offset, or as in HTTP, with or without the day of the week.

    Args:
        value: the text.
        now: seconds since 1970.
        source: the document that has it, for errors.

    Returns:
        Seconds since 1970.

    Raises:
        LookError: it has another form, or is more than a year away.
    """
    found = _iso(value) or _http(value)
    if found is None or abs(found.timestamp() - now) > MAX_DISTANCE:
        raise LookError(f"{source} has no usable time: {printable(value, 80)!r}.")
    return found.timestamp()


def printable(value: str, limit: int = MAX_REASON) -> str:
    """Return a text of others on one line, without control characters, and cut."""
    line = " ".join(value[: 8 * limit].split())
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def utc(seconds: float) -> str:
    """Return a time for an id."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Parts:
    """One look at several documents. A broken one does not hide what the others say.

    Args:
        looks: reads each document.
    """

    def __init__(self, looks: Sequence[Look]) -> None:
        self._looks = looks
        self._known: list[list[Notice]] = [[] for _ in looks]
        self._last: list[Notice] = []

    async def look(self) -> list[Notice]:
        """Return the notices of all documents. Those of a document that cannot be read stay as they were.

        Raises:
            LookError: a document could not be read, and the others say nothing new.
        """
        # At once: a server that hangs at one document must not delay the others.
        results = await asyncio.gather(*(_attempt(look) for look in self._looks))
        failure = next((one for one in results if isinstance(one, LookError)), None)
        for number, result in enumerate(results):
            if not isinstance(result, LookError):
                self._known[number] = result
        found = [notice for notices in self._known for notice in notices]
        if failure is not None and found == self._last:
            raise failure
        self._last = found
        return found


async def _attempt(look: Look) -> list[Notice] | LookError:
    try:
        return await look()
    except LookError as error:
        return error


def _iso(value: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    return found if found.tzinfo else None


def _http(value: str) -> datetime | None:
    for form in ("%a, %d %b %Y %H:%M:%S GMT", "%d %b %Y %H:%M:%S GMT"):
        try:
            return datetime.strptime(value, form).replace(tzinfo=UTC)
        except ValueError:
            pass
    return None
