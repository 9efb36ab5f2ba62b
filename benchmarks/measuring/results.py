"""The results of a run of the benchmark, as they are kept in a file."""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.measuring.measure import Sample


@dataclass
class Cell:
    """One system at one number of ranks, measured several times."""

    system: str
    ranks: int
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def median(self, figure: str) -> float | None:
        """Return the median of one of the figures of a Sample; None if every measurement failed."""
        if not self.samples:
            return None
        return float(statistics.median(getattr(sample, figure) for sample in self.samples))


@dataclass
class Results:
    """Everything that a run of the benchmark found, and where."""

    date: str
    machine: dict[str, str]
    versions: dict[str, str]
    options: dict[str, float]
    cells: list[Cell]

    def cell(self, system: str, ranks: int) -> Cell | None:
        """Return one cell, if it was measured."""
        return next((cell for cell in self.cells if (cell.system, cell.ranks) == (system, ranks)), None)

    def figure(self, system: str, ranks: int, figure: str) -> float | None:
        """Return the median of one figure, if there is one."""
        cell = self.cell(system, ranks)
        return cell.median(figure) if cell else None

    def systems(self) -> list[str]:
        """Return the systems, in the order in which they were measured."""
        return list(dict.fromkeys(cell.system for cell in self.cells))

    def sizes(self) -> list[int]:
        """Return the numbers of ranks, in ascending order."""
        return sorted({cell.ranks for cell in self.cells})

    def save(self, path: Path) -> None:
        """Write the results to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read the results from a file."""
        data = json.loads(path.read_text())
        cells = [
            Cell(
                cell["system"],
                cell["ranks"],
                [Sample(**sample) for sample in cell["samples"]],
                cell["failures"],
            )
            for cell in data.pop("cells")
        ]
        return cls(cells=cells, **data)
