#!/usr/bin/env python3
"""Draws docs/images/dashboard-*.png: the panels of the dashboards, with the data of a real job.

It runs the job that the tests run, for longer, while a Prometheus watches, and draws each panel of the
committed files with matplotlib: place, title, unit, colours and legends are theirs. Grafana draws them in its
own way.

Usage, after ``make bench-venv``: PYTHONPATH=. .venv/bin/python dev/render-dashboards.py
"""

import re
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from lab.panels import DASHBOARDS, Target, board, substitute, targets
from lab.processes.prometheus import Prometheus, Series
from lab.watched import RUN, Watched, watched_job

IMAGES = Path(__file__).parent.parent / "docs" / "images"
STEPS, PACE, INTERVAL = 70, 1.0, 1.0
"""The job takes about two minutes and a half."""
STEP = 5
"""Seconds between two points of a line."""
VARIABLES = {"coordinator": "muster", "run": RUN, "prefix": ".*", "__rate_interval": f"{STEP + 1}s"}

CELL_WIDTH, CELL_HEIGHT, GAP = 0.72, 0.4, 0.08
"""Inches: a cell of the grid, and what is left free around a panel."""
DPI = 80
MAX_LEGEND_ROWS = 4
PALETTE = (
    *("#56A64B", "#F2CC0C", "#3274D9", "#FF780A", "#E02F44", "#0A76A4", "#A352CC", "#705DA0", "#508642"),
    *("#967302", "#2F575E", "#99440A"),
)
COLORS = {
    "green": "#37872D",
    "yellow": "#E0B400",
    "orange": "#FA6400",
    "red": "#C4162A",
    "purple": "#8F3BB8",
}
INK, FAINT, PAPER, DESK = "#24292E", "#D8DADD", "#FFFFFF", "#F4F5F5"


@dataclass(frozen=True, slots=True)
class Data:
    """What Prometheus answered to a dashboard's expressions."""

    began: float
    ended: float
    found: Mapping[str, Sequence[Series]]
    """By expression, with Grafana's variables in it."""

    def of(self, panel: Mapping[str, Any]) -> list[tuple[str, Series]]:
        """The series of a panel, with their names."""
        return [
            (_name(target, one), one) for target in targets(panel) for one in self.found.get(target.expr, ())
        ]


def main() -> None:
    """Watch the job, then draw."""
    with (
        tempfile.TemporaryDirectory() as folder,
        watched_job(Path(folder), steps=STEPS, pace=PACE, interval=INTERVAL) as watched,
    ):
        time.sleep(20)  # The last barrier waits, so that the pictures show one that does.
        data = {name: collect(watched, name) for name in DASHBOARDS}
    for name in DASHBOARDS:
        print(draw(board(name), data[name], IMAGES / f"dashboard-{name}.png"))


def collect(watched: Watched, name: str) -> Data:
    """Ask all that a dashboard asks."""
    began, ended = watched.began, time.time()
    every = [target for panel in board(name)["panels"] for target in targets(panel)]
    found = {target.expr: _ask(watched.prometheus, target, began, ended) for target in every}
    return Data(began, ended, found)


def _ask(prometheus: Prometheus, target: Target, began: float, ended: float) -> list[Series]:
    expr = substitute(target.expr, VARIABLES)
    return prometheus.query(expr) if target.instant else prometheus.query_range(expr, began, ended, STEP)


def _name(target: Target, series: Series) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: series.labels.get(match[1], ""), target.legend)


# ---------------------------------------------------------------------- the page


