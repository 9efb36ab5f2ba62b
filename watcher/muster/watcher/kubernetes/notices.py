"""Derives notices from a node and its pods. It does no I/O."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from muster.watcher.kubernetes.objects import Node, Pod, Taint
from muster.watcher.notice import Notice

Cordon: TypeAlias = Literal["save", "stop", "ignore"]

CORDONED = "node.kubernetes.io/unschedulable"
"""Kubernetes adds this taint to a node that is cordoned."""
LEAVING = {
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler removes the node",
    "karpenter.sh/disrupted": "Karpenter removes the node",
    "node.kubernetes.io/out-of-service": "the node is out of service",
    "cloud.google.com/impending-node-termination": "GKE ends the node",
    "aws-node-termination-handler/spot-itn": "AWS interrupts the spot instance",
    "aws-node-termination-handler/scheduled-maintenance": "AWS maintains the instance",
    "aws-node-termination-handler/asg-lifecycle-termination": "AWS ends the instance",
}
"""Taints of a node that is about to be lost, and what they mean."""
PASSING = frozenset(
    {
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
        "node.kubernetes.io/memory-pressure",
        "node.kubernetes.io/disk-pressure",
        "node.kubernetes.io/pid-pressure",
        "node.kubernetes.io/network-unavailable",
        "node.cloudprovider.kubernetes.io/uninitialized",
        CORDONED,
    }
)
"""Taints that Kubernetes sets for a condition that may pass: the node may be back before a save is complete.
If the pods must go, their own condition says so."""
MAX_TEXT = 300
"""Characters of a condition's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What counts as a notice."""

    cordon: Cordon = "save"
    taints: Collection[str] = ()
    """Keys of further taints that say that a node is about to be lost."""


def notices_of(nodes: Iterable[Node], pods: Iterable[Pod], policy: Policy) -> list[Notice]:
    """Return the notices in force.

    Args:
        nodes: this node, or nothing.
        pods: the pods on it that may have ranks.
        policy: what counts.
    """
    living = [pod for pod in pods if not pod.has_ended and not pod.is_of_node]
    notices = [notice for node in nodes for notice in _of_node(node, living, policy)]
    return [*notices, *(notice for pod in living if (notice := _of_pod(pod)))]


def deletion(node: Node) -> Notice:
    """Return the notice that a node is being deleted, or was."""
    return Notice(id=f"kubernetes/deleted/{node.uid}", reason=f"node {node.name}: it is deleted")


def _of_node(node: Node, pods: Collection[Pod], policy: Policy) -> Iterable[Notice]:
    if node.deleted:
        yield deletion(node)
    cordoned_at = next((one.added for one in node.taints if one.key == CORDONED), "")
    if node.unschedulable and policy.cordon != "ignore":
        yield Notice(
            id=f"kubernetes/cordon/{node.uid}/{node.cordoned_at or cordoned_at}",
            reason=f"node {node.name}: it is cordoned",
            stop=policy.cordon == "stop",
        )
    for taint in node.taints:
        when = taint.added or taint.value or node.tainted_at
        notice_id = f"kubernetes/taint/{node.uid}/{taint.key}/{when}"
        if words := LEAVING.get(taint.key) or (taint.key in policy.taints and f"it has taint {taint.key}"):
            yield Notice(id=notice_id, reason=f"node {node.name}: {words}")
        elif taint.effect == "NoExecute" and taint.key not in PASSING:
            added = _seconds(taint.added)
            for run_id, seconds in _leaving(taint, pods).items():
                yield Notice(
                    id=f"{notice_id}/{run_id}" if run_id else notice_id,
                    reason=f"node {node.name}: taint {taint.key} ends pods on it",
                    deadline=None if added is None else added + seconds,
                    run_id=run_id,
                )


def _leaving(taint: Taint, pods: Iterable[Pod]) -> dict[str, int]:
    """Return after how many seconds a taint ends the first pod of each run; the key "" is of unknown runs."""
    found: dict[str, int] = {}
    for pod in pods:
        seconds = _tolerated(taint, pod)
        if seconds is not None:
            found[pod.run_id] = min(seconds, found.get(pod.run_id, seconds))
    return found


def _tolerated(taint: Taint, pod: Pod) -> int | None:
    """Return for how many seconds a pod tolerates a taint; None: for ever."""
    least: int | None = None
    tolerated = False
    for one in pod.tolerations:
        if one.effect not in ("", taint.effect) or one.key not in ("", taint.key):
            continue
        if one.exists or (one.key and one.value == taint.value):
            tolerated = True
            if one.seconds is not None:
                least = one.seconds if least is None else min(least, one.seconds)
    if not tolerated:
        return 0
    return None if least is None else max(least, 0)


def _of_pod(pod: Pod) -> Notice | None:
    if pod.disruption is None:
        return None
    reason, message, at = pod.disruption
    text = " ".join(message.split())[:MAX_TEXT]
    return Notice(
        id=f"kubernetes/pod/{pod.uid}/{at}",
        reason=f"pod {pod.namespace}/{pod.name}: {reason}{f': {text}' if text else ''}",
        deadline=_seconds(pod.deleted),
        run_id=pod.run_id,
    )


def _seconds(time: str) -> float | None:
    """Return a time in seconds since 1970, or None if it is missing or malformed."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return None
