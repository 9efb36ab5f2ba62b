"""An engine whose commits wait for the test."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lab.patience import PATIENCE
from muster.service.storage.memory import MemoryEngine


@dataclass
class Commit:
    """One call of an engine's commit, which ends when the test says so."""

    writes: dict[bytes, bytes | None]
    cleared: list[bytes] = field(default_factory=list)
    error: Exception | None = None
    may_end: threading.Event = field(default_factory=threading.Event)

    @property
    def kinds(self) -> list[str]:
        return sorted(key.split(b"\0")[0].decode() for key in self.writes)

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.may_end.set()


class HeldEngine(MemoryEngine):
    """An engine whose commits each wait for the test."""

    blocking = True

    def __init__(self) -> None:
        super().__init__()
        self.begun: asyncio.Queue[Commit] = asyncio.Queue()
        self.commits: list[Commit] = []
        """All commits, also those that nobody takes from ``begun`` or ends."""
        self._free = False
        self.closed = 0
        self._loop = asyncio.get_running_loop()

    def commit(self, writes: Mapping[bytes, bytes | None], cleared: Sequence[bytes] = ()) -> None:
        commit = Commit(dict(writes), list(cleared))
        self.commits.append(commit)
        self._loop.call_soon_threadsafe(self.begun.put_nowait, commit)
        assert self._free or commit.may_end.wait(PATIENCE)
        if commit.error is not None:
            raise commit.error
        super().commit(writes, cleared)

    def release(self) -> None:
        """Let every commit through: those that have begun, and those to come."""
        self._free = True
        for commit in self.commits:
            commit.may_end.set()

    def close(self) -> None:
        self.closed += 1