def draw(description: Mapping[str, Any], data: Data, path: Path) -> Path:
    """Write the picture of a dashboard."""
    panels = description["panels"]
    width = 24 * CELL_WIDTH
    height = (max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in panels) + 1.5) * CELL_HEIGHT
    figure = Figure(figsize=(width, height), facecolor=DESK, dpi=DPI)
    page = figure.add_axes((0, 0, 1, 1))
    page.set(xlim=(0, width), ylim=(height, 0))
    page.axis("off")
    chosen = f"run {RUN}, all prefixes" if "$run" in str(panels) else "all runs"
    page.text(GAP * 2, 0.32, description["title"], size=15, weight="bold", color=INK, va="center")
    note = f"{chosen} · drawn with matplotlib from the data of a real job; not a screenshot of Grafana"
    page.text(width - 2 * GAP, 0.32, note, size=9, color=INK, va="center", ha="right")
    for panel in panels:
        _panel(figure, page, panel, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path


def _panel(figure: Figure, page: Axes, panel: Mapping[str, Any], data: Data) -> None:
    at = panel["gridPos"]
    left, top = at["x"] * CELL_WIDTH + GAP, (at["y"] + 1.5) * CELL_HEIGHT + GAP
    wide, high = at["w"] * CELL_WIDTH - 2 * GAP, at["h"] * CELL_HEIGHT - 2 * GAP
    if panel["type"] == "row":
        page.text(left + GAP, top + high / 2, f"▾ {panel['title']}", size=12, color=INK, va="center")
        return
    page.add_patch(Rectangle((left, top), wide, high, facecolor=PAPER, edgecolor=FAINT, linewidth=0.8))
    page.text(left + 0.1, top + 0.19, panel["title"], size=9.5, weight="bold", color=INK, va="center")
    total_width, total_height = figure.get_size_inches()

    def axes(west: float, north: float, east: float, south: float) -> Axes:
        """The panel's inside, without so many inches at each side."""
        return figure.add_axes(
            (
                (left + west) / total_width,
                1 - (top + high - south) / total_height,
                (wide - west - east) / total_width,
                (high - north - south) / total_height,
            )
        )

    DRAWERS[panel["type"]](panel, data, axes)


Place = Callable[[float, float, float, float], Axes]


# ---------------------------------------------------------------------- the panels


def _stat(panel: Mapping[str, Any], data: Data, place: Place) -> None:
    axes = place(0.1, 0.35, 0.1, 0.1)
    axes.axis("off")
    defaults = panel["fieldConfig"]["defaults"]
    found = data.of(panel)
    text, color = defaults["noValue"], INK
    if found and panel["options"]["textMode"] == "name":
        text = "\n".join(name for name, _ in found)
    elif found:
        value = found[0][1].samples[-1][1]
        text = _mapped(defaults.get("mappings"), value) or _formatter(defaults)(value)
        if panel["options"]["colorMode"] == "value":
            color = _color_at(defaults["thresholds"]["steps"], value)
    axes.text(0.5, 0.5, text, size=24, weight="bold", color=color, ha="center", va="center")


def _timeseries(panel: Mapping[str, Any], data: Data, place: Place) -> None:
    found = data.of(panel)
    rows = _legend_rows([name for name, _ in found], panel["gridPos"]["w"])
    axes = place(0.72, 0.42, 0.18, 0.42 + 0.19 * rows)
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults.get("custom", {})
    _time_axis(axes, data)
    floor = np.zeros(round((data.ended - data.began) / STEP) + 1)
    for number, (name, one) in enumerate(found):
        settings = {f"custom.{key}": value for key, value in custom.items()} | _settings(panel, name)
        color = (
            COLORS[settings["color"]["fixedColor"]] if "color" in settings else PALETTE[number % len(PALETTE)]
        )
        times, values = np.array(one.samples).T
        if custom.get("drawStyle") == "bars":
            places = np.round((times - data.began) / STEP).astype(int)
            axes.bar(times, values, STEP * 0.85, bottom=floor[places], color=color, label=name)
            floor[places] += np.nan_to_num(values)
        elif custom.get("drawStyle") == "points":
            axes.plot(times, values, "o", markersize=3.5, color=color, label=name)
        else:
            stepped = "steps-post" if settings.get("custom.lineInterpolation") == "stepAfter" else "default"
            dash = "--" if "custom.lineStyle" in settings else "-"
            thick = custom["lineWidth"] + 0.3
            axes.plot(times, values, dash, color=color, label=name, drawstyle=stepped, linewidth=thick)
            if custom.get("showPoints") == "auto":
                there = np.isfinite(np.concatenate(([np.nan], values, [np.nan])))
                alone = there[1:-1] & ~there[:-2] & ~there[2:]
                axes.plot(times[alone], values[alone], "o", markersize=3, color=color)
            filled = settings.get("custom.fillOpacity", 0) / 100
            axes.fill_between(
                times, values, step="post" if "post" in stepped else None, color=color, alpha=filled
            )
    low, high = axes.get_ylim()
    limits = [step["value"] for step in defaults.get("thresholds", {}).get("steps", ()) if step["value"]]
    for limit in limits:
        axes.axhline(limit, color=COLORS["red"], linestyle="--", linewidth=1)
    if custom.get("scaleDistribution", {}).get("type") == "log":
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        nothing = high <= -low
        top = 1 if nothing else max([high, *(limit * 1.15 for limit in limits)])
        bottom = defaults.get("min", low)
        axes.set_ylim(bottom - 0.02 * (top - bottom), top)  # A line at the bottom is seen.
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=defaults.get("decimals") == 0))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _formatter(defaults)(value)))
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    if found:
        columns = -(-len(found) // rows)
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(-0.02, -0.14 if rows < 3 else -0.2),
            ncols=columns,
            fontsize=7.5,
            frameon=False,
            handlelength=1.2,
            columnspacing=1.2,
            borderaxespad=0,
            labelspacing=0.25,
        )


