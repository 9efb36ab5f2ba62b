"""What the dashboards have in common: their names, their variables, and the links between them."""

from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import dashboard

from dev.dashboards.panels import DATASOURCE

C = 'job=~"$coordinator"'
"""Picks the series of the installations that were chosen."""
RATE = "[$__rate_interval]"
"""Behind a counter, for its rate."""
DOCS = "docs/operations.md"
"""Where the documentation is, seen from the repository's root. The chart may put an address before it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Names a dashboard in Grafana."""

    uid: str
    title: str


OVERVIEW = Identity("muster-overview", "Muster / Overview")
RUN = Identity("muster-run", "Muster / Run")


def frame(identity: Identity, description: str, other: Identity) -> builders.Dashboard:
    """A dashboard without panels, linked to another one.

    Args:
        identity: its own.
        description: what it is for.
        other: where its link leads, with time and variables.
    """
    link = (
        builders.DashboardLink(other.title)
        .type(dashboard.DashboardLinkType.LINK)
        .url(f"/d/{other.uid}")
        .icon("dashboard")
        .keep_time(True)
        .include_vars(True)
    )
    return (
        builders.Dashboard(identity.title)
        .uid(identity.uid)
        .description(description)
        .tags(["muster"])
        .timezone("browser")
        .time("now-3h", "now")
        .refresh("30s")
        .readonly()
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(link)
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            variable("coordinator", "Coordinator", "label_values(muster_build_info, job)")
            .description(
                "The job label of Prometheus, which tells one installation of Muster from another. The chart "
                "makes it of namespace and Service."
            )
            .multi(True)
            .include_all(True)
            .current(dashboard.VariableOption(text="All", value="$__all", selected=True))
        )
    )


def variable(name: str, label: str, query: str) -> builders.QueryVariable:
    """A variable with the values of a label."""
    return (
        builders.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )
