"""The overview: which run needs a look, and whether the coordinator is well."""

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models import common

from dev.dashboards.frame import DOCS, OVERVIEW, RATE, RUN, C, frame
from dev.dashboards.panels import (
    OUTCOME_COLORS,
    Column,
    Query,
    bars,
    lines,
    median_and_99,
    number,
    overview_table,
    row,
    steps,
    words,
)
from dev.dashboards.relays import add_relays
from dev.dashboards.replicas import add_replicas

PATIENT = 'grpc_type="unary", grpc_method!~"Arrive|Wait", grpc_service!="muster.v1.StoreService"'
"""Calls that are answered as soon as they can be: the others wait for ranks or keys, as they should."""


def build() -> Dashboard:
    """The dashboard."""
    board = frame(
        OVERVIEW,
        "All runs of a coordinator: what waits, what failed, and how the coordinator itself is doing.",
        RUN,
    )
    _now(board)
    _runs(board)
    _decisions(board)
    _calls(board)
    _storage(board)
    add_replicas(board)
    add_relays(board)
    _process(board)
    return board


def _now(board: Dashboard) -> None:
    board.with_row(row("Now"))
    board.with_panel(
        number(
            "Coordinators up",
            "Coordinators that Prometheus reaches. 0: nothing is decided, and ranks wait.",
            f"sum(up{{{C}}})",
            steps=[(0, "red"), (1, "green")],
        )
    )
    board.with_panel(
        number("Open runs", "Runs that are known and not closed.", f'sum(muster_runs{{{C}, state="open"}})')
    )
    board.with_panel(
        number("Sessions", "Worker processes that hold a stream.", f"sum(muster_sessions{{{C}}})")
    )
    board.with_panel(
        number(
            "Open barriers",
            "Barriers that wait for ranks at this moment. What counts is for how long.",
            f"sum(muster_barriers_open{{{C}}})",
        )
    )
    board.with_panel(
        number(
            "Missing ranks",
            "Ranks that the open barriers wait for. `muster describe barrier RUN PREFIX` names them.",
            f"sum(muster_barrier_missing_ranks{{{C}}})",
            steps=[(1, "orange")],
        )
    )
    board.with_panel(
        number(
            "Oldest open barrier",
            "How long the barrier that was opened first has waited.",
            f"max(muster_barrier_open_seconds{{{C}}})",
            unit="s",
            steps=[(60, "yellow"), (300, "red")],
            decimals=0,
        )
    )
    board.with_panel(
        number(
            "Failed barriers, 1 h",
            "Barriers of the last hour that timed out, were aborted, lost a member or were mismatched.",
            f'sum(increase(muster_barrier_decisions_total{{{C}, outcome!="RELEASED"}}[1h]))',
            steps=[(0.5, "orange"), (3, "red")],
            decimals=0,
        )
    )
    board.with_panel(
        number(
            "Running for",
            "Time since the coordinator took hold of its state: the youngest, if there are several.",
            f"min(time() - muster_start_time_seconds{{{C}}})",
            unit="s",
            steps=[(0, "yellow"), (600, "green")],
            decimals=0,
        )
    )


