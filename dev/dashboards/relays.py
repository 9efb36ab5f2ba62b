"""The relays of an installation: for how many they speak, and whether they reach the coordinator."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dev.dashboards.frame import RATE
from dev.dashboards.panels import Query, bars, lines, row, steps

R = 'job=~"$coordinator-relay"'
"""Picks their series: a job of their own, since their memory and their absence are not the coordinator's."""


def add_relays(board: Dashboard) -> None:
    """Add their panels to a dashboard. Where there are no relays, or only torchrun's, they are empty."""
    board.with_row(row("Relays"))
    board.with_panel(
        steps(
            "Relays",
            "Relays that Prometheus reaches, and those of them whose coordinator answered when it was asked "
            "last. One that nobody has used yet has not asked.",
            Query(f"count(muster_relay_build_info{{{R}}})", "there"),
            Query(f"sum(muster_relay_upstream_connected{{{R}}})", "connected"),
        )
    )
    board.with_panel(
        steps(
            "Who speaks through relays",
            "Processes that relays speak for, the streams on which they came, and the relays' own streams to "
            "the coordinator. The last are what the coordinator holds instead of the first.",
            Query(f"sum(muster_relay_processes{{{R}}})", "processes"),
            Query(f"sum(muster_relay_workers{{{R}}})", "streams of workers"),
            Query(f"sum(muster_relay_upstream_streams{{{R}}})", "streams to the coordinator"),
        )
    )
    board.with_panel(
        bars(
            "Relays without the coordinator",
            "Streams to the coordinator that were lost, and how many callers came while the coordinator was "
            "not reached in time. Those connect directly.",
            Query(f"sum(increase(muster_relay_reconnects_total{{{R}}}{RATE}))", "lost"),
            Query(f"sum(increase(muster_relay_cut_off_total{{{R}}}{RATE}))", "not reached"),
        )
    )
    board.with_panel(
        lines(
            "Arrivals in a message",
            "How many arrivals of ranks a relay hands on in one message. At best it is the ranks of a node. "
            "1 means that ranks of a node come further apart than the relay waits.",
            Query(
                f"sum(rate(muster_relay_arrivals_total{{{R}}}{RATE}))"
                f" / sum(rate(muster_relay_messages_total{{{R}}}{RATE}))",
                "arrivals",
            ),
            width=12,
        )
    )
    board.with_panel(
        lines(
            "Calls passed on",
            "Calls of stores and rendezvous that relays handed on as they were. They are not folded.",
            Query(f"sum(rate(muster_relay_calls_total{{{R}}}{RATE}))", "calls"),
            unit="reqps",
            width=12,
        )
    )
