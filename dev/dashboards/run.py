"""One run: the ranks missing from each barrier, the stragglers, and how the nodes came together."""

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models.dashboard import DynamicConfigValue, VariableOption

from dev.dashboards.frame import DOCS, OVERVIEW, RATE, RUN, frame, variable
from dev.dashboards.panels import (
    OUTCOME_COLORS,
    Query,
    bars,
    distribution,
    lines,
    number,
    points,
    row,
    steps,
    words,
)

R = 'job=~"$coordinator", run="$run"'
G = f'{R}, prefix=~"$prefix"'
WRITES = f'{R}, prefix="save"'
COMMITS = f'{R}, prefix="save/commit"'
QUANTILES = ((0.5, "median"), (0.9, "90 %"), (0.99, "99 %"))


def build() -> Dashboard:
    """The dashboard."""
    board = frame(RUN, "One run: its barriers, members, rendezvous and saves.", OVERVIEW)
    board.with_variable(
        variable("run", "Run", 'label_values(muster_run_closed{job=~"$coordinator"}, run)').description(
            "The run's id."
        )
    )
    board.with_variable(
        variable("prefix", "Prefix", f"label_values(muster_barriers_open{{{R}}}, prefix)")
        .description("The groups of barriers. Digits are folded: step-12000 is step-N.")
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all", selected=True))
    )
    _now(board)
    _barriers(board)
    _members(board)
    _training(board)
    _rendezvous(board)
    _checkpoints(board)
    _local_checkpoints(board)
    _saves(board)
    return board


def _now(board: Dashboard) -> None:
    board.with_row(row("Now"))
    board.with_panel(
        number(
            "Run",
            "Whether the run was closed. That is for good: no node may join it again.",
            f"max(muster_run_closed{{{R}}})",
            names={"0": "open", "1": "closed"},
        )
    )
    board.with_panel(
        number(
            "Missing ranks",
            "Ranks that the open barriers wait for.",
            f"sum(muster_barrier_missing_ranks{{{G}}})",
            steps=[(1, "orange")],
        )
    )
    board.with_panel(
        number(
            "Open barriers",
            "Barriers that wait for ranks at this moment.",
            f"sum(muster_barriers_open{{{G}}})",
        )
    )
    board.with_panel(
        number(
            "Oldest open barrier",
            "How long the barrier that was opened first has waited.",
            f"max(muster_barrier_open_seconds{{{G}}})",
            unit="s",
            steps=[(60, "yellow"), (300, "red")],
            decimals=0,
        )
    )
    board.with_panel(
        number(
            "Connected ranks",
            "Ranks whose newest process holds a session.",
            f'sum(muster_members{{{R}, state="connected"}})',
        )
    )
    board.with_panel(
        number(
            "Lost ranks",
            "Ranks whose connection was lost, and which are not back.",
            f'sum(muster_members{{{R}, state=~"disconnected|lost"}})',
            steps=[(1, "red")],
        )
    )
    board.with_panel(
        number(
            "Waiting nodes",
            "Nodes without a round: those that come together, and those that wait to be let in.",
            f"sum(muster_rendezvous_waiting_nodes{{{R}}})",
            steps=[(1, "yellow")],
        )
    )
    board.with_panel(
        number(
            "Failed barriers, 1 h",
            "Barriers of the last hour that were not released.",
            f'sum(increase(muster_barrier_decisions_total{{{G}, outcome!="RELEASED"}}[1h]))',
            steps=[(0.5, "orange"), (3, "red")],
            decimals=0,
        )
    )