def _runs(board: Dashboard) -> None:
    board.with_row(row("Runs"))
    by_run = "max by (run)", "sum by (run)"
    newest, total = by_run
    board.with_panel(
        overview_table(
            "Runs",
            "A row for each run; click on its name to see it. Beyond 200 in use, the rest is called `other`.",
            "run",
            Column("Open barriers", f"{total} (muster_barriers_open{{{C}}})"),
            Column(
                "Missing ranks",
                f"{total} (muster_barrier_missing_ranks{{{C}}})",
                steps=[(1, "orange")],
            ),
            Column(
                "Oldest barrier",
                f"{newest} (muster_barrier_open_seconds{{{C}}})",
                unit="s",
                steps=[(60, "yellow"), (300, "red")],
            ),
            Column("Connected", f'{total} (muster_members{{{C}, state="connected"}})'),
            Column(
                "Lost",
                f'{total} (muster_members{{{C}, state=~"disconnected|lost"}})',
                steps=[(1, "red")],
            ),
            Column("Waiting nodes", f"{total} (muster_rendezvous_waiting_nodes{{{C}}})"),
            Column("Last commit", f"{newest} (muster_checkpoint_age_seconds{{{C}}})", unit="s"),
            Column("State", f"{newest} (muster_run_closed{{{C}}})", names={"0": "open", "1": "closed"}),
            link=f"/d/{RUN.uid}?${{datasource:queryparam}}&${{coordinator:queryparam}}"
            "&var-run=${__value.raw}&${__url_time_range}",
            width=16,
        )
    )
    board.with_panel(
        words(
            "What to do",
            "A run with **missing ranks** waits. Metrics count ranks and do not name them; these do:\n\n"
            "```\nmuster describe run RUN\nmuster describe barrier RUN PREFIX\n"
            "muster describe member RUN RANK\n```\n\n"
            f"What each alert means and what to do about it: {DOCS}#alerts",
            width=8,
            height=8,
        )
    )
    board.with_panel(
        steps(
            "Runs by state",
            "Runs that the coordinator knows.",
            Query(f"sum by (state) (muster_runs{{{C}}})", "{{state}}"),
        )
    )
    board.with_panel(
        steps(
            "Members by state",
            "Ranks of all runs, by the state of their newest process. Disconnected ones may still come back "
            "within the session TTL; lost ones did not.",
            Query(f"sum by (state) (muster_members{{{C}}})", "{{state}}"),
        )
    )
    board.with_panel(
        steps(
            "Sessions",
            "Worker processes that hold a stream.",
            Query(f"sum by (job) (muster_sessions{{{C}}})", "{{job}}"),
        )
    )


def _decisions(board: Dashboard) -> None:
    board.with_row(row("Barriers"))
    board.with_panel(
        bars(
            "Decisions by outcome",
            "Barriers decided in each interval. All but RELEASED are failures, which every rank was told.",
            Query(f"sum by (outcome) (increase(muster_barrier_decisions_total{{{C}}}{RATE}))", "{{outcome}}"),
            colors=OUTCOME_COLORS,
        )
    )
    board.with_panel(
        bars(
            "Failures by run",
            "Barriers that were not released: the ten runs with the most.",
            Query(
                "topk(10, sum by (run, prefix) "
                f'(increase(muster_barrier_decisions_total{{{C}, outcome!="RELEASED"}}{RATE})))',
                "{{run}} {{prefix}}",
            ),
        )
    )
    board.with_panel(
        steps(
            "Missing ranks",
            "Ranks that open barriers wait for: the ten groups with the most.",
            Query(
                f"topk(10, sum by (run, prefix) (muster_barrier_missing_ranks{{{C}}}))", "{{run}} {{prefix}}"
            ),
        )
    )
    board.with_panel(
        steps(
            "Open barriers",
            "Barriers that wait for ranks: the ten runs with the most.",
            Query(f"topk(10, sum by (run) (muster_barriers_open{{{C}}}))", "{{run}}"),
            width=12,
        )
    )
    board.with_panel(
        lines(
            "Oldest open barrier",
            "How long the oldest open barrier of each group has waited: the ten longest.",
            Query(
                f"topk(10, max by (run, prefix) (muster_barrier_open_seconds{{{C}}}))", "{{run}} {{prefix}}"
            ),
            unit="s",
            width=12,
        )
    )


