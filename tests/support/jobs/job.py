"""A rank of a framework's job: ``FOLDER MODE [OWN …] [WHO WHAT WHEN]``.

MODE is ``committed`` or ``plain``: with Muster's adapter, or with the framework alone, the control; or
``endless``: committed, until it is killed. Each step is saved. Every generation but the first resumes.
At the third save rank WHO does WHAT at WHEN (:class:`tests.support.jobs.fault.Fault`).

A rank prints a line for what it did: ``resumed WORDS`` (what it loaded), ``saved STEP``, or
``failed STEP ERROR WORDS``. Each job says only how its framework builds, trains, saves and loads.
"""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from muster.worker.errors import MusterError
from tests.support.jobs.fault import ENDLESS, FAULTY, SAVES, Fault


@dataclass
class Arguments:
    """What a rank is told on its command line and by its environment."""

    folder: Path
    mode: str
    own: list[str]
    """Arguments that only its job knows."""
    fault: Fault | None
    """This rank's, until it has struck."""
    rank: int
    world_size: int
    generation: int
    """The number of the job's generation, from 0."""

    @classmethod
    def read(cls, own: int = 0) -> Self:
        """Read them.

        Args:
            own: the number of the job's own.
        """
        folder, mode, *more = sys.argv[1:]
        who, what, when = more[own:] or ("none", "", "")
        rank = os.environ["RANK"]
        return cls(
            Path(folder),
            mode,
            more[:own],
            Fault(what, when) if who == rank else None,
            int(rank),
            int(os.environ["WORLD_SIZE"]),
            int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        )

    @property
    def is_plain(self) -> bool:
        """Whether it is the control."""
        return self.mode == "plain"

    @property
    def saves(self) -> int:
        """How many saves a generation makes."""
        return ENDLESS if self.mode == "endless" else SAVES

    def take_fault(self) -> Fault | None:
        """Return the fault, which is then gone: it strikes once."""
        found, self.fault = self.fault, None
        return found


def say(what: str, *words: object) -> None:
    """Print a line for the test."""
    print(what, *words, flush=True)


def say_failed(step: int, error: BaseException) -> None:
    """Print the line of a save that failed."""
    say("failed", step, type(error).__name__, *str(error).split())


class Job(ABC):
    """A rank whose job has no loop of its own; :meth:`run` is its loop.

    Args:
        given: its arguments.
    """

    FAILURES: ClassVar[tuple[type[BaseException], ...]] = (MusterError, OSError)
    """What a save raises that has failed."""

    def __init__(self, given: Arguments) -> None:
        self.given = given
        self.step = 0

    def has_checkpoint(self) -> bool:
        """Whether to resume."""
        return self.given.generation > 0

    @abstractmethod
    def load(self) -> Sequence[object]:
        """Load the last checkpoint, and set the step. Returns the words about it; none: there was none."""

    @abstractmethod
    def train(self) -> None:
        """Train the step."""

    @abstractmethod
    def save(self) -> None:
        """Save the step."""

    @abstractmethod
    def break_save(self, fault: Fault) -> None:
        """Let a fault strike in the next save."""

    def strike(self, fault: Fault) -> None:
        """Let a fault strike before a save."""
        fault.strike()

    def faulty_step(self, first: int) -> int:
        """Return the step at which the fault strikes, of a generation that begins after a step."""
        return FAULTY

    def last_step(self) -> int:
        """Return the last step of a generation, as it begins."""
        return self.step + self.given.saves

    def after_failure(self, error: BaseException) -> None:
        """Go on after a save that failed, or raise the error."""
        raise error

    def close(self) -> None:  # noqa: B027  # Most jobs have nothing to close.
        """Come to the end."""

    def resume(self) -> None:
        """Load the last checkpoint, and say so."""
        if words := self.load():
            say("resumed", *words)

    def run(self) -> None:
        """Resume, train and save."""
        if self.has_checkpoint():
            self.resume()
        last, faulty = self.last_step(), self.faulty_step(self.step)
        while self.step < last:
            self.step += 1
            self.train()
            fault = self.given.take_fault() if self.step == faulty else None
            try:
                if fault is not None:
                    (self.strike if fault.when == "before" else self.break_save)(fault)
                self.save()
            except self.FAILURES as error:
                say_failed(self.step, error)
                self.after_failure(error)
            else:
                say("saved", self.step)
        self.close()
