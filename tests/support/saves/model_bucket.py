"""A store of objects that stops each caller before its request: the test chooses which goes on."""

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import TypeVar

from greenlet import getcurrent

T = TypeVar("T")


class Fate(Enum):
    """What becomes of a request."""

    DONE = "done"
    LOST = "done, and nobody hears of it"
    FAILED = "not done"
    TWICE = "done, and once more by a client that did not hear of it"


class ModelBucket:
    """One store, for all generations of a job.

    Args:
        exclusive: whether one request can make an object only if it does not exist yet.
    """

    def __init__(self, *, exclusive: bool = True) -> None:
        self.held: dict[str, bytes] = {}
        self.begun: set[str] = set()
        """Names of objects that are being uploaded."""
        self._exclusive = exclusive

    def names(self) -> set[str]:
        # Page after page: what is made or removed meanwhile may be on either.
        first = self._asked(lambda: [name for name in self.held if name < "step-0000000002"])
        return _tops(first + self._asked(lambda: [name for name in self.held if name >= "step-0000000002"]))

    def sizes(self, folder: str) -> dict[str, int]:
        start = f"{folder}/"
        return self._asked(
            lambda: {
                name.removeprefix(start): len(data)
                for name, data in self.held.items()
                if name.startswith(start)
            }
        )

    def get(self, name: str) -> bytes:
        found = self._asked(lambda: self.held.get(name))
        if found is None:
            raise FileNotFoundError(name)
        return found

    def get_all(self, names: Iterable[str]) -> dict[str, bytes]:
        found = {name: self._asked(partial(self.held.get, name)) for name in names}
        return {name: data for name, data in found.items() if data is not None}

    def put(self, name: str, data: bytes) -> None:
        self._asked(lambda: self.held.update({name: data}))

    def create(self, name: str, data: bytes) -> bool:
        if not self._exclusive:
            if self._asked(lambda: name in self.held):
                return False
            self.put(name, data)
            return True

        def make() -> bool:
            there = name in self.held
            self.held.setdefault(name, data)
            return not there

        return self._asked(make)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._asked(partial(self.held.pop, name, None))

    def uploads(self) -> set[str]:
        return self._asked(lambda: {name.partition("/")[0] for name in self.begun})

    def abort_uploads(self, folder: str) -> None:
        self._asked(
            lambda: self.begun.difference_update({n for n in self.begun if n.startswith(f"{folder}/")})
        )

    def upload(self, name: str, data: bytes) -> None:
        """As a child does: it begins, and ends with an object, unless it was aborted."""
        self._asked(lambda: self.begun.add(name))

        def complete() -> None:
            if name not in self.begun:
                raise OSError("no such upload")
            self.begun.discard(name)
            self.held[name] = data

        self._asked(complete)

    def _asked(self, do: Callable[[], T]) -> T:
        # The test is the parent of all that ask.
        asks = getcurrent().parent
        assert asks is not None
        fate = asks.switch()
        if fate is Fate.FAILED:
            raise OSError("503 Slow Down")
        answer = do()
        if fate is Fate.TWICE:
            answer = do()
        if fate is Fate.LOST:
            raise OSError("connection reset by peer")
        return answer


def _tops(names: Iterable[str]) -> set[str]:
    """As a store lists them that takes ``/`` for the end of a folder's name."""
    return {top + slash for top, slash, _ in (name.partition("/") for name in names)}