def _calls(board: Dashboard) -> None:
    board.with_row(row("Calls"))
    board.with_panel(
        lines(
            "Calls by service",
            "Calls begun. Arrivals at barriers travel on the sessions' streams instead.",
            Query(
                f"sum by (grpc_service) (rate(grpc_server_started_total{{{C}}}{RATE}))", "{{grpc_service}}"
            ),
            unit="reqps",
        )
    )
    board.with_panel(
        lines(
            "Calls by status",
            "Calls ended, by status. Canceled is a client that went; Unknown and Internal are faults of the "
            "coordinator; PermissionDenied and Unauthenticated are clients without the right token.",
            Query(
                f"sum by (grpc_code) (rate(grpc_server_handled_total{{{C}}}{RATE}))",
                "{{grpc_code}}",
            ),
            unit="reqps",
        )
    )
    board.with_panel(
        lines(
            "Time of a call",
            "How long unary calls take that wait for nobody, so that what is seen is the coordinator and its "
            "storage.",
            *median_and_99("grpc_server_handling_seconds", f"{C}, {PATIENT}", RATE),
            unit="s",
        )
    )


def _storage(board: Dashboard) -> None:
    board.with_row(row("Storage"))
    board.with_panel(
        lines(
            "Time of a commit",
            "Time to make a batch of records durable. No rank hears of a decision before. The red line is "
            "where an alert begins.",
            *median_and_99("muster_storage_commit_seconds", C, RATE),
            unit="s",
            limit=0.25,
        )
    )
    board.with_panel(
        lines(
            "Commit under way",
            "How long the commit that is under way has taken. It should be gone before the next look; a "
            "disk that hangs shows here, and nowhere else.",
            Query(f"max by (job) (muster_storage_commit_open_seconds{{{C}}})", "{{job}}"),
            unit="s",
        )
    )
    board.with_panel(
        lines(
            "Commits and errors",
            "Commits per second, and all errors so far. The coordinator stops at the first error, so what "
            "is seen of it is mostly the restart.",
            Query(f"sum(rate(muster_storage_commit_seconds_count{{{C}}}{RATE}))", "commits per second"),
            Query(f"sum(muster_storage_errors_total{{{C}}})", "errors"),
        )
    )


def _process(board: Dashboard) -> None:
    board.with_row(row("Coordinator"))
    board.with_panel(
        lines(
            "Memory",
            "Resident memory of the process.",
            Query(f"process_resident_memory_bytes{{{C}}}", "{{job}} {{instance}}"),
            unit="bytes",
        )
    )
    board.with_panel(
        lines(
            "CPU",
            "Processor cores in use. The coordinator is one event loop: at 1 it is busy all the time.",
            Query(f"rate(process_cpu_seconds_total{{{C}}}{RATE})", "{{job}} {{instance}}"),
            limit=0.9,
        )
    )
    board.with_panel(
        lines(
            "File descriptors",
            "Open file descriptors: one for each connection, and a few. The limit is the process's own. The "
            "scale is logarithmic.",
            Query(f"process_open_fds{{{C}}}", "open, {{instance}}"),
            Query(f"process_max_fds{{{C}}}", "limit, {{instance}}"),
            lowest=None,
        ).scale_distribution(
            common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
        )
    )
    board.with_panel(
        steps(
            "Restarts",
            "The epoch grows by one with each start on the same state. A start loses nothing that was told.",
            Query(f"muster_coordinator_epoch{{{C}}}", "epoch, {{instance}}"),
            width=6,
        )
    )
    board.with_panel(
        lines(
            "Bounds",
            "How much is used of what all runs share. At 100 %, requests are refused.",
            Query(f"muster_limit_used{{{C}}} / muster_limit{{{C}}}", "{{limit}}"),
            unit="percentunit",
            limit=0.8,
            width=6,
        )
    )
    board.with_panel(
        number(
            "Version",
            "What runs. Two of them are an update under way.",
            f"count by (version) (muster_build_info{{{C}}})",
            legend="{{version}}",
            width=6,
        ).height(8)
    )
    board.with_panel(
        number(
            "Certificate ends in",
            "Time until the certificate that the coordinator serves with ends. A new file is taken up "
            "without a restart. Without TLS there is nothing to see.",
            f"min(muster_tls_certificate_expiry_timestamp_seconds{{{C}}} - time())",
            unit="s",
            steps=[(0, "red"), (7 * 86400, "green")],
            width=6,
            no_value="no TLS",
        ).height(8)
    )
