"""Measure barriers side by side: Muster, TCPStore and JAX's coordination service.

Run it from the root of the repository: `python -m benchmarks.barrier`.
"""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.measuring.arguments import add_report_arguments, parser_of
from benchmarks.measuring.machine import describe_machine, describe_versions
from benchmarks.measuring.measure import MeasurementError, Options, measure
from benchmarks.measuring.report import page, summary_table
from benchmarks.measuring.results import Cell, Results
from benchmarks.peers import SYSTEMS
from lab.open_files import allow_many_files


def main() -> int:
    """Run the benchmark; the exit status is 1 if any measurement failed."""
    arguments = _arguments()
    if arguments.render_only:
        results = Results.load(arguments.output)
    else:
        results = _run(arguments)
        results.save(arguments.output)
    print(summary_table(results))
    _write_documents(results, arguments.docs)
    return 1 if any(cell.failures for cell in results.cells) else 0


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 128, 512, 1024], metavar="N")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--seconds", type=float, default=6.0, help="length of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each cell; the median counts")
    parser.add_argument("--load-processes", type=int, default=4, help="processes that play the ranks")
    parser.add_argument("--ranks-per-connection", type=int, default=1, help="for the systems over gRPC")
    add_report_arguments(parser, "barrier")
    return parser.parse_args()


def _run(arguments: argparse.Namespace) -> Results:
    allow_many_files()
    state_directory = arguments.output.resolve().parent
    state_directory.mkdir(parents=True, exist_ok=True)
    options = Options(
        arguments.seconds, arguments.load_processes, arguments.ranks_per_connection, state_directory
    )
    results = Results(
        date=datetime.now(UTC).date().isoformat(),
        machine=describe_machine(state_directory),
        versions=describe_versions(),
        options={
            "seconds": arguments.seconds,
            "repeats": arguments.repeats,
            "load_processes": arguments.load_processes,
            "ranks_per_connection": arguments.ranks_per_connection,
        },
        cells=[Cell(system, ranks) for ranks in arguments.ranks for system in arguments.systems],
    )
    for repeat in range(1, arguments.repeats + 1):
        for cell in results.cells:
            _measure(cell, options, f"{repeat}/{arguments.repeats}")
    return results


def _measure(cell: Cell, options: Options, position: str) -> None:
    name = f"{position}  {cell.system:<14} {cell.ranks:>5} ranks"
    try:
        sample = measure(SYSTEMS[cell.system], cell.ranks, options)
    except (MeasurementError, psutil.Error) as error:
        cell.failures.append(str(error))
        print(f"{name}  failed: {error}", file=sys.stderr, flush=True)
        return
    cell.samples.append(sample)
    cpu, barrier = sample.server_cpu_us_per_arrival, sample.barrier_ms
    print(f"{name}  {cpu:7.1f} µs per arrival  {barrier:8.2f} ms a barrier", file=sys.stderr, flush=True)


def _write_documents(results: Results, directory: Path) -> None:
    # Imported here because every load process imports this module, and needs no matplotlib.
    from benchmarks.measuring.chart import draw

    draw(results, directory / "barrier.svg")
    (directory / "barrier.md").write_text(page(results))


if __name__ == "__main__":
    sys.exit(main())
