"""Which notices the objects of Kubernetes are."""

from datetime import datetime
from typing import Any

import pytest

from lab.watching.kubernetes_api import disruption, node, pod
from muster.watcher.kubernetes.notices import PASSING, Policy, notices_of
from muster.watcher.kubernetes.objects import read_node, read_pod
from muster.watcher.notice import Notice

AT, LATER = "2026-11-25T10:00:00Z", "2026-11-25T10:02:00Z"


def seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def found(
    the_node: dict[str, Any] | None, *pods: dict[str, Any], policy: Policy | None = None
) -> list[Notice]:
    nodes = [read_node(the_node)] if the_node else []
    return notices_of(nodes, [read_pod(one) for one in pods], policy or Policy())


def tainted(key: str, effect: str = "NoSchedule", **more: str) -> dict[str, Any]:
    return node(spec={"taints": [{"key": key, "effect": effect, **more}]})


def tolerating(**toleration: Any) -> dict[str, Any]:
    return pod("worker-0", spec={"tolerations": [toleration]})


def test_healthy_node_has_no_notices():
    assert found(node(), pod("worker-0")) == []
    assert found(None) == []


# Cordons


def test_cordoned_node_asks_for_a_save_by_default():
    (notice,) = found(node(spec={"unschedulable": True}))
    assert (notice.stop, notice.deadline) == (False, None)
    assert notice.reason == "node node-1: it is cordoned"


@pytest.mark.parametrize(("cordon", "stops"), [("save", [False]), ("stop", [True]), ("ignore", [])])
def test_action_for_a_cordon_is_configurable(cordon: Any, stops: list[bool]):
    notices = found(node(spec={"unschedulable": True}), policy=Policy(cordon=cordon))
    assert [notice.stop for notice in notices] == stops


def test_second_cordon_is_another_notice():
    def cordoned(time: str) -> Notice:
        cordoned = node(spec={"unschedulable": True})
        fields: dict[str, Any] = {"f:spec": {"f:unschedulable": {}}}
        labels = {"time": "2026-11-25T11:00:00Z", "fieldsV1": {"f:metadata": {"f:labels": {}}}}
        cordoned["metadata"]["managedFields"] = [{"time": time, "fieldsV1": fields}, labels]
        (notice,) = found(cordoned)
        return notice

    assert cordoned(AT) == cordoned(AT)
    assert cordoned(AT).id == f"kubernetes/cordon/uid-of-node-1/{AT}"
    assert cordoned(AT).id != cordoned(LATER).id


