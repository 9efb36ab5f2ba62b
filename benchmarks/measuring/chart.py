"""The chart of a run."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.measuring.results import Results
from benchmarks.peers import SYSTEMS

# Okabe and Ito's palette, which colour-blind readers can tell apart.
STYLES = {
    "muster-memory": ("#0072B2", "o", "-"),
    "muster-sqlite": ("#56B4E9", "s", "--"),
    "tcpstore": ("#E69F00", "^", "-"),
    "jax": ("#333333", "D", "-"),
}
PANELS = [
    ("server_cpu_us_per_arrival", "Server CPU per arrival", "µs"),
    ("barrier_ms", "Time of one barrier", "ms"),
]


def draw(results: Results, path: Path) -> None:
    """Write the chart to an SVG file."""
    mpl.rcParams["svg.hashsalt"] = "muster"
    figure = Figure(figsize=(10, 4.4), layout="constrained", facecolor="white")
    for axes, (name, title, unit) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for system in results.systems():
            _plot(axes, results, system, name)
        _label(axes, results.sizes(), f"{title} ({unit})")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(STYLES), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _plot(axes: Axes, results: Results, system: str, name: str) -> None:
    points = [
        (ranks, value)
        for ranks in results.sizes()
        if (value := results.figure(system, ranks, name)) is not None
    ]
    if not points:
        return
    colour, marker, line = STYLES[system]
    axes.plot(
        [ranks for ranks, _ in points],
        [value for _, value in points],
        color=colour,
        marker=marker,
        linestyle=line,
        label=SYSTEMS[system].title,
    )


def _label(axes: Axes, sizes: list[int], title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("ranks")
    axes.set_xscale("log", base=2)
    if axes.has_data():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
