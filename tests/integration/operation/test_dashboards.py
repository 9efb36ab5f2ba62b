"""The dashboards' panels and the alerts, on a real Prometheus that watches a real job."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.dashboards.__main__ import differing
from lab.panels import DASHBOARDS, board, panels, substitute, targets
from lab.patience import until
from lab.processes.prometheus import ROOT, RULES, promtool
from lab.watched import RUN, SCRAPES, Watched, has_a_number, watched_job

OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
ALERT_TESTS = sorted((ROOT / "tests" / "alerts").glob("*.test.yaml"))
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
PANELS = [
    pytest.param(name, panel, id=f"{name}: {panel['title']}")
    for name in DASHBOARDS
    for panel in panels(name)
    if panel["type"] != "text"
]
VARIABLES = {
    "coordinator": "muster",
    "run": RUN,
    "prefix": ".*",
    "__rate_interval": "10s",
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched_job(tmp_path_factory.mktemp("watched"), steps=10, pace=0.3, interval=0.5) as watched:
        yield watched


# ---------------------------------------------------------------------- the dashboards


def test_the_committed_dashboards_are_those_that_the_program_makes():
    assert differing() == [], "run: python -m dev.dashboards"


@pytest.mark.parametrize(("name", "panel"), PANELS)
def test_every_expression_of_every_panel_returns_data(watched: Watched, name: str, panel: dict[str, Any]):
    now = time.time()
    for target in targets(panel):
        expr = substitute(target.expr, VARIABLES)
        if target.instant:
            watched.finds(expr)
        else:
            found = watched.prometheus.query_range(expr, watched.began, now, 1)
            assert has_a_number(found), f"{expr}: {found}"


@pytest.mark.parametrize(("name", "panel"), PANELS)
def test_every_panel_says_what_it_shows_and_in_which_unit(name: str, panel: dict[str, Any]):
    assert len(panel["description"]) > 20
    unit = panel["fieldConfig"]["defaults"].get("unit")
    assert unit or panel["type"] == "table"
    assert targets(panel)
    for target in targets(panel):
        ours = re.search(r'job=~"\$coordinator(-relay)?"', target.expr)
        assert ours, "it would mix the figures of several coordinators"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_panels_fill_the_grid_without_overlap(name: str):
    taken: set[tuple[int, int]] = set()
    for panel in board(name)["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    rows = {y for _, y in taken}
    assert taken == {(x, y) for x in range(24) for y in rows}
    assert rows == set(range(len(rows)))


def test_the_dashboards_lead_to_each_other():
    boards = {board(name)["uid"]: board(name) for name in DASHBOARDS}
    links = {uid: [link["url"] for link in one["links"]] for uid, one in boards.items()}
    assert links == {"muster-overview": ["/d/muster-run"], "muster-run": ["/d/muster-overview"]}
    (table,) = (panel for panel in panels("overview") if panel["type"] == "table")
    assert "/d/muster-run?" in str(table["fieldConfig"]["overrides"])


def test_the_table_of_runs_has_a_column_for_each_query():
    (table,) = (panel for panel in panels("overview") if panel["type"] == "table")
    join, organize = (one["options"] for one in table["transformations"])
    values = {f"Value #{target['refId']}" for target in table["targets"]}
    assert join["byField"] == "run"
    assert set(organize["renameByName"]) == values | {"run"}


# ---------------------------------------------------------------------- the alerts


def test_prometheus_evaluates_every_rule(watched: Watched):
    rules = watched.prometheus.rules()
    assert {rule["name"] for rule in rules} == {alert["alert"] for alert in ALERTS}
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}


def test_a_coordinator_that_was_restarted_fires_its_alert_and_no_other(watched: Watched):
    def firing() -> list[str]:
        return [rule["name"] for rule in watched.prometheus.rules() if rule["state"] == "firing"]

    assert set(firing()) <= {"MusterCoordinatorRestarted"}
    # It has nothing to go by for a moment when a scrape has failed.
    until(firing, "it does not fire", patience=SCRAPES)
    assert firing() == ["MusterCoordinatorRestarted"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_has_something_to_compare(watched: Watched, alert: dict[str, Any]):
    watched.finds(always(alert["expr"]))


def always(expr: str) -> str:
    """Return the expression with comparisons that keep every series, and presence in place of absence."""
    expr = re.sub(r"^absent\((.*)\)$", r"\1", expr.strip())
    expr = re.sub(r"\bunless\b", "and", expr)
    outside = re.split(r"(\{[^}]*\})", expr)
    return "".join(
        part if part.startswith("{") else re.sub(r"(==|!=|<=|>=|<|>)", r"\1 bool", part) for part in outside
    )


def test_promtool_finds_no_fault_with_the_rules():
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", ALERT_TESTS, ids=lambda path: path.name)
def test_the_alerts_fire_when_they_should(path: Path):
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_firing_and_not_firing():
    tried: dict[str, set[bool]] = {alert["alert"]: set() for alert in ALERTS}
    for path in ALERT_TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test["alert_rule_test"]:
                tried[case["alertname"]].add(bool(case["exp_alerts"]))
    assert {name: fired for name, fired in tried.items() if fired != {True, False}} == {}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_says_how_bad_it_is_and_leads_to_its_runbook(alert: dict[str, Any]):
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    page, anchor = notes["runbook"].split("#")
    assert page == "docs/operations.md"
    heading = re.search(rf"^### {anchor.replace('-', ' ')}\n\n`{alert['alert']}`", OPERATIONS, re.M | re.I)
    assert heading, f"docs/operations.md has no section {anchor} that begins with `{alert['alert']}`"


# ---------------------------------------------------------------------- the metrics


def test_promtool_finds_no_fault_with_the_metrics(watched: Watched):
    status, coordinators = watched.coordinator.get("/metrics")
    assert status == 200
    for text in (coordinators, watched.relay.get("/metrics")):
        done = promtool("check", "metrics", stdin=text)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_metric_has_data_and_is_documented(watched: Watched):
    text = watched.coordinator.get("/metrics")[1] + watched.relay.get("/metrics")
    families = {
        (name, kind)
        for name, kind in re.findall(r"^# TYPE ((?:muster|grpc)_\S+) (\S+)$", text, re.M)
        if not name.endswith("_created")
    }
    documented = set(re.findall(r"^\| `((?:muster|grpc)_\w+)` \| (\w+) \|", OPERATIONS, re.M))
    assert families == documented
    for name, kind in families:
        series = f"{name}_count" if kind == "histogram" else name
        watched.finds(series)