def _heatmap(panel: Mapping[str, Any], data: Data, place: Place) -> None:
    axes = place(0.72, 0.42, 0.18, 0.42)
    _time_axis(axes, data)
    found = sorted(data.of(panel), key=lambda pair: float(pair[0]))
    times = np.arange(data.began, data.ended, STEP)
    cumulated = np.zeros((len(found) + 1, len(times)))
    for number, (_, one) in enumerate(found, start=1):
        for at, value in one.samples:
            column = round((at - data.began) / STEP)
            if column < len(times):
                cumulated[number, column] = value
    counts = np.clip(np.diff(cumulated, axis=0), 0, None)
    edges = np.append(times, times[-1] + STEP)
    shown = np.ma.masked_less_equal(counts, 1e-9)
    axes.pcolormesh(
        edges, np.arange(len(found) + 1), shown, cmap="Oranges", vmin=0, edgecolor=PAPER, linewidth=0.5
    )
    formatter = _formatter(panel["fieldConfig"]["defaults"])
    axes.set_yticks(np.arange(1, len(found) + 1), [formatter(float(name)) for name, _ in found])
    axes.tick_params(axis="y", labelsize=6.5)


def _table(panel: Mapping[str, Any], data: Data, place: Place) -> None:
    axes = place(0.15, 0.4, 0.15, 0.15)
    axes.axis("off")
    join, organize = (one["options"] for one in panel["transformations"])
    by, moved = join["byField"], organize["renameByName"]
    overrides = {
        one["matcher"]["options"]: {setting["id"]: setting["value"] for setting in one["properties"]}
        for one in panel["fieldConfig"]["overrides"]
    }
    columns = {
        moved[f"Value #{one['refId']}"]: {
            series.labels[by]: series.samples[-1][1] for series in data.found[one["expr"]]
        }
        for one in panel["targets"]
    }
    names = sorted({name for column in columns.values() for name in column})
    axes.set(xlim=(0, len(columns) + 1.3), ylim=(max(8, len(names) + 1), 0))
    for place_of, title in enumerate([moved[by], *columns]):
        axes.text(place_of + 0.3 * (place_of > 0), 0.5, title, size=9, weight="bold", color=INK, va="center")
    for line, name in enumerate(names, start=1):
        axes.axhline(line, color=FAINT, linewidth=0.6)
        axes.text(0, line + 0.5, name, size=9, color=PALETTE[2], va="center")
        for column, (title, values) in enumerate(columns.items(), start=1):
            settings, value = overrides[title], values.get(name)
            if value is None:
                continue
            text = _mapped(settings.get("mappings"), value) or _formatter(settings)(value)
            color = _color_at(settings["thresholds"]["steps"], value) if "thresholds" in settings else INK
            axes.text(column + 0.3, line + 0.5, text, size=9, color=color, va="center")


def _text(panel: Mapping[str, Any], data: Data, place: Place) -> None:
    axes = place(0.15, 0.4, 0.15, 0.1)
    axes.set(xlim=(0, 1), ylim=(13, 0))
    axes.axis("off")
    line = 0.4
    code = False
    for paragraph in substitute(panel["options"]["content"], VARIABLES).splitlines():
        if paragraph.startswith("```"):
            code = not code
            continue
        plain = paragraph if code else re.sub(r"[*`]", "", paragraph)
        width = 200 if code else 11 * panel["gridPos"]["w"]
        for part in textwrap.wrap(plain, width) or [""]:
            axes.text(
                0.03 if code else 0, line, part, size=8.5, family="monospace" if code else None, color=INK
            )
            line += 1 if part else 0.5


DRAWERS: dict[str, Callable[[Mapping[str, Any], Data, Place], None]] = {
    "stat": _stat,
    "timeseries": _timeseries,
    "heatmap": _heatmap,
    "table": _table,
    "text": _text,
}


# ---------------------------------------------------------------------- their look


def _time_axis(axes: Axes, data: Data) -> None:
    axes.set_xlim(data.began, data.ended)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{datetime.fromtimestamp(at, UTC):%H:%M:%S}"))
    axes.tick_params(labelsize=7.5, colors=INK, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def _legend_rows(names: Sequence[str], width: int) -> int:
    """How many rows the names take, below a panel of so many columns."""
    per_row = max(1, int(width * CELL_WIDTH * 12 / (max(map(len, names), default=1) + 5)))
    return min(MAX_LEGEND_ROWS, -(-len(names) // per_row))


def _settings(panel: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the panel has set for a series alone."""
    return {
        one["id"]: one["value"]
        for override in panel["fieldConfig"]["overrides"]
        if re.search(override["matcher"]["options"].strip("/"), name)
        for one in override["properties"]
    }


def _color_at(steps: Sequence[Mapping[str, Any]], value: float) -> str:
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return COLORS[reached[-1]]


def _mapped(mappings: Sequence[Mapping[str, Any]] | None, value: float) -> str | None:
    for mapping in mappings or ():
        if f"{value:g}" in mapping["options"]:
            return str(mapping["options"][f"{value:g}"]["text"])
    return None


def _formatter(settings: Mapping[str, Any]) -> Callable[[float], str]:
    decimals = settings.get("decimals")
    scales: tuple[tuple[float, str], ...]
    match settings["unit"]:
        case "s":
            scales = ((1e-6, "µs"), (1e-3, "ms"), (1, "s"), (60, "min"), (3600, "h"), (86400, "d"))
        case "bytes":
            scales = ((1, "B"), (1024, "KiB"), (1024**2, "MiB"), (1024**3, "GiB"))
        case "percentunit":
            return lambda value: f"{value:.0%}"
        case "reqps":
            scales = ((1, "req/s"),)
        case _:
            scales = ((1, ""), (1e3, "K"), (1e6, "Mil"))

    def text(value: float) -> str:
        if value == float("inf"):
            return "+Inf"
        if value == 0:
            return "0"
        scale, unit = next((pair for pair in reversed(scales) if abs(value) >= pair[0]), scales[0])
        scaled = value / scale
        number = f"{scaled:.{decimals}f}" if decimals is not None else f"{scaled:.3g}"
        return f"{number} {unit}".strip()

    return text


if __name__ == "__main__":
    main()
