"""What the benchmark of saves measures, and the file that keeps it."""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Sample:
    """One save."""

    stall: float
    """Seconds that the training thread spent in the system's calls."""
    durable: float
    """Seconds from the call to the moment when the save was decided and synced."""
    training: float
    """Speed of training meanwhile, as a part of its speed without a save; 0 if there was no meanwhile."""
    torn: bool
    """Whether what was saved is not the state at the call."""
    memory: float = 0.0
    """Anonymous and shared memory of the process and its children at its peak, above the state, in GiB."""


@dataclass
class Cell:
    """One system at one size."""

    system: str
    gib: int
    first: Sample | None = None
    """The first save of a process, which also sets up what the system keeps."""
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    date: str = ""
    """The day of the run."""

    def median(self, name: str) -> float:
        """Return the median of a figure, of a cell with samples."""
        return float(statistics.median(getattr(sample, name) for sample in self.samples))

    def highest(self, name: str) -> float | None:
        """Return the highest value of a figure, the first save's included."""
        every = [*([self.first] if self.first else []), *self.samples]
        return max((getattr(sample, name) for sample in every), default=None)


PAUSE = "seconds between two saves, for each GiB"
"""What :attr:`Found.machine` calls it."""


@dataclass
class Found:
    """All that was measured."""

    machine: dict[str, Any]
    cells: list[Cell]
    forks: list[dict[str, Any]]
    copies: list[dict[str, Any]]


def read(path: Path) -> Found:
    """Read the figures of an earlier run."""
    found = json.loads(path.read_text())
    cells = []
    for cell in found["cells"]:
        first = Sample(**cell["first"]) if cell["first"] else None
        samples = [Sample(**sample) for sample in cell["samples"]]
        cells.append(Cell(cell["system"], cell["gib"], first, samples, cell["failures"], cell["date"]))
    return Found(found["machine"], cells, found["forks"], found.get("copies", []))
