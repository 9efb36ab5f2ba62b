"""Which run a pod trains."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.watcher.kubernetes.run_ids import run_id_of

EXAMPLES = Path(__file__).resolve().parents[3] / "deploy/examples"


def pod(*args: str, env: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    variables = [
        {"name": name, **(value if isinstance(value, dict) else {"value": value})}
        for name, value in (env or {}).items()
    ]
    container = {"name": "train", "command": ["torchrun"], "args": list(args), "env": variables}
    return {"metadata": {"name": "worker-0", "uid": "u", **metadata}, "spec": {"containers": [container]}}


def field(path: str) -> dict[str, Any]:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


JOB = "metadata.labels['batch.kubernetes.io/controller-uid']"


@pytest.mark.parametrize(
    ("one", "run_id"),
    [
        pytest.param(pod("--rdzv-id=job1", "train.py"), "job1", id="one word"),
        pytest.param(pod("--rdzv_id", "job1", "train.py"), "job1", id="two words"),
        pytest.param(pod("train.py", env={"MUSTER_RUN_ID": "job1"}), "job1", id="our variable"),
        pytest.param(pod("train.py", env={"PET_RDZV_ID": "job1"}), "job1", id="torchrun's variable"),
        pytest.param(pod("--rdzv-id=a", env={"MUSTER_RUN_ID": "b"}), "a", id="option and variable"),
        pytest.param(pod("--rdzv-id=$(ID)-x", env={"ID": "job1"}), "job1-x", id="a reference"),
        pytest.param(pod("--rdzv-id=$(B)", env={"A": "1", "B": "$(A)2"}), "12", id="a reference to another"),
        pytest.param(pod("--rdzv-id=$$(ID)", env={"ID": "job1"}), "$(ID)", id="an escaped one"),
        pytest.param(pod("--rdzv-id=t.$(ID)", env={"ID": field("metadata.name")}), "t.worker-0", id="a name"),
        pytest.param(
            pod(
                "--rdzv-id=$(ID)",
                env={"ID": field(JOB)},
                labels={"batch.kubernetes.io/controller-uid": "c"},
            ),
            "c",
            id="a label's value",
        ),
        pytest.param(pod("--rdzv-id=job1", labels={"muster.io/run-id": "x"}), "x", id="our label"),
        pytest.param(pod(annotations={"muster.io/run-id": "x"}), "x", id="our annotation"),
        pytest.param(pod("train.py"), "", id="nothing"),
        pytest.param(pod("--rdzv-id=$(ID)"), "", id="an unknown reference"),
        pytest.param(pod("--rdzv-id=$(ID)", env={"ID": field(JOB)}), "", id="a label that is not there"),
        pytest.param(pod("--rdzv-id=$(ID)", env={"ID": field("status.podIP")}), "", id="another field"),
        pytest.param(pod("--rdzv-id"), "", id="an option without its value"),
        pytest.param({"metadata": {"name": "a", "uid": "u"}}, "", id="no containers"),
    ],
)
def test_run_is_what_the_manifest_says(one: dict[str, Any], run_id: str):
    assert run_id_of(one) == run_id


LABELS = {
    "batch.kubernetes.io/controller-uid": "uid-1",
    "training.kubeflow.org/job-name": "train",
}
ANNOTATIONS = {"jobset.sigs.k8s.io/jobset-name": "train"}


def _templates(found: Any) -> list[dict[str, Any]]:
    """The pod specs in a manifest."""
    if isinstance(found, dict):
        own = [found] if "containers" in found else []
        return own + [one for value in found.values() for one in _templates(value)]
    return [one for value in found for one in _templates(value)] if isinstance(found, list) else []


@pytest.mark.parametrize(
    ("name", "run_id"),
    [
        ("job.yaml", "uid-1"),
        ("jobset.yaml", "team-a.train-uid-1"),
        ("pytorchjob.yaml", "train"),
        ("service-account.yaml", "team-a.uid-1"),
        ("training-runtime.yaml", "uid-1"),
    ],
)
def test_run_of_each_example_is_known(name: str, run_id: str):
    documents = list(yaml.safe_load_all((EXAMPLES / name).read_text()))
    found = {
        run_id_of({"metadata": {"name": "a", "labels": LABELS, "annotations": ANNOTATIONS}, "spec": spec})
        for spec in _templates(documents)
    }
    assert found == {run_id}
