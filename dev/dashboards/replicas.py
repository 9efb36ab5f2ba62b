"""The replicas of a coordinator, and how etcd answers them. One that is alone shows nothing here."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dev.dashboards.frame import RATE, C
from dev.dashboards.panels import Query, bars, lines, median_and_99, row, steps


def add_replicas(board: Dashboard) -> None:
    """Add their panels to a dashboard."""
    board.with_row(row("Replicas"))
    board.with_panel(
        steps(
            "Who leads",
            "1 for the replica that leads. Where all are at 0, nothing is decided, and ranks wait.",
            Query(f"max by (instance) (muster_leader{{{C}}})", "{{instance}}"),
        )
    )
    board.with_panel(
        bars(
            "Changes of the lead",
            "How often another replica began to lead. A change costs the time of a lease, unless the leader "
            "was told to stop.",
            Query(f"max by (job) (increase(muster_leader_changes_total{{{C}}}{RATE}))", "{{job}}"),
        )
    )
    board.with_panel(
        steps(
            "Replicas",
            "Replicas that are there, as the one knows that sees the fewest. With one, nobody takes over.",
            Query(f"min by (job) (muster_replicas{{{C}}})", "{{job}}"),
        )
    )
    board.with_panel(
        lines(
            "Age of the lease",
            "Time since a replica last renewed its lease. The leader ends before it is the lease's TTL.",
            Query(f"muster_lease_age_seconds{{{C}}}", "{{instance}}"),
            unit="s",
        )
    )
    board.with_panel(
        lines(
            "Time of etcd's answers",
            "How long the attempts to call etcd take, whatever comes of them.",
            *median_and_99("muster_etcd_call_seconds", C, RATE),
            unit="s",
        )
    )
    board.with_panel(
        lines(
            "Calls of etcd by status",
            "Attempts to call etcd that ended, by their status. All but OK are tried again.",
            Query(f"sum by (code) (rate(muster_etcd_call_seconds_count{{{C}}}{RATE}))", "{{code}}"),
            unit="reqps",
        )
    )
