"""The kinds of panels that the dashboards are made of, all with one look."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
PANEL_HEIGHT = 8
STAT_HEIGHT = 4
OUTCOME_COLORS = {
    "RELEASED": "green",
    "TIMED_OUT": "orange",
    "ABORTED": "yellow",
    "MEMBER_LOST": "red",
    "MISMATCHED": "purple",
}

Step: TypeAlias = tuple[float, str]
"""From this value on, this colour."""


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel.

    Args:
        expr: with Grafana's variables in it.
        legend: Grafana's template for the name of each of its series.
    """

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: a query that gives one value for each row.

    Args:
        title: its head.
        expr: an instant query, by the label of the table's rows.
        unit: Grafana's name of the unit.
        steps: colours of the cells.
        names: words for values.
    """

    title: str
    expr: str
    unit: str = "short"
    steps: Sequence[Step] = ()
    names: Mapping[str, str] | None = None


def median_and_99(histogram: str, selector: str, window: str) -> list[Query]:
    """How long most took, and the slowest of a hundred.

    Args:
        histogram: the metric's name, without ``_bucket``.
        selector: what stands in its braces.
        window: behind it, in brackets.
    """
    return [
        Query(f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket{{{selector}}}{window})))", name)
        for q, name in ((0.5, "median"), (0.99, "99 %"))
    ]


def row(title: str) -> builders.Row:
    """A heading; the panels that follow stand below it."""
    return builders.Row(title)


def number(
    title: str,
    description: str,
    expr: str,
    *,
    legend: str = "",
    unit: str = "short",
    width: int = 3,
    steps: Sequence[Step] = (),
    names: Mapping[str, str] | None = None,
    decimals: int | None = None,
    no_value: str = "–",
) -> stat.Panel:
    """One big number: what there is now. With a ``legend`` and no number to show, its text."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .height(STAT_HEIGHT)
        .span(width)
        .unit(unit)
        .no_value(no_value)
        .thresholds(_thresholds(steps))
        .color_mode(common.BigValueColorMode.VALUE if steps else common.BigValueColorMode.NONE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .text_mode(common.BigValueTextMode.NAME if legend else common.BigValueTextMode.VALUE)
        .with_target(_target(Query(expr, legend), "A").instant())
    )
    if names is not None:
        panel.mappings([_mapping(names)])
    return panel if decimals is None else panel.decimals(decimals)


def lines(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "short",
    width: int = 8,
    limit: float | None = None,
    decimals: int | None = None,
    lowest: float | None = 0,
) -> timeseries.Panel:
    """Lines over time; a ``limit`` is drawn as one more, in red."""
    panel = (
        _series(title, description, queries, unit, width)
        .line_width(1)
        .fill_opacity(8)
        .show_points(common.VisibilityMode.AUTO)
    )
    if lowest is not None:
        panel.min(lowest)
    if limit is not None:
        panel.thresholds(_thresholds([(limit, "red")])).thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    return panel if decimals is None else panel.decimals(decimals)


def steps(title: str, description: str, *queries: Query, width: int = 8) -> timeseries.Panel:
    """Whole numbers over time, that hold until the next one."""
    return (
        _series(title, description, queries, "short", width)
        .line_interpolation(common.LineInterpolation.STEP_AFTER)
        .line_width(2)
        .min(0)
        .decimals(0)
    )


def points(
    title: str, description: str, *queries: Query, unit: str = "short", width: int = 8
) -> timeseries.Panel:
    """Points over time, for what is known now and then only."""
    return (
        _series(title, description, queries, unit, width)
        .draw_style(common.GraphDrawStyle.POINTS)
        .point_size(5)
        .min(0)
    )


def bars(
    title: str,
    description: str,
    *queries: Query,
    width: int = 8,
    colors: Mapping[str, str] | None = None,
) -> timeseries.Panel:
    """Stacked bars: how often something happened in each interval."""
    panel = (
        _series(title, description, queries, "short", width)
        .draw_style(common.GraphDrawStyle.BARS)
        .fill_opacity(80)
        .line_width(0)
        .min(0)
        .decimals(0)
        .stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    )
    for name, color in (colors or {}).items():
        fixed = dashboard.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})
        panel.override_by_regexp(f"/{name}/", [fixed])
    return panel


