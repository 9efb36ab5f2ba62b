"""Attempts to save to an object store, and the verdict of each."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from muster.checkpoint.committed import (
    WIDTH,
    Committed,
    SaveAttempt,
    UncommittedError,
    committed_from,
    seal,
    unseal,
)

VERDICT = ".json"
"""The suffix of a verdict's name."""
_ATTEMPT = re.compile(rf"step-(\d{{{WIDTH},}})\.(\d+)-(\d+)-([0-9a-f]{{8}})")


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One attempt to save a step."""

    step: int
    save: SaveAttempt
    run: str
    """A mark of the run: each run numbers its attempts from the start."""

    @property
    def name(self) -> str:
        """The folder that it is written to."""
        return f"step-{self.step:0{WIDTH}}.{self.save.generation}-{self.save.number}-{self.run}"

    @property
    def verdict(self) -> str:
        """The name of its verdict."""
        return self.name + VERDICT

    @classmethod
    def parse(cls, name: str) -> "Attempt | None":
        """Return the attempt with this name; None if it is not the name of an attempt."""
        found = _ATTEMPT.fullmatch(name)
        if found is None:
            return None
        step, generation, number, run = found.groups()
        attempt = cls(int(step), SaveAttempt(int(generation), int(number)), run)
        return attempt if attempt.name == name else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about an attempt."""

    made: Committed | None
    """The checkpoint; None: it was abandoned."""
    files: Mapping[str, int]
    """The checkpoint's objects and their sizes in bytes."""


# ---------------------------------------------------------------------- names


def folder_attempts(names: Iterable[str]) -> set[Attempt]:
    """Return the attempts that have objects in their folders."""
    return _parse_all(name.removesuffix("/") for name in names if name.endswith("/"))


def judged_attempts(names: Iterable[str]) -> set[Attempt]:
    """Return the attempts that have verdicts."""
    return _parse_all(name.removesuffix(VERDICT) for name in names if name.endswith(VERDICT))


def _parse_all(names: Iterable[str]) -> set[Attempt]:
    return {attempt for attempt in map(Attempt.parse, names) if attempt is not None}


# ---------------------------------------------------------------------- verdicts


def encode_verdict(made: Committed, files: Mapping[str, int]) -> bytes:
    """Encode the verdict of a committed attempt."""
    return seal({"verdict": "committed", **made.fields(), "files": dict(files)})


ABANDONED = seal({"verdict": "abandoned"})
"""The verdict of an abandoned attempt, encoded."""


def decode_verdict(data: bytes, attempt: Attempt, path: str) -> Verdict:
    """Decode a verdict.

    Args:
        data: its content.
        attempt: the attempt that it is about.
        path: the address of the attempt.

    Raises:
        UncommittedError: it cannot be read.
        LaterVersionError: a later version of Muster wrote it.
    """
    try:
        said = unseal(data, f"{path}{VERDICT}")
        verdict = said.pop("verdict")
        if verdict == "abandoned" and not said:
            return Verdict(None, {})
        files = said.pop("files")
        made = committed_from(said, path)
        if verdict != "committed" or made.step != attempt.step:
            raise ValueError(f"it says that it is {verdict}, step {made.step}")
        if not all(type(name) is str and type(size) is int for name, size in files.items()):
            raise ValueError("its files are not named with their sizes")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UncommittedError(f"{path}{VERDICT} cannot be read: {error!r}") from error
    return Verdict(made, files)