def test_taint_of_a_cordon_is_no_notice_of_its_own():
    taints = [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule", "timeAdded": AT}]
    (notice,) = found(node(spec={"unschedulable": True, "taints": taints}), pod("worker-0"))
    assert notice.id == f"kubernetes/cordon/uid-of-node-1/{AT}"


# Taints


@pytest.mark.parametrize(
    ("key", "more", "detail"),
    [
        ("ToBeDeletedByClusterAutoscaler", {"value": "1764064800"}, "1764064800"),
        ("karpenter.sh/disrupted", {}, ""),
        ("cloud.google.com/impending-node-termination", {}, ""),
        ("aws-node-termination-handler/spot-itn", {"value": "1764064800"}, "1764064800"),
        ("node.kubernetes.io/out-of-service", {"value": "nodeshutdown", "timeAdded": AT}, AT),
    ],
)
def test_node_that_is_removed_stops_its_runs(key: str, more: dict[str, str], detail: str):
    (notice,) = found(tainted(key, **more))
    assert notice.stop
    assert notice.id == f"kubernetes/taint/uid-of-node-1/{key}/{detail}"


def test_candidate_for_removal_is_not_removed_yet():
    assert found(tainted("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule")) == []


def test_taint_without_a_time_has_that_of_the_last_change_of_taints():
    disrupted = tainted("karpenter.sh/disrupted")
    disrupted["metadata"]["managedFields"] = [{"time": AT, "fieldsV1": {"f:spec": {"f:taints": {}}}}]
    (notice,) = found(disrupted)
    assert notice.id == f"kubernetes/taint/uid-of-node-1/karpenter.sh/disrupted/{AT}"


def test_further_taints_can_be_named():
    theirs = tainted("example.org/leaving")
    assert found(theirs) == []
    (notice,) = found(theirs, policy=Policy(taints=["example.org/leaving"]))
    assert notice.reason == "node node-1: it has taint example.org/leaving"


def test_deleted_node_stops_its_runs():
    deleted = node()
    deleted["metadata"]["deletionTimestamp"] = AT
    (notice,) = found(deleted)
    assert notice.stop
    assert notice.id == "kubernetes/deleted/uid-of-node-1"


@pytest.mark.parametrize("key", sorted(PASSING))
@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
def test_condition_that_may_pass_is_no_notice(key: str, effect: str):
    assert found(tainted(key, effect, timeAdded=AT), pod("worker-0")) == []


@pytest.mark.parametrize(
    ("toleration", "deadline"),
    [
        pytest.param({"key": "gpu", "operator": "Exists"}, None, id="for ever"),
        pytest.param({"operator": "Exists"}, None, id="everything"),
        pytest.param({"key": "gpu", "value": "yes"}, None, id="this value"),
        pytest.param({"key": "gpu", "value": "no"}, 0, id="another value"),
        pytest.param({"key": "other", "operator": "Exists"}, 0, id="another taint"),
        pytest.param({"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}, 0, id="another effect"),
        pytest.param({"key": "gpu", "operator": "Exists", "tolerationSeconds": 120}, 120, id="for a time"),
        pytest.param({"key": "gpu", "operator": "Exists", "tolerationSeconds": -1}, 0, id="for no time"),
    ],
)
def test_taint_that_ends_pods_is_a_notice_unless_they_tolerate_it(
    toleration: dict[str, Any], deadline: int | None
):
    gpu = tainted("gpu", "NoExecute", value="yes", timeAdded=AT)
    notices = found(gpu, tolerating(**toleration))
    if deadline is None:
        assert notices == []
    else:
        (notice,) = notices
        assert notice.stop
        assert notice.deadline == seconds(AT) + deadline


def test_taint_that_ends_pods_has_the_deadline_of_the_first():
    def worker(name: str, seconds: int) -> dict[str, Any]:
        toleration = {"key": "gpu", "operator": "Exists", "tolerationSeconds": seconds}
        return pod(name, spec={"tolerations": [toleration]})

    pods = [
        worker("a", 300),
        worker("b", 60),
        tolerating(operator="Exists") | {"metadata": {"name": "c", "uid": "c"}},
    ]
    (notice,) = found(tainted("gpu", "NoExecute", timeAdded=AT), *pods)
    assert notice.deadline == seconds(AT) + 60


def test_taint_that_ends_pods_is_a_notice_for_each_of_their_runs():
    def worker(name: str, run_id: str, seconds: int | None) -> dict[str, Any]:
        toleration = {"key": "gpu", "operator": "Exists", "tolerationSeconds": seconds}
        labels = {"muster.io/run-id": run_id}
        return pod(name, metadata={"labels": labels}, spec={"tolerations": [toleration]})

    pods = [
        worker("a", "job1", 300),
        worker("b", "job1", 60),
        worker("c", "job2", 90),
        worker("d", "job3", None),
    ]
    notices = found(tainted("gpu", "NoExecute", timeAdded=AT), *pods)
    assert {one.run_id: one.deadline for one in notices} == {
        "job1": seconds(AT) + 60,
        "job2": seconds(AT) + 90,
    }
    assert len({one.id for one in notices}) == 2


def test_taint_that_ends_pods_is_no_notice_where_no_pods_are_known():
    """A node that is set apart by such a taint would stop each run as soon as it comes."""
    assert found(tainted("dedicated", "NoExecute", timeAdded=AT)) == []


# Pods


@pytest.mark.parametrize(
    "reason",
    ["PreemptionByScheduler", "DeletionByTaintManager", "EvictionByEvictionAPI", "TerminationByKubelet"],
)
def test_pod_that_is_disrupted_is_a_notice(reason: str):
    condition = disruption(reason, "preempted by a pod\nof higher priority", AT)
    (notice,) = found(node(), pod("worker-0", status={"conditions": [condition]}))
    assert notice.stop
    assert notice.id == f"kubernetes/pod/uid-of-worker-0/{AT}"
    assert notice.reason == f"pod team-a/worker-0: {reason}: preempted by a pod of higher priority"
    assert notice.deadline is None


def test_pod_that_is_disrupted_and_deleted_has_a_deadline():
    metadata = {"deletionTimestamp": LATER, "deletionGracePeriodSeconds": 120}
    disrupted = pod(
        "worker-0", metadata=metadata, status={"conditions": [disruption("PreemptionByScheduler")]}
    )
    (notice,) = found(node(), disrupted)
    assert notice.deadline == seconds(LATER)


def test_pod_that_is_disrupted_is_a_notice_for_its_own_run():
    """The other pods on the node stay."""
    labels = {"muster.io/run-id": "job1"}
    disrupted = pod(
        "worker-0", metadata={"labels": labels}, status={"conditions": [disruption("TerminationByKubelet")]}
    )
    other = pod("worker-1", metadata={"labels": {"muster.io/run-id": "job2"}})
    (notice,) = found(node(), disrupted, other)
    assert notice.run_id == "job1"


def test_pod_that_somebody_deletes_is_no_notice():
    """Its processes have a signal, and the node stays."""
    assert found(node(), pod("worker-0", metadata={"deletionTimestamp": LATER})) == []


def test_condition_that_is_not_true_is_no_notice():
    condition = disruption("PreemptionByScheduler") | {"status": "False"}
    assert found(node(), pod("worker-0", status={"conditions": [condition]})) == []


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_pod_that_has_ended_is_no_notice(phase: str):
    """It may stay for days, and the runs that come to the node later are others."""
    status = {"phase": phase, "conditions": [disruption("TerminationByKubelet")]}
    assert found(node(), pod("worker-0", status=status)) == []


@pytest.mark.parametrize("kind", ["DaemonSet", "Node"])
def test_pod_of_the_node_itself_is_no_notice(kind: str):
    owner = {"apiVersion": "apps/v1", "kind": kind, "name": "agent", "controller": True}
    agent = pod(
        "agent",
        metadata={"ownerReferences": [owner]},
        status={"conditions": [disruption("EvictionByEvictionAPI")]},
    )
    assert found(node(), agent) == []


def test_long_message_is_cut():
    condition = disruption("PreemptionByScheduler", "word " * 1000)
    (notice,) = found(node(), pod("worker-0", status={"conditions": [condition]}))
    assert len(notice.reason) < 400


def test_time_of_another_form_is_no_deadline():
    taint = tainted("team/maintenance", "NoExecute", timeAdded="yesterday")
    (notice,) = found(taint, pod("worker-0"))
    assert (notice.stop, notice.deadline) == (True, None)