def distribution(title: str, description: str, expr: str, *, width: int = 12) -> heatmap.Panel:
    """A heat map of a histogram in seconds; ``expr`` is by ``le``."""
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .height(PANEL_HEIGHT)
        .span(width)
        .unit("s")
        .calculate(False)
        .cell_gap(1)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .exponent(0.5)
            .steps(32)
        )
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .show_legend()
        .with_target(_target(Query(expr, "{{le}}"), "A").range().format(PromQueryFormat.HEATMAP))
    )


def overview_table(
    title: str, description: str, by: str, *columns: Column, link: str, width: int = 24
) -> table.Panel:
    """A table with one row for each value of a label, and a column for each query.

    Args:
        title: over the panel.
        description: what it tells.
        by: the label; its values are the first column.
        columns: the others.
        link: where a click on the first column leads; ``${__value.raw}`` is its value.
        width: in columns of the grid.
    """
    panel = table.Panel().title(title).description(description).datasource(DATASOURCE)
    panel.height(PANEL_HEIGHT).span(width)
    names = {by: by.capitalize()}
    for ref, column in zip("ABCDEFGHIJ", columns, strict=False):
        panel.with_target(_target(Query(column.expr), ref).instant().format(PromQueryFormat.TABLE))
        names[f"Value #{ref}"] = column.title
        panel.override_by_name(column.title, _cell(column))
    panel.override_by_name(by.capitalize(), [dashboard.DynamicConfigValue("links", [_data_link(by, link)])])
    panel.with_transformation(
        dashboard.DataTransformerConfig("joinByField", options={"byField": by, "mode": "outer"})
    )
    hidden = {"Time": True} | {f"Time {number}": True for number in range(1, len(columns) + 1)}
    organize = {
        "excludeByName": hidden,
        "indexByName": {name: place for place, name in enumerate(names)},
        "renameByName": names,
    }
    panel.with_transformation(dashboard.DataTransformerConfig("organize", options=organize))
    return panel


def words(title: str, content: str, *, width: int = 24, height: int = STAT_HEIGHT) -> text.Panel:
    """Markdown."""
    return text.Panel().title(title).mode(TextMode.MARKDOWN).content(content).height(height).span(width)


def _series(
    title: str, description: str, queries: Sequence[Query], unit: str, width: int
) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .height(PANEL_HEIGHT)
        .span(width)
        .unit(unit)
        .color_scheme(builders.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC))
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    for ref, query in zip("ABCDEFGH", queries, strict=False):
        panel.with_target(_target(query, ref).range())
    return panel


def _target(query: Query, ref: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery().datasource(DATASOURCE).expr(query.expr).legend_format(query.legend).ref_id(ref)
    )


def _thresholds(steps: Sequence[Step]) -> builders.ThresholdsConfig:
    base = dashboard.Threshold(value=None, color="green")
    further = [dashboard.Threshold(value=value, color=color) for value, color in steps]
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps([base, *further])


def _mapping(names: Mapping[str, str]) -> dashboard.ValueMap:
    return dashboard.ValueMap(
        {
            value: dashboard.ValueMappingResult(text=name, index=n)
            for n, (value, name) in enumerate(names.items())
        }
    )


def _cell(column: Column) -> list[dashboard.DynamicConfigValue]:
    settings = [dashboard.DynamicConfigValue("unit", column.unit)]
    if column.names is not None:
        settings.append(dashboard.DynamicConfigValue("mappings", [_mapping(column.names)]))
    if column.steps:
        settings += [
            dashboard.DynamicConfigValue("thresholds", _thresholds(column.steps).build()),
            dashboard.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
        ]
    return settings


def _data_link(by: str, url: str) -> dict[str, object]:
    return {"title": f"Look at this {by}", "url": url, "targetBlank": False}
