"""What a rank of a chaos test writes down, so that a SIGKILL does not undo it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from muster.worker import AsyncSaveError
from tests.support.saves.save_history import Event, to_line


class Saver(Protocol):
    """Saves, and knows what has become of each save."""

    def finalize(self, blocking: bool = False) -> Sequence[object]:
        """Return the saves that were finalized since the last call."""
        ...


class Notes:
    """The events of this rank: in a history of its own, for the judge, and in a pipe, for the test.

    Args:
        folder: the folder that all ranks share.
    """

    def __init__(self, folder: Path) -> None:
        self._rank, self._round = int(os.environ["RANK"]), int(os.environ["MUSTER_ROUND"])
        history = folder / f"history-{self._round:04}-{self._rank}"
        self._files = (
            os.open(history, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
            os.open(folder / "events", os.O_WRONLY),
        )

    def add(self, what: str, step: int, path: Path | str = "", text: str = "") -> None:
        """Write an event down."""
        line = to_line(Event(self._rank, what, step, str(path), self._round, text)).encode()
        for file in self._files:
            os.write(file, line)


class NotedSaves:
    """The saves of this rank, and what has become of them.

    Args:
        saver: makes the saves.
        notes: gets an event for each save that was finalized, or has failed.
    """

    def __init__(self, saver: Saver, notes: Notes) -> None:
        self._saver = saver
        self._notes = notes
        self._begun: list[tuple[int, str]] = []
        """The step of each save, and the text of its event once it is finalized."""
        self._heard = 0

    @property
    def in_flight(self) -> int:
        """The number of saves that were begun, and of which nothing was heard yet."""
        return len(self._begun) - self._heard

    def begin(self, step: int, text: str = "") -> None:
        """Add a save that was begun.

        Args:
            step: its step.
            text: the text of the event when it is finalized.
        """
        self._begun.append((step, text))

    def listen(self, blocking: bool) -> bool:
        """Note what has become of the saves. Returns whether there was anything new."""
        before = self._heard
        while True:
            try:
                done = len(self._saver.finalize(blocking))
            except AsyncSaveError as error:
                # It also ends those before it that the same call has finalized.
                self._hear("finalized", error.call_idx - self._heard)
                self._hear("failed", 1, str(error))
                continue
            self._hear("finalized", done)
            return self._heard > before

    def _hear(self, what: str, count: int, reason: str = "") -> None:
        for step, text in self._begun[self._heard : self._heard + count]:
            self._notes.add(what, step, text=reason[:500] or text)
        self._heard += count


def leave_trace(folder: Path) -> None:
    """Let :meth:`lab.processes.agents.Job.workers` find this process."""
    born = folder / f"born-{os.getpid()}"
    born.write_text(
        f"{os.environ['MUSTER_ROUND']} {os.environ['RANK']} {os.environ['WORLD_SIZE']} {os.getppid()}"
    )
    born.rename(folder / f"worker-{os.getpid()}")


def are_told_to_finish(folder: Path) -> bool:
    """Ask all ranks whether one of them was told to finish: if one is gone, the others cannot train on."""
    wish = torch.tensor([int((folder / "finish").exists())])
    dist.all_reduce(wish, dist.ReduceOp.MAX)
    return bool(wish)
