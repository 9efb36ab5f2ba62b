"""The harness of the chaos tests: it injects faults, drawn by a seed, into real processes, and judges.

A chaos test derives from :class:`Chaos`. It hands in its processes (``open``), its progress and its faults
(``step``), and its judge (``judge``). :class:`DrawnFaults` is for tests that inject one fault after another.
:func:`command` makes each of them a command for long runs:

    python -m tests.support.chaos.relay_chaos --faults 300
"""

import argparse
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from lab.processes.fork_client import spawning
from tests.support.saves.child_processes import children_of, state_of

STACK_SECONDS = 0.5
"""Seconds in which a process writes its stacks."""


def option(default: Any, help: str, **how: Any) -> Any:
    """Return a field of a chaos test that its command has as an option.

    Args:
        default: its value, if none is given.
        help: what it is.
        how: further arguments of ``add_argument``.
    """
    return field(default=default, metadata={"help": help, **how})


@dataclass(kw_only=True)
class Chaos(ABC):
    """One chaos test: what is to happen, and afterwards what did happen."""

    seed: int = field(default_factory=lambda: random.SystemRandom().randrange(10**6), metadata={"type": int})
    injected: Counter[str] = field(init=False, default_factory=Counter)
    """The faults that did something, by name."""
    counts: Counter[str] = field(init=False, default_factory=Counter)
    """What the processes did, by name."""
    seconds: float = field(init=False, default=0.0)
    wrong: list[str] = field(init=False, default_factory=list)
    """What the judge found."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    @abstractmethod
    def open(self, folder: Path, stack: ExitStack) -> None:
        """Start the processes.

        Args:
            folder: an empty folder, where all traces are left.
            stack: ends them.
        """

    @abstractmethod
    def step(self) -> bool:
        """Let the job get on, and inject faults.

        Returns:
            Whether there is more to do.
        """

    def judge(self) -> None:  # noqa: B027  # A test whose steps judge has nothing left to do.
        """Add to :attr:`wrong` what the history of the job shows."""

    def stacks(self) -> str:
        """Return what the processes are doing, for a test that hangs."""
        return ""

    def run(self, folder: Path) -> Self:
        """Let it happen, and judge it.

        Args:
            folder: an empty folder, where all traces are left.

        Raises:
            AssertionError: a step failed, or waited in vain.
        """
        began = time.monotonic()
        with ExitStack() as stack:
            self.open(folder, stack)
            try:
                while self.step():
                    pass
                self.judge()
            except AssertionError as error:
                error.add_note(f"{self.account()}\n{self.stacks()}")
                raise
        self.seconds = time.monotonic() - began
        return self

    def facts(self) -> list[str]:
        """Return what else the account says."""
        return []

    def account(self) -> str:
        """Return what happened, for people."""
        listed = ", ".join(f"{name} {count}" for name, count in sorted(self.injected.items()) if count)
        counted = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s, {self.injected.total()} faults: {listed}",
            *([counted] if counted else []),
            *self.facts(),
            *(f"WRONG: {one}" for one in self.wrong),
        ]
        return "\n".join(lines)


@dataclass(kw_only=True)
class DrawnFaults(Chaos):
    """A chaos test that injects one fault after the other; each kind comes once before any comes again."""

    BROKEN: ClassVar[str]
    """The module of ``tests.support.chaos`` with the program that has faults built in."""
    PROGRAM: ClassVar[tuple[str, ...]]
    """The program without."""
    BETWEEN: ClassVar[float] = 0.5
    """Seconds between two faults, in which the job is to get on."""

    faults: int = option(200, "the number of faults")
    only: tuple[str, ...] = option((), "the kinds of fault; default: all", metavar="FAULT")
    pauses: float = option(1.0, "for how long faults last, as a part of what they usually do")
    pause: float = option(0.0, "seconds between two operations of a process; 0: none")
    broken: str = option("", "a fault that is built into the program, to be found", metavar="KIND")
    when: list[tuple[float, str]] = field(init=False, default_factory=list)
    """When each fault began, in seconds of the monotonic clock, and its name."""

    @property
    def program(self) -> tuple[str, ...]:
        """The program under test."""
        if not self.broken:
            return self.PROGRAM
        return (sys.executable, "-m", f"tests.support.chaos.{self.BROKEN}", self.broken)

    @abstractmethod
    def kinds(self) -> tuple[Callable[[], None], ...]:
        """Return the faults; when one of them returns, its cause is over."""

    def recover(self) -> None:
        """Wait until all is well again."""

    def step(self) -> bool:
        """Inject a fault."""
        kinds = [kind for kind in self.kinds() if not self.only or kind.__name__ in self.only]
        number = len(self.when)
        if number % len(kinds) == 0:
            self._order = self.chance.sample(kinds, len(kinds))
        fault = self._order[number % len(kinds)]
        self.when.append((time.monotonic(), fault.__name__))
        fault()
        self.recover()
        self.injected[fault.__name__] += 1
        # An idle wait is wanted here: the job is to get on in between.
        time.sleep(self.BETWEEN)
        return len(self.when) < self.faults

    def idle(self, least: float, most: float) -> None:
        """Let a fault last for a time between two, in seconds."""
        time.sleep(self.chance.uniform(least, most) * self.pauses)


def stacks_of(folder: Path, pids: Iterable[int]) -> str:
    """Return what all threads of some processes, and of their children, are doing.

    Args:
        folder: where each process writes its stacks and its children's, to ``stacks-PID``, at SIGUSR1.
        pids: the processes.
    """
    found = []
    for parent in pids:
        log = folder / f"stacks-{parent}"
        for pid in (parent, *sorted(children_of(parent))):
            found.append(f"--- process {pid}, child of {parent}, state {state_of(pid)}")
            before = log.stat().st_size
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                time.sleep(STACK_SECONDS)
            found.append(log.read_text()[before:])
    return "\n".join(found)


def command(kind: type[Chaos], **defaults: object) -> int:
    """Run a chaos test by the arguments of the command line, and print its account.

    Args:
        kind: the test.
        defaults: of its options, where a long run has others.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=(kind.__doc__ or "").splitlines()[0])
    for one in dataclasses.fields(kind):
        if one.init:
            value = defaults.get(one.name, one.default)
            how: dict[str, Any] = dict(one.metadata)
            if isinstance(value, bool):
                how["action"] = argparse.BooleanOptionalAction
            elif isinstance(value, tuple):
                how |= {"nargs": "*", "type": type(value[0]) if value else str}
            elif isinstance(value, str | int | float):
                how["type"] = type(value)
            # Else the test itself has a default.
            how["default"] = argparse.SUPPRESS if value is dataclasses.MISSING else value
            parser.add_argument(f"--{one.name.replace('_', '-')}", **how)
    chaos = kind(**vars(parser.parse_args()))
    print(f"seed {chaos.seed}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="muster-chaos-", ignore_cleanup_errors=True) as folder,
        spawning(),
    ):
        chaos.run(Path(folder))
    print(chaos.account())
    return 1 if chaos.wrong else 0
