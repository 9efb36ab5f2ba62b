"""Evictions by Kubernetes' EvictionRequest API (KEP-4563) that wait for Muster, and the answers to them.

It does no I/O.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from muster.v1 import run_pb2 as pb
from muster.watcher.kubernetes.api import Manifest
from muster.watcher.kubernetes.objects import Pod
from muster.watcher.notice import Notice

API_VERSION = "lifecycle.k8s.io/v1alpha1"
"""Kubernetes 1.37, with the feature gate ``EvictionRequestAPI``."""
RESPONDER = "muster.io/saver"
"""The name by which a pod lists Muster in ``spec.evictionResponders``."""
MAX_MESSAGE = 4000
"""Characters that Kubernetes accepts as a message."""
WORDS = {
    pb.SAVE_STATE_ASKED: "its ranks agree on a step",
    pb.SAVE_STATE_AGREED: "its ranks save at step {step}",
    pb.SAVE_STATE_DONE: "its ranks saved at step {step}",
    pb.SAVE_STATE_WITHDRAWN: "the save was withdrawn",
    pb.SAVE_STATE_LAPSED: "its ranks were started again before all had saved",
}
"""How far a save has come, for people."""


@dataclass(frozen=True, slots=True)
class KubernetesEviction:
    """The fields of an ``Eviction`` that the watcher uses."""

    uid: str
    namespace: str
    name: str
    pod_uid: str
    """The pod that is to be evicted."""
    requesters: tuple[str, ...]
    is_active: bool
    """Whether it waits for Muster."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the runs of a pod have come."""

    message: str
    is_final: bool
    """Whether no save is pending, so that Kubernetes may evict the pod."""


def read_eviction(eviction: Manifest) -> KubernetesEviction:
    """Take from an ``Eviction`` the fields that the watcher uses."""
    metadata, status = eviction["metadata"], eviction.get("status") or {}
    states = {one["name"]: one.get("state") for one in status.get("targetResponders") or ()}
    completed = {one["name"] for one in status.get("responders") or () if one.get("completionTime")}
    return KubernetesEviction(
        uid=metadata["uid"],
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        pod_uid=((eviction["spec"].get("target") or {}).get("pod") or {}).get("uid", ""),
        requesters=tuple(
            one["name"] for one in status.get("requesters") or () if one.get("intent") == "Eviction"
        ),
        is_active=states.get(RESPONDER) == "Active" and RESPONDER not in completed,
    )


def active(
    evictions: Iterable[KubernetesEviction], pods: Iterable[Pod]
) -> Iterator[tuple[KubernetesEviction, Notice]]:
    """Yield the evictions of running pods that wait for Muster, each with its notice."""
    by_uid = {pod.uid: pod for pod in pods if not pod.has_ended}
    for eviction in evictions:
        pod = by_uid.get(eviction.pod_uid)
        if pod is not None and eviction.is_active:
            yield eviction, _notice(eviction, pod)


def _notice(eviction: KubernetesEviction, pod: Pod) -> Notice:
    by = f" by {', '.join(eviction.requesters)}" if eviction.requesters else ""
    return Notice(
        id=f"kubernetes/eviction/{eviction.uid}",
        reason=f"pod {pod.namespace}/{pod.name}: its eviction is requested{by}",
        run_id=pod.run_id,
    )


def progress_of(runs: Sequence[pb.DrainedRun]) -> Progress:
    """Return how far runs have come, by the coordinator's answer to a notice."""
    if not runs:
        return Progress("the coordinator knows of no rank on the node", is_final=True)
    words = (
        f"run {run.run_id}: {WORDS.get(run.save.state, 'asked to save').format(step=run.save.step)}"
        for run in runs
    )
    return Progress("; ".join(words)[:MAX_MESSAGE], all(_is_final(run.save) for run in runs))


def _is_final(save: pb.Save) -> bool:
    # Ranks that have agreed on a step save at it, also if the request is withdrawn after that.
    is_withdrawn = save.state == pb.SAVE_STATE_WITHDRAWN and not save.HasField("step")
    return is_withdrawn or save.state in (pb.SAVE_STATE_DONE, pb.SAVE_STATE_LAPSED)


def path_of(eviction: KubernetesEviction) -> str:
    """Return where the status of an ``Eviction`` is in the API."""
    namespace, name = eviction.namespace, eviction.name
    return f"/apis/{API_VERSION}/namespaces/{namespace}/evictions/{name}/status"


def answer_of(eviction: KubernetesEviction, message: str, at: str, *, completes: bool) -> Manifest:
    """Return what the watcher applies to the status of an ``Eviction``: its own entry, and nothing else.

    Args:
        eviction: the eviction.
        message: how far the runs have come.
        at: the time, as Kubernetes writes it.
        completes: whether Kubernetes may evict the pod.
    """
    entry = {"name": RESPONDER, "heartbeatTime": at, "message": message}
    if completes:
        entry["completionTime"] = at
    return {
        "apiVersion": API_VERSION,
        "kind": "Eviction",
        "metadata": {"name": eviction.name, "namespace": eviction.namespace, "uid": eviction.uid},
        "status": {"responders": [entry]},
    }
