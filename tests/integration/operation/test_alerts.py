"""The alerts as the chart renders them, for several releases that one Prometheus watches."""

import json
from pathlib import Path

import pytest
import yaml

from lab.processes.prometheus import RULES, promtool
from muster.service.telemetry.metrics import COMMIT_BUCKETS
from tests.support.deploy.helm import Helm, Release, values_of

ABSENT = "MusterCoordinatorAbsent"
WATCHED = values_of("monitoring")


def job_of(release: Release) -> str:
    """The job label that the Prometheus operator gives the release's metrics."""
    (endpoint,) = release.one("ServiceMonitor")["spec"]["endpoints"]
    (job,) = (one["replacement"] for one in endpoint["relabelings"] if one["targetLabel"] == "job")
    return str(job)


def absent_rule(release: Release) -> str:
    groups = release.one("PrometheusRule")["spec"]["groups"]
    (expr,) = (rule["expr"] for group in groups for rule in group["rules"] if rule["alert"] == ABSENT)
    return str(expr)


@pytest.mark.parametrize(
    ("gone", "stays"),
    [(("team-a", "ml"), ("team-b", "ml")), (("muster", "ml"), ("muster", "vision"))],
    ids=["two names", "two namespaces"],
)
def test_the_loss_of_one_release_is_noticed_while_another_is_up(
    helm: Helm, tmp_path: Path, gone: tuple[str, str], stays: tuple[str, str]
):
    series, files = [], []
    for number, ((name, namespace), values) in enumerate([(gone, "1x9 stale"), (stays, "1x40")]):
        release = helm.release(WATCHED, name=name, namespace=namespace)
        labels = f'namespace="{namespace}", job="{job_of(release)}", instance="10.0.0.{number}:7551"'
        series.append({"series": f"muster_build_info{{{labels}}}", "values": values})
        files.append(f"{number}.rules.yaml")
        (tmp_path / files[-1]).write_text(json.dumps(release.one("PrometheusRule")["spec"]))
    missed = job_of(helm.release(WATCHED, name=gone[0], namespace=gone[1]))
    alert = {
        "exp_labels": {"severity": "critical", "namespace": gone[1], "job": missed},
        "exp_annotations": {
            "summary": f"Prometheus sees no Muster {missed}.",
            "description": f"No coordinator of {missed} has been scraped for 5 minutes. It is gone, or "
            "Prometheus does not look for it.",
            "runbook": "docs/operations.md#coordinator-absent",
        },
    }
    cases = [("9m", []), ("16m", [alert])]
    test = {
        "rule_files": files,
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "alert_rule_test": [
                    {"alertname": ABSENT, "eval_time": at, "exp_alerts": alerts} for at, alerts in cases
                ],
            }
        ],
    }
    # JSON is YAML.
    (tmp_path / "releases.test.yaml").write_text(json.dumps(test))
    done = promtool("test", "rules", str(tmp_path / "releases.test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_service_monitor_any_coordinator_will_do(helm: Helm):
    # Who scrapes in another way gives other labels.
    assert absent_rule(helm.release({"prometheusRule": {"enabled": True}})) == "absent(muster_build_info)"


def test_the_threshold_for_slow_storage_is_a_bucket():
    # Between two buckets a quantile is guessed: with none at the threshold, less would fire, too.
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    (expr,) = (rule["expr"] for rule in rules if rule["alert"] == "MusterStorageSlow")
    assert float(expr.rpartition(">")[2]) in COMMIT_BUCKETS
