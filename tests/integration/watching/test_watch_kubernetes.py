"""A watcher process between an API server and a coordinator, both on loopback."""

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from lab.patience import PATIENCE, until
from lab.processes.coordinator import free_port
from lab.processes.watcher import Watcher
from lab.watching import kubernetes_api
from lab.watching.kubernetes_api import Asked, KubernetesApi, answer_in, disruption, eviction, node, pod
from muster.v1 import run_pb2
from muster.watcher.kubernetes.evictions import RESPONDER
from muster.watcher.kubernetes.responder import FINAL_AFTER
from tests.support.watching import drains as coordinators
from tests.support.watching.drains import Drains

CORDON = "kubernetes/cordon/uid-of-node-1/"


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    with kubernetes_api.running() as server:
        server.put("nodes", node())
        server.put("nodes", node("node-2"))
        yield server


@pytest.fixture
def drains() -> Iterator[Drains]:
    with coordinators.listening() as listening:
        listening.runs = ["job1"]
        yield listening


Make = Callable[..., Watcher]


@pytest.fixture
def watcher(tmp_path: Path, api: KubernetesApi, drains: Drains) -> Iterator[Make]:
    """Make a watcher of node-1 that watches pods of namespace team-a, too."""
    config = tmp_path / "kubeconfig"
    config.write_text(yaml.safe_dump(kubernetes_api.kubeconfig(api.url, token="of-the-watcher")))
    made: list[Watcher] = []

    def make(*extra: str, endpoint: str = "", **environment: str) -> Watcher:
        one = Watcher(
            tmp_path,
            endpoint or drains.endpoint,
            "node-1",
            "kubernetes",
            extra=(f"--kubeconfig={config}", "--namespace=team-a", *extra),
            environment={**os.environ, **environment},
        )
        made.append(one)
        return one

    yield make
    for one in made:
        one.kill()


def test_cordon_is_heard_and_withdrawn(api: KubernetesApi, drains: Drains, watcher: Make):
    with watcher(MUSTER_TOKEN="of-the-node") as one:
        api.edit("nodes", "node-1", spec={"unschedulable": True})
        drains.wait_for(lambda: bool(drains.heard))
        (heard,) = drains.heard
        assert heard.token == "of-the-node"
        request = heard.request
        assert (request.node_name, request.notice_id) == ("node-1", CORDON)
        assert (request.stop, request.deadline_ms, request.by) == (False, 0, "watcher@node-1")
        until(lambda: "asked to save: job1 (save 1)" in one.log)
        assert one.metric('muster_watcher_notices_in_force{source="kubernetes"}') == 1
        assert one.metric('muster_watcher_requests_total{result="answered"}') == 1
        api.edit("nodes", "node-1", spec={"unschedulable": None})
        until(lambda: "notice.withdrawn" in one.log)
        until(lambda: one.metric('muster_watcher_notices_in_force{source="kubernetes"}') == 0)
        assert one.stop() == 0
    assert {one.token for one in api.asked} == {"of-the-watcher"}


def test_other_nodes_and_namespaces_are_not_read(api: KubernetesApi, drains: Drains, watcher: Make):
    condition = {"conditions": [disruption("EvictionByEvictionAPI")]}
    with watcher():
        api.wait_for(lambda: api.verbs("pods") == ["list", "watch"])
        api.edit("nodes", "node-2", spec={"unschedulable": True})
        api.put("pods", pod("elsewhere", "node-2", status=condition))
        api.put("pods", pod("theirs", namespace="team-b", status=condition))
        api.put("pods", pod("ours", status=condition))
        drains.wait_for(lambda: bool(drains.heard))
        assert drains.ids() == ["kubernetes/pod/uid-of-ours/2026-11-25T10:00:00Z"]
    asked = {(one.verb, one.plural, one.namespace, one.selector) for one in api.asked}
    assert asked == {
        (verb, plural, namespace, selector)
        for verb in ("list", "watch")
        for plural, namespace, selector in (
            ("nodes", "", "metadata.name=node-1"),
            ("pods", "team-a", "spec.nodeName=node-1"),
        )
    }


def test_deadline_is_sent_when_it_becomes_known(api: KubernetesApi, drains: Drains, watcher: Make):
    api.put("pods", pod("worker-0", status={"conditions": [disruption("PreemptionByScheduler")]}))
    with watcher():
        drains.wait_for(lambda: len(drains.heard) == 1)
        ends = datetime.now(UTC) + timedelta(seconds=120)
        metadata = {"deletionTimestamp": ends.isoformat(timespec="seconds")}
        api.edit("pods", "worker-0", "team-a", metadata=metadata)
        drains.wait_for(lambda: len(drains.heard) == 2)
    first, second = (one.request for one in drains.heard)
    assert first.notice_id == second.notice_id
    assert first.deadline_ms == 0
    assert 60_000 < second.deadline_ms <= 120_000
    assert second.stop


