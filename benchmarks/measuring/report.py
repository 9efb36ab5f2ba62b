"""The report of a run: one table for the terminal, one page for the documentation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.measuring.results import Cell, Results
from benchmarks.peers import SYSTEMS

NOT_MEASURED = "–"
PEERS = ["jax", "tcpstore"]
MUSTER = ["muster-memory", "muster-sqlite"]
GROWTH = (128, 1024)


@dataclass(frozen=True)
class Figure:
    """One figure of a sample and how it is written."""

    name: str
    title: str
    decimals: int


CPU = Figure("server_cpu_us_per_arrival", "server CPU per arrival, µs", 1)
BARRIER = Figure("barrier_ms", "one barrier, ms", 2)
MEMORY = Figure("memory_per_rank_kib", "server memory per rank, KiB", 1)
FIGURES = [
    CPU,
    Figure("release_p50_ms", "last arrival to last release, p50, ms", 2),
    Figure("release_p99_ms", "the same, p99, ms", 2),
    BARRIER,
    MEMORY,
    Figure("connections", "connections", 0),
    Figure("load_cpu_us_per_arrival", "clients' CPU per arrival, µs", 1),
]

INTRODUCTION = """\
# Barriers beside the peers

What a barrier costs the coordinator, and how long the ranks wait for it, for Muster and for two
barriers that training jobs use: the one over torch's TCPStore and the one of JAX's coordination
service. All were measured in one run, in turn, on one machine. Take the ratios with you and leave the
milliseconds here.

![CPU per arrival and time of one barrier, over the number of ranks](barrier.svg)
"""

METHOD = """\
## How it was measured

- Every server is a process of its own. Its CPU is user and system time, from after connecting and the
  warm-up to the end of the run, divided by the arrivals: connecting is not in it.
- The ranks are played by {load_processes:.0f} load processes. A rank arrives at the next barrier as soon as
  it is released from the last, so the barriers run back to back, for about {seconds:g} s at each
  measurement and at least 20 barriers. Every measurement was repeated {repeats:.0f} times with the systems
  in turn; the figures are the medians.
- *Last arrival to last release* is from the moment before the last rank's call to the moment after the last
  rank's return, on the clock that all processes of the machine share. *One barrier* is the median time from
  one barrier's last release to the next one's; as the barriers run back to back, it is close to the former.
- *Server memory per rank* is the growth of the server's resident memory from before connecting to after the
  first barrier, divided by the ranks. Socket buffers are the kernel's and not in it.
- The state of *Muster, SQLite* is on disk; every decision is committed with a sync before any rank hears of
  it. *Muster, memory*, TCPStore and JAX keep their state in memory only.
- TCPStore is called through `torch.distributed.elastic.utils.store.barrier`, with a new key for every
  barrier. JAX is called through `wait_at_barrier`, with one name for all.

## What to keep in mind

- This is one run on a machine with {cores} cores, which the clients share with the server. The barriers are
  bound by CPU, the clients' included (the last column shows how much they used), and the CPU figures hold
  some of the price of sharing caches and cores.
- The clients differ: TCPStore's and JAX's are C++ with a thread for each rank, Muster's is Python's asyncio
  client of gRPC on uvloop. A difference in the times is partly a difference between these.
- p99 is over the barriers of one measurement. At 512 and 1024 ranks those are a few dozen, so that it is
  close to the maximum.
- Each of Muster's and JAX's ranks has a connection of its own (ranks to a connection:
  {ranks_per_connection:.0f}). Left to themselves, the JAX clients of one load process would share one, which
  no real job does, so each connection goes to a loopback address of its own.
- At 8 ranks the memory is mostly what a server sets up once, with its first connection.
- The systems do not do the same work: TCPStore's barrier is a counter and a key, JAX's keeps a set of
  arrivals, and Muster also keeps sessions, orders incarnations, decides once and (with SQLite) durably.
"""


def summary_table(results: Results) -> str:
    """Return every cell's figures, a failed cell with its reason, as an aligned Markdown table."""
    header = ["ranks", "system", *(figure.title for figure in FIGURES)]
    rows = [
        _summary_row(cell)
        for ranks in results.sizes()
        for system in results.systems()
        if (cell := results.cell(system, ranks)) is not None
    ]
    return table(header, rows)


def _summary_row(cell: Cell) -> list[str]:
    title = SYSTEMS[cell.system].title
    if cell.samples and cell.failures:
        title += f" ({len(cell.failures)} of {len(cell.failures) + len(cell.samples)} failed)"
    if not cell.samples:
        title += f", failed: {cell.failures[0]}"
    return [str(cell.ranks), title, *(_number(cell.median(f.name), f.decimals) for f in FIGURES)]