def _barriers(board: Dashboard) -> None:
    board.with_row(row("Barriers"))
    board.with_panel(
        steps(
            "Who is missing: how many",
            "Ranks that the open barrier of each group waits for. It falls as they arrive.",
            Query(f"sum by (prefix) (muster_barrier_missing_ranks{{{G}}})", "{{prefix}}"),
        )
    )
    board.with_panel(
        lines(
            "Age of the open barrier",
            "How long the oldest open barrier of each group has waited, and when it times out. Beyond half "
            "of its timeout there is an alert.",
            Query(f"max by (prefix) (muster_barrier_open_seconds{{{G}}})", "{{prefix}}"),
            Query(f"max by (prefix) (muster_barrier_timeout_seconds{{{G}}})", "{{prefix}}, timeout"),
            unit="s",
        ).override_by_regexp(
            "/, timeout$/",
            [
                DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
                DynamicConfigValue("custom.fillOpacity", 0),
                DynamicConfigValue("custom.lineInterpolation", "stepAfter"),
            ],
        )
    )
    board.with_panel(
        words(
            "Who is missing: by name",
            "Metrics count ranks and do not name them. These name each with host, pid and reason:\n\n"
            "```\nmuster describe run RUN\nmuster describe barrier RUN PREFIX\n"
            "muster describe member RUN RANK\n```\n\n"
            "The rank that is always last is below, in *The straggler*.\n\n"
            f"What each alert means and what to do about it: {DOCS}#alerts",
            width=8,
            height=8,
        )
    )
    board.with_panel(
        bars(
            "Decisions by outcome",
            "Barriers decided in each interval. All but RELEASED are failures, which every rank was told.",
            Query(f"sum by (outcome) (increase(muster_barrier_decisions_total{{{G}}}{RATE}))", "{{outcome}}"),
            colors=OUTCOME_COLORS,
        )
    )
    board.with_panel(
        steps(
            "Open barriers",
            "Barriers that wait for ranks. Each group has one at a time; groups that differ in digits count "
            "together.",
            Query(f"sum by (prefix) (muster_barriers_open{{{G}}})", "{{prefix}}"),
        )
    )
    board.with_panel(
        points(
            "The straggler",
            "The rank that arrived last at the newest barrier of each group; the value is the rank. A line "
            "that is level is one rank that is always last: see the skew for what it costs.",
            Query(f"muster_barrier_last_arrival_rank{{{G}}}", "{{prefix}}"),
        ).decimals(0)
    )
    for title, name, what in (
        ("Wait", "wait", "Time from the first arrival at a barrier to its decision."),
        ("Skew", "skew", "Time from the first to the last arrival: what the slowest rank costs the others."),
    ):
        buckets = f"sum by (le) (increase(muster_barrier_{name}_seconds_bucket{{{G}}}{RATE}))"
        board.with_panel(
            distribution(f"{title}: distribution", f"{what} Darker: more barriers.", buckets, width=16)
        )
        board.with_panel(
            points(
                f"{title}: quantiles",
                f"{what} Read off the histogram's buckets.",
                *(Query(f"histogram_quantile({q}, {buckets})", label) for q, label in QUANTILES),
                unit="s",
            )
        )


def _members(board: Dashboard) -> None:
    board.with_row(row("Members"))
    board.with_panel(
        steps(
            "Members by state",
            "Ranks, by the state of their newest process.",
            Query(f"sum by (state) (muster_members{{{R}}})", "{{state}}"),
            width=12,
        )
    )
    board.with_panel(
        steps(
            "Sessions",
            "Processes that hold a stream: those of the ranks, and those of their children that save.",
            Query(f"sum(muster_sessions{{{R}}})", "sessions"),
            width=12,
        )
    )


def _training(board: Dashboard) -> None:
    first, spread = (f"max({name}{{{R}}})" for name in ("muster_run_step", "muster_run_step_spread"))
    board.with_row(row("Training"))
    board.with_panel(
        steps(
            "Training step",
            "The step of the first rank and of the last, of a job that calls `muster.worker.step`.",
            Query(first, "first rank"),
            Query(f"{first} - {spread}", "last rank"),
        )
    )
    board.with_panel(
        lines(
            "No rank has moved for",
            "Time since a rank took a step. After 15 minutes there is an alert.",
            Query(f"max(muster_run_still_seconds{{{R}}})", "no step"),
            unit="s",
        )
    )
    board.with_panel(
        lines(
            "Save that was asked for",
            "Time since all ranks were asked to save at one step; once they have, how long it took.",
            Query(f"max(muster_run_save_asked_seconds{{{R}}} or muster_run_save_seconds{{{R}}})", "save"),
            unit="s",
        )
    )


def _rendezvous(board: Dashboard) -> None:
    board.with_row(row("Rendezvous"))
    board.with_panel(
        steps(
            "Rounds completed",
            "How often the nodes came together since the coordinator's start. Each starts the workers.",
            Query(f"sum(muster_rendezvous_rounds_total{{{R}}})", "rounds"),
            width=6,
        )
    )
    board.with_panel(
        steps(
            "Waiting nodes",
            "Nodes without a round: those that come together, and those that wait to be let in.",
            Query(f"sum(muster_rendezvous_waiting_nodes{{{R}}})", "nodes"),
            width=6,
        )
    )
    board.with_panel(
        lines(
            "Time to come together",
            "From the first join of a round to its completion: the mean since the coordinator's start.",
            Query(
                f"sum(muster_rendezvous_join_seconds_sum{{{R}}})"
                f" / sum(muster_rendezvous_join_seconds_count{{{R}}})",
                "mean",
            ),
            unit="s",
            width=6,
        )
    )
    board.with_panel(
        steps(
            "Closed",
            "1 once the run is closed.",
            Query(f"max(muster_run_closed{{{R}}})", "closed"),
            width=6,
        )
    )


