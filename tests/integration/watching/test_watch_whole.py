"""A watcher with the flags and roles of the chart, an API server, a coordinator with tokens, and ranks."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator
from lab.processes.watcher import Watcher
from lab.watching import kubernetes_api
from lab.watching.kubernetes_api import Asked, KubernetesApi, answer_in, disruption, eviction, node, pod
from muster import worker
from muster.service.security.grants import Role
from muster.v1 import run_pb2, run_pb2_grpc
from muster.watcher.kubernetes.evictions import RESPONDER
from muster.worker import GrpcBarrier, WriteReport
from tests.support.deploy import rules
from tests.support.deploy.helm import Helm, Release, values_of
from tests.support.tokens import ANOTHER, SECRETS, bearing, tokens

RUN, ELSEWHERE = "a-train", "a-elsewhere"


@pytest.fixture
def release(helm: Helm) -> Release:
    return helm.release(values_of("watcher"))


@pytest.fixture
def api(release: Release) -> Iterator[KubernetesApi]:
    """A server that lets the watcher do what the chart's roles let it do."""

    def allows(asked: Asked) -> bool:
        account = ("ml", "muster-watcher")
        return rules.may(release.manifests, account, asked.verb, asked.group, asked.plural, asked.namespace)

    with kubernetes_api.running() as server:
        server.allows = allows
        server.put("nodes", node())
        server.put("jobs", {"metadata": {"name": "train", "namespace": "team-a", "uid": "j"}})
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "controller": True}
        labels = {"app": "train", "muster.io/run-id": RUN}
        server.put("pods", pod("train-0", metadata={"labels": labels, "ownerReferences": [owner]}))
        yield server


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    (tmp_path / "tokens.toml").write_text(tokens())
    with Coordinator(
        tmp_path, state="memory:", extra=(f"--tokens-file={tmp_path / 'tokens.toml'}",)
    ) as running:
        yield running
        worker.close()


@pytest.fixture
def watcher(tmp_path: Path, api: KubernetesApi, coordinator: Coordinator, release: Release) -> Watcher:
    config = tmp_path / "kubeconfig"
    config.write_text(yaml.safe_dump(kubernetes_api.kubeconfig(api.url)))
    (container,) = release.one("DaemonSet")["spec"]["template"]["spec"]["containers"]
    flags = [
        one
        for one in container["args"]
        if one.startswith(("--namespace", "--pod", "--cordon", "--ann", "--evic"))
    ]
    return Watcher(
        tmp_path,
        coordinator.endpoint,
        "node-1",
        "kubernetes",
        extra=(f"--kubeconfig={config}", *flags),
        environment={"MUSTER_TOKEN": SECRETS[Role.WATCHER]},
    )


def rank(
    coordinator: Coordinator, run_id: str, node_name: str, monkeypatch: pytest.MonkeyPatch
) -> GrpcBarrier:
    """A rank that has committed a checkpoint at step 9."""
    monkeypatch.setenv("MUSTER_TOKEN", SECRETS[Role.WORKER])
    monkeypatch.setenv("MUSTER_NODE_NAME", node_name)
    barrier = GrpcBarrier(0, 1, "save", coordinator.endpoint, 60, 60, run_id=run_id, generation=0)
    assert barrier.vote(report=WriteReport(step=9, commits=True)).released
    return barrier


def run_of(coordinator: Coordinator, run_id: str) -> run_pb2.Run:
    with grpc.insecure_channel(coordinator.endpoint) as channel:
        request = run_pb2.RunServiceGetRequest(run_id=run_id)
        stub = run_pb2_grpc.RunServiceStub(channel)
        return stub.Get(request, metadata=bearing(ANOTHER), timeout=PATIENCE).run


def test_runs_on_the_node_are_asked_once_and_jobs_are_annotated(
    api: KubernetesApi, coordinator: Coordinator, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
):
    ranks = [
        rank(coordinator, RUN, "node-1", monkeypatch),
        rank(coordinator, ELSEWHERE, "node-2", monkeypatch),
    ]
    assert len(ranks) == 2
    with watcher:
        api.wait_for(lambda: "annotations" in api.objects["jobs", "team-a", "train"]["metadata"])
        annotations = api.objects["jobs", "team-a", "train"]["metadata"]["annotations"]
        assert annotations["muster.io/committed-step"] == "9"
        api.edit("nodes", "node-1", spec={"unschedulable": True})
        until(lambda: run_of(coordinator, RUN).HasField("save"))
        save = run_of(coordinator, RUN).save
        assert (save.number, save.stop, save.by) == (1, True, "watcher@node-1")
        assert save.reason == "node node-1: it is cordoned"
        # A second notice for the same run is the same save.
        condition = {"conditions": [disruption("EvictionByEvictionAPI", "drained")]}
        api.edit("pods", "train-0", "team-a", status=condition)
        until(lambda: watcher.log.count("notice.answered") == 2)
        assert run_of(coordinator, RUN).save.number == 1
        assert not run_of(coordinator, ELSEWHERE).HasField("save")
        watcher.kill()
        watcher.start()
        until(lambda: watcher.metric('muster_watcher_requests_total{result="answered"}') == 2)
        assert run_of(coordinator, RUN).save.number == 1
    assert "Traceback" not in watcher.log


def test_eviction_is_answered_with_the_rights_that_the_chart_gives(
    api: KubernetesApi, coordinator: Coordinator, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
):
    training = rank(coordinator, RUN, "node-1", monkeypatch)
    assert training is not None
    api.put("evictions", eviction("train-0", RESPONDER))
    with watcher:
        api.wait_for(lambda: "heartbeatTime" in answer_in(api, "evict-train-0"), PATIENCE)
        assert answer_in(api, "evict-train-0")["message"] == f"run {RUN}: its ranks agree on a step"
        save = run_of(coordinator, RUN).save
        assert save.stop
        assert save.reason.startswith("pod team-a/train-0: its eviction is requested by example.org")
    assert "forbidden" not in watcher.log


def test_watcher_of_another_node_is_refused(
    tmp_path: Path, api: KubernetesApi, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
):
    there = rank(coordinator, ELSEWHERE, "node-2", monkeypatch)
    assert there is not None
    api.put("nodes", node("node-2", spec={"unschedulable": True}))
    config = tmp_path / "kubeconfig"
    config.write_text(yaml.safe_dump(kubernetes_api.kubeconfig(api.url)))
    liar = Watcher(
        tmp_path,
        coordinator.endpoint,
        "node-2",
        "kubernetes",
        extra=(f"--kubeconfig={config}",),
        environment={"MUSTER_TOKEN": SECRETS[Role.WATCHER]},
    )
    with liar:
        until(lambda: "notice.failed" in liar.log)
        assert liar.metric('muster_watcher_requests_total{result="refused"}') >= 1
    assert not run_of(coordinator, ELSEWHERE).HasField("save")
