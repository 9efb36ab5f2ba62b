"""A job under torchrun of which Kubernetes takes a node or a pod away."""

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from lab.drain import reported_steps
from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator
from lab.processes.watcher import Watcher
from lab.watching import kubernetes_api
from lab.watching.kubernetes_api import KubernetesApi, answer_in, disruption, eviction, node, pod
from muster.watcher.kubernetes.evictions import RESPONDER
from tests.integration.watching.test_watch_torchrun import NODES, RANKS, SECONDS, STOPPED, job

NODE = NODES[-1]


def remove_node(api: KubernetesApi) -> None:
    """Karpenter does it."""
    api.edit("nodes", NODE, spec={"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]})


def preempt_pod(api: KubernetesApi) -> None:
    """The scheduler does it."""
    ends = datetime.now(UTC) + timedelta(seconds=SECONDS)
    deleted = {"deletionTimestamp": ends.strftime("%Y-%m-%dT%H:%M:%SZ")}
    condition = {"conditions": [disruption("PreemptionByScheduler", "preempted")]}
    api.edit("pods", "train-1", "team-a", metadata=deleted, status=condition)


def leave_for_good(api: KubernetesApi) -> None:
    """A taint ends the pod in a while."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    taint = {"key": "example.org/maintenance", "effect": "NoExecute", "timeAdded": now}
    api.edit("nodes", NODE, spec={"taints": [taint]})


def request_eviction(api: KubernetesApi) -> None:
    """Its requester and its controller do it."""
    api.put("evictions", eviction("train-1", RESPONDER))


@pytest.mark.parametrize(
    ("take", "has_deadline"),
    [(remove_node, False), (preempt_pod, True), (leave_for_good, True), (request_eviction, False)],
)
def test_job_saves_at_one_step_and_stops_before_it_must(
    take: Callable[[KubernetesApi], None], has_deadline: bool, tmp_path: Path
):
    config = tmp_path / "kubeconfig"
    toleration = {"operator": "Exists", "tolerationSeconds": SECONDS}
    with kubernetes_api.running() as api, Coordinator(tmp_path, state="memory:") as coordinator:
        config.write_text(yaml.safe_dump(kubernetes_api.kubeconfig(api.url)))
        api.put("nodes", node(NODE))
        api.put("pods", pod("train-1", NODE, spec={"tolerations": [toleration]}))
        flags = (f"--kubeconfig={config}", "--namespace=team-a", "--evictions")
        watcher = Watcher(
            tmp_path, coordinator.endpoint, NODE, "kubernetes", extra=flags, environment=dict(os.environ)
        )
        with watcher, job(coordinator.endpoint, tmp_path) as agents:
            said = (tmp_path / "agents.log").read_text
            until(lambda: len(reported_steps(tmp_path, RANKS, "began")) == RANKS, said)
            take(api)
            assert [agent.wait(PATIENCE) for agent in agents] == [STOPPED] * len(NODES), said()
            assert len(coordinator.log("save.asked")) == len(coordinator.log("save.done")) == 1
            assert coordinator.log("save.late") == []
            if take is request_eviction:
                api.wait_for(lambda: "heartbeatTime" in answer_in(api, "evict-train-1"))
    saved = reported_steps(tmp_path, RANKS, "saved")
    assert len(saved) == RANKS
    assert len(set(saved)) == 1
    left = reported_steps(tmp_path, RANKS, "left")
    if has_deadline:
        assert len(left) == RANKS
        assert 0 < min(left) <= max(left) <= SECONDS * 1000