def _checkpoints(board: Dashboard) -> None:
    age, unsaved, interval = (
        f"max(muster_checkpoint_{name}_seconds{{{R}}})" for name in ("age", "unsaved", "interval")
    )
    board.with_row(row("Checkpoints"))
    board.with_panel(
        steps(
            "Committed step",
            "Step of the checkpoint that was committed last. It falls when a job goes back.",
            Query(f"max(muster_checkpoint_committed_step{{{R}}})", "step"),
            width=6,
        )
    )
    board.with_panel(
        lines(
            "Age of the newest checkpoint",
            "Time since a commit, and how long of it ranks were connected: what a "
            "failure would cost. Beyond three times the usual interval, and ten minutes, there is an alert.",
            Query(age, "age"),
            Query(unsaved, "with ranks connected"),
            Query(f"3 * {interval}", "three intervals"),
            unit="s",
            width=6,
        ).override_by_name(
            "three intervals",
            [
                DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
                DynamicConfigValue("custom.fillOpacity", 0),
                DynamicConfigValue("custom.lineInterpolation", "stepAfter"),
            ],
        )
    )
    board.with_panel(
        lines(
            "Size of the newest checkpoint",
            "Bytes of all ranks that report theirs.",
            Query(f"max(muster_checkpoint_bytes{{{R}}})", "all ranks"),
            unit="bytes",
            width=6,
        )
    )
    board.with_panel(
        lines(
            "Slowest write",
            "Time that the slowest rank took to write its part of the newest checkpoint. To see which rank: "
            "`muster describe run RUN`.",
            Query(f"max(muster_checkpoint_write_seconds{{{R}}})", "slowest rank"),
            unit="s",
            width=6,
        )
    )


def _local_checkpoints(board: Dashboard) -> None:
    board.with_row(row("Local checkpoints"))
    board.with_panel(
        lines(
            "Age by level",
            "Age of the newest local checkpoint that has at least each level: the work that a loss costs.",
            Query(f"max by (level) (muster_local_checkpoint_age_seconds{{{R}}})", "{{level}}"),
            unit="s",
            width=6,
        )
    )
    board.with_panel(
        lines(
            "Behind",
            "Age of the oldest local checkpoint that waits for its copies or for shared storage. After "
            "15 minutes there is an alert.",
            Query(f"max(muster_local_checkpoint_behind_seconds{{{R}}})", "behind"),
            unit="s",
            width=6,
        )
    )
    board.with_panel(
        steps(
            "Single copies and domains",
            "Parts of the newest local checkpoint on one node only, and the fewest failure domains that hold "
            "a part of the newest replicated one.",
            Query(f"max(muster_local_checkpoint_single_copies{{{R}}})", "single copies"),
            Query(f"min(muster_local_checkpoint_domains{{{R}}})", "domains"),
            width=6,
        )
    )
    board.with_panel(
        lines(
            "Step by level",
            "Step of the newest local checkpoint that has at least each level. `muster get checkpoints RUN` "
            "shows what the others wait for.",
            Query(f"max by (level) (muster_local_checkpoint_step{{{R}}})", "{{level}}"),
            width=6,
        )
    )
    board.with_panel(
        steps(
            "Keepers",
            "Keepers of the run, by whether they are connected. `muster get keepers RUN` names their nodes.",
            Query(f"sum by (state) (muster_keepers{{{R}}})", "{{state}}"),
        )
    )
    board.with_panel(
        lines(
            "Keepers' space",
            "Space that all keepers use together, and their quota.",
            Query(f"sum(muster_keeper_disk_used_bytes{{{R}}})", "used"),
            Query(f"sum(muster_keeper_disk_quota_bytes{{{R}}})", "quota"),
            unit="bytes",
        )
    )
    board.with_panel(
        lines(
            "Fullest keeper",
            "Used part of the quota, at the keeper that is fullest. Beyond 90 % there is an alert.",
            Query(f"max(muster_keeper_disk_used_ratio{{{R}}})", "fullest"),
            unit="percentunit",
        )
    )


def _saves(board: Dashboard) -> None:
    board.with_row(row("Saves"))
    for selector, title, what in (
        (
            WRITES,
            "Writes by outcome",
            "Barrier `save`: RELEASED once every rank's child has written its part.",
        ),
        (COMMITS, "Commits by outcome", "Barrier `save/commit`: RELEASED once the checkpoint has its name."),
    ):
        board.with_panel(
            bars(
                title,
                f"{what} Any other outcome, and the checkpoint is not there for anyone.",
                Query(
                    f"sum by (outcome) (increase(muster_barrier_decisions_total{{{selector}}}{RATE}))",
                    "{{outcome}}",
                ),
                colors=OUTCOME_COLORS,
                width=6,
            )
        )
    for name, title, what in (
        ("wait", "Wait of saves", "Time from the first rank's arrival to the decision"),
        ("skew", "Skew of saves", "Time from the first rank that had written to the last"),
    ):
        ratio = " / ".join(
            f"sum by (prefix) (increase(muster_barrier_{name}_seconds_{part}"
            f'{{{R}, prefix=~"save|save/commit"}}{RATE}))'
            for part in ("sum", "count")
        )
        board.with_panel(
            points(
                title, f"{what}: the mean of each interval.", Query(ratio, "{{prefix}}"), unit="s", width=6
            )
        )
