"""Measure what tracing costs a coordinator: barriers with an OTLP endpoint and without one, in turn.

Run it from the root of the repository: `python -m benchmarks.tracing`. It needs the extra `otel`.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version

import psutil

from benchmarks.measuring.arguments import add_report_arguments, parser_of
from benchmarks.measuring.machine import describe_machine, describe_versions
from benchmarks.measuring.measure import MeasurementError, Options, Sample, measure
from benchmarks.measuring.report import table
from benchmarks.measuring.results import Cell, Results
from benchmarks.peers import System, muster_command
from lab.otlp_receiver import Receiver, receiver

OFF, ON = "tracing off", "tracing on"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ENV = "/usr/bin/env"
EXPORTER = "opentelemetry-exporter-otlp-proto-grpc"

INTRODUCTION = """\
# What tracing costs

Barriers of {ranks} ranks one after the other, with a coordinator that exports [traces](../traces.md) and with
one that does not. Measured on {date} by `python -m benchmarks.tracing`. Compare the ratio with that of other
machines, and not the other figures.
"""
METHOD = """\
The coordinators were measured in turn, {repeats:.0f} times each, for about {seconds:g} s. Each figure is the
median, with its range. The ratio is that of the medians; its range is that of the ratios of one turn. The
state is in memory. {load_processes:.0f} processes play the ranks and another one receives the spans, all on
this machine. CPU is the coordinator's user and system time, divided by the arrivals.
"""


def main() -> int:
    """Run the benchmark; the exit status is 1 if any measurement failed."""
    arguments = _arguments()
    if arguments.render_only:
        results = Results.load(arguments.output)
    else:
        results = _run(arguments)
        results.save(arguments.output)
    text = page(results)
    print(text)
    (arguments.docs / "tracing.md").write_text(text)
    return 1 if any(cell.failures for cell in results.cells) else 0


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=64, metavar="N")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one measurement")
    parser.add_argument("--repeats", type=int, default=6, help="measurements with tracing, and without")
    parser.add_argument("--load-processes", type=int, default=2, help="processes that play the ranks")
    add_report_arguments(parser, "tracing")
    return parser.parse_args()


def _run(arguments: argparse.Namespace) -> Results:
    state_directory = arguments.output.resolve().parent
    state_directory.mkdir(parents=True, exist_ok=True)
    options = Options(arguments.seconds, arguments.load_processes, 1, state_directory)
    results = Results(
        date=datetime.now(UTC).date().isoformat(),
        machine=describe_machine(state_directory),
        versions=describe_versions() | {EXPORTER: version(EXPORTER)},
        options={
            "seconds": arguments.seconds,
            "repeats": arguments.repeats,
            "load_processes": arguments.load_processes,
        },
        cells=[Cell(name, arguments.ranks) for name in (OFF, ON)],
    )
    with receiver() as spans:
        for repeat in range(arguments.repeats):
            # The order changes, so that neither is always the first.
            for cell in results.cells if repeat % 2 == 0 else reversed(results.cells):
                _measure(cell, options, spans, f"{repeat + 1}/{arguments.repeats}")
    return results


def _measure(cell: Cell, options: Options, spans: Receiver, position: str) -> None:
    name = f"{position}  {cell.system:<11}"
    before = len(spans.spans())
    try:
        sample = measure(system(cell.system, spans.endpoint), cell.ranks, options)
        received = len(spans.spans()) - before
        if (received > 0) != (cell.system == ON):
            raise MeasurementError(f"the receiver got {received} spans")
    except (MeasurementError, psutil.Error) as error:
        cell.failures.append(str(error))
        print(f"{name}  failed: {error}", file=sys.stderr, flush=True)
        return
    cell.samples.append(sample)
    figures = f"{_cpu(sample):7.1f} µs per arrival  {_arrivals(cell.ranks, sample):9,.0f} arrivals a second"
    print(f"{name}  {figures}  {received} spans", file=sys.stderr, flush=True)


def system(name: str, endpoint: str) -> System:
    """Return a coordinator with tracing or without.

    Args:
        name: ``tracing on`` or ``tracing off``.
        endpoint: the receiver's.
    """
    change = [f"{ENDPOINT}={endpoint}"] if name == ON else ["-u", ENDPOINT]
    return System(
        name,
        lambda port, _ranks, _directory: [ENV, *change, *muster_command(port, "memory:")],
        "benchmarks.peers.muster",
    )


# ---------------------------------------------------------------------- the report


def page(results: Results) -> str:
    """Return the page for the documentation."""
    off, on = results.cells
    arrivals = partial(_arrivals, off.ranks)
    rows = [
        ["coordinator's CPU for an arrival, µs", *_row([_cpu(s) for s in off.samples], _cpus(on), 1)],
        [
            "arrivals a second",
            *_row([arrivals(s) for s in off.samples], [arrivals(s) for s in on.samples], 0),
        ],
    ]
    failed = [f"- {cell.system}: {text[:200]}" for cell in results.cells for text in cell.failures]
    parts = [
        INTRODUCTION.format(ranks=off.ranks, date=results.date),
        table(["figure", OFF, ON, "on / off"], rows),
        *(["## Failed measurements", "\n".join(failed)] if failed else []),
        METHOD.format(**results.options),
        "## Machine and software",
        "\n".join(f"- {key}: {value}" for key, value in (results.machine | results.versions).items()),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _row(off: Sequence[float], on: Sequence[float], decimals: int) -> list[str]:
    if not off or not on:
        return ["–"] * 3
    ratios = [b / a for a, b in zip(off, on, strict=False)]
    ratio = statistics.median(on) / statistics.median(off)
    return [
        _shown(statistics.median(off), off, decimals),
        _shown(statistics.median(on), on, decimals),
        _shown(ratio, ratios, 3),
    ]


def _shown(value: float, values: Sequence[float], decimals: int) -> str:
    shown, least, most = (f"{one:,.{decimals}f}" for one in (value, min(values), max(values)))
    return f"{shown} ({least} to {most})"


def _cpus(cell: Cell) -> list[float]:
    return [_cpu(sample) for sample in cell.samples]


def _cpu(sample: Sample) -> float:
    return sample.server_cpu_us_per_arrival


def _arrivals(ranks: int, sample: Sample) -> float:
    """The barriers run back to back."""
    return ranks * 1000 / sample.barrier_ms


if __name__ == "__main__":
    sys.exit(main())