def test_restarted_watcher_names_the_same_notices(api: KubernetesApi, drains: Drains, watcher: Make):
    api.edit("nodes", "node-1", spec={"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]})
    api.put("pods", pod("worker-0", status={"conditions": [disruption("EvictionByEvictionAPI")]}))
    one = watcher()
    with one:
        drains.wait_for(lambda: len(drains.heard) >= 2)
    before = len(drains.heard)
    with one:
        drains.wait_for(lambda: len(drains.heard) >= before + 2)
    assert len(drains.ids()) == 2


def test_notices_survive_a_server_that_forgets_and_breaks_off(
    api: KubernetesApi, drains: Drains, watcher: Make
):
    with watcher() as one:
        api.wait_for(lambda: api.verbs("nodes") == ["list", "watch"])
        api.break_off()
        api.wait_for(lambda: api.verbs("nodes") == ["list", "watch", "watch"])
        api.forget()
        api.wait_for(lambda: api.verbs("nodes")[3:] == ["list", "watch"])
        api.edit("nodes", "node-1", spec={"unschedulable": True})
        drains.wait_for(lambda: bool(drains.heard))
        until(lambda: "answers again" in one.log)
        assert one.runs


def test_bookmark_shows_that_the_source_works(api: KubernetesApi, watcher: Make):
    name = 'muster_watcher_source_seen_timestamp_seconds{source="kubernetes"}'
    with watcher() as one:
        before = one.metric(name)
        assert before > 1_700_000_000
        api.wait_for(lambda: "watch" in api.verbs("nodes"))
        api.bookmark()
        until(lambda: one.metric(name) > before)


def test_coordinator_that_comes_later_hears_the_notice(tmp_path: Path, api: KubernetesApi, watcher: Make):
    address = f"127.0.0.1:{free_port()}"
    api.edit("nodes", "node-1", spec={"unschedulable": True})
    with watcher(endpoint=address) as one:
        until(lambda: "notice.failed" in one.log)
        with coordinators.listening(address) as late:
            late.wait_for(lambda: bool(late.heard), seconds=60.0)
            assert late.ids() == [CORDON]


def test_refusal_is_logged_and_repeated(api: KubernetesApi, drains: Drains, watcher: Make):
    drains.refusal = "NODE_NOT_ALLOWED"
    api.edit("nodes", "node-1", spec={"unschedulable": True})
    with watcher() as one:
        drains.wait_for(lambda: len(drains.heard) >= 2)
        until(lambda: "it may not do that" in one.log)
        assert one.log.count("notice.failed") == 1
        assert one.metric('muster_watcher_requests_total{result="refused"}') >= 1
        drains.refusal = ""
        until(lambda: "notice.answered" in one.log)


def test_kubernetes_evicts_a_pod_after_the_save(api: KubernetesApi, drains: Drains, watcher: Make):
    api.put("pods", pod("train-0", metadata={"labels": {"muster.io/run-id": "job1"}}))
    with watcher("--evictions") as one:
        api.put("evictions", eviction("train-0", RESPONDER))
        api.put("evictions", eviction("elsewhere", RESPONDER))
        api.wait_for(lambda: "heartbeatTime" in answer_in(api, "evict-train-0"))
        (heard,) = {one.request.notice_id: one.request for one in drains.heard}.values()
        assert (heard.run_id, heard.stop) == ("job1", True)
        drains.state = run_pb2.SAVE_STATE_DONE
        api.wait_for(lambda: "completionTime" in answer_in(api, "evict-train-0"), FINAL_AFTER + PATIENCE)
        assert answer_in(api, "evict-train-0")["message"] == "run job1: its ranks saved at step 0"
        until(lambda: "notice.withdrawn" in one.log)
        assert answer_in(api, "evict-elsewhere") == {"name": RESPONDER}


def test_cluster_without_the_api_of_evictions_has_the_other_notices(
    api: KubernetesApi, drains: Drains, watcher: Make
):
    api.unserved.add("evictions")
    with watcher("--evictions") as one:
        until(lambda: "could not find the requested resource" in one.log)
        api.edit("nodes", "node-1", spec={"unschedulable": True})
        drains.wait_for(lambda: drains.ids() == [CORDON])


@pytest.mark.parametrize("plural", ["nodes", "pods", "evictions"])
def test_missing_permission_ends_it_with_a_sentence(api: KubernetesApi, watcher: Make, plural: str):
    def allows(asked: Asked) -> bool:
        return asked.plural != plural

    api.allows = allows
    one = watcher("--evictions")
    one.launch()
    assert one.ended() == 1
    assert f"{plural} is forbidden" in one.log
    assert "the verbs list and watch" in one.log
    assert "Traceback" not in one.log


def test_unknown_node_ends_it_with_a_sentence(api: KubernetesApi, watcher: Make):
    api.delete("nodes", "node-1")
    one = watcher()
    one.launch()
    assert one.ended() == 1
    assert "there is no node node-1 in this cluster" in one.log


def test_node_that_goes_is_a_notice_until_it_is_back(api: KubernetesApi, drains: Drains, watcher: Make):
    with watcher() as one:
        api.delete("nodes", "node-1")
        drains.wait_for(lambda: drains.ids() == ["kubernetes/deleted/uid-of-node-1"])
        api.put("nodes", node())
        until(lambda: "notice.withdrawn" in one.log)


def test_wrong_kubeconfig_ends_it_with_a_sentence(tmp_path: Path, watcher: Make):
    one = watcher(f"--kubeconfig={tmp_path / 'none'}")
    one.launch()
    assert one.ended() == 1
    assert "does not lead to an API server" in one.log
    assert "Traceback" not in one.log