def page(results: Results) -> str:
    """Return the page for the documentation."""
    method = METHOD.format(cores=results.machine["cores"], **results.options)
    sections = [
        INTRODUCTION,
        f"## Figures of {results.date}\n\n{summary_table(results)}\n{_spread(results)}",
        _failures(results),
        "## Targets\n\n" + _targets(results),
        "## Ratios\n\nMuster's figure divided by the peer's; below 1 Muster is cheaper.\n\n"
        + _ratios(results),
        f"## Growth\n\nThe figure at {GROWTH[1]} ranks divided by the one at {GROWTH[0]}.\n\n"
        + _growth(results),
        "## The price of durability\n\nMuster with SQLite beside Muster with memory. "
        "Each was measured on its own: a difference below zero is noise.\n\n" + _durability(results),
        method,
        "## Machine\n\n" + _pairs(results.machine | results.versions),
    ]
    return "\n".join(section for section in sections if section)


def _spread(results: Results) -> str:
    spreads = [
        max(values) / min(values)
        for cell in results.cells
        if (values := [sample.server_cpu_us_per_arrival for sample in cell.samples]) and min(values) > 0
    ]
    if not spreads:
        return ""
    return (
        "Between the repeats of one cell, the highest CPU per arrival was "
        f"{median(spreads):.2f} times the lowest in the median cell and "
        f"{max(spreads):.2f} times in the worst.\n"
    )


def _failures(results: Results) -> str:
    lines = [
        f"- {SYSTEMS[cell.system].title}, {cell.ranks} ranks: {reason}"
        for cell in results.cells
        for reason in cell.failures
    ]
    return "## Failed measurements\n\n" + "\n".join(lines) + "\n" if lines else ""


def _targets(results: Results) -> str:
    """What Muster set out to reach, beside what this run shows."""
    muster, durable = MUSTER

    def at(system: str, ranks: int, figure: Figure) -> float | None:
        return results.figure(system, ranks, figure.name)

    low, high = GROWTH
    targets = [
        ("CPU per arrival at 128 ranks, memory, to JAX's", 2.5, at(muster, 128, CPU), at("jax", 128, CPU)),
        (
            "CPU per arrival at 128 ranks, memory, to TCPStore's",
            4.5,
            at(muster, 128, CPU),
            at("tcpstore", 128, CPU),
        ),
        (
            f"CPU per arrival at {high} ranks to the one at {low}",
            1.5,
            at(muster, high, CPU),
            at(muster, low, CPU),
        ),
        ("CPU per arrival at 128 ranks, SQLite to memory", 1.1, at(durable, 128, CPU), at(muster, 128, CPU)),
        *(
            (
                f"one barrier at {ranks} ranks, memory, to JAX's",
                1.0,
                at(muster, ranks, BARRIER),
                at("jax", ranks, BARRIER),
            )
            for ranks in results.sizes()
        ),
    ]
    rows = [
        [text, f"{bound:g}", _ratio(value, base), "–" if not value or not base else _met(value / base, bound)]
        for text, bound, value, base in targets
    ]
    return table(["ratio", "at most", "measured", "met"], rows)


def _met(ratio: float, bound: float) -> str:
    return "yes" if ratio <= bound else "no"


def _ratios(results: Results) -> str:
    pairs = [(muster, peer) for muster in MUSTER for peer in PEERS]
    figures = [CPU, BARRIER, MEMORY]
    header = ["ranks", "Muster / peer", *(figure.title.partition(",")[0] for figure in figures)]
    rows = [
        [str(ranks), f"{SYSTEMS[muster].title} / {SYSTEMS[peer].title}"]
        + [
            _ratio(results.figure(muster, ranks, f.name), results.figure(peer, ranks, f.name))
            for f in figures
        ]
        for ranks in results.sizes()
        for muster, peer in pairs
        if results.cell(muster, ranks) and results.cell(peer, ranks)
    ]
    return table(header, rows)


def _growth(results: Results) -> str:
    low, high = GROWTH

    def growth(system: str, figure: Figure) -> str:
        return _ratio(results.figure(system, high, figure.name), results.figure(system, low, figure.name))

    rows = [
        [SYSTEMS[system].title, growth(system, CPU), growth(system, BARRIER)] for system in results.systems()
    ]
    return table(["system", "server CPU per arrival", "one barrier"], rows)


def _durability(results: Results) -> str:
    def difference(figure: Figure) -> Callable[[int], str]:
        def text(ranks: int) -> str:
            memory = results.figure("muster-memory", ranks, figure.name)
            sqlite = results.figure("muster-sqlite", ranks, figure.name)
            return _number(None if memory is None or sqlite is None else sqlite - memory, figure.decimals)

        return text

    cpu, barrier = difference(CPU), difference(BARRIER)
    rows = [
        [
            str(ranks),
            cpu(ranks),
            _ratio(
                results.figure("muster-sqlite", ranks, CPU.name),
                results.figure("muster-memory", ranks, CPU.name),
            ),
            barrier(ranks),
        ]
        for ranks in results.sizes()
    ]
    return table(
        ["ranks", "CPU per arrival, µs more", "CPU per arrival, ratio", "one barrier, ms more"], rows
    )


def _ratio(numerator: float | None, denominator: float | None) -> str:
    if numerator is None or not denominator:
        return NOT_MEASURED
    return f"{numerator / denominator:.2f}"


def _number(value: float | None, decimals: int) -> str:
    return NOT_MEASURED if value is None else f"{value:.{decimals}f}"


def _pairs(pairs: dict[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in pairs.items()) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [header, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines) + "\n"
