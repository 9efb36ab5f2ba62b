"""The fields of nodes and pods that the watcher keeps. It does no I/O."""

from dataclasses import dataclass

from muster.watcher.kubernetes.api import Manifest
from muster.watcher.kubernetes.run_ids import run_id_of

INDEX = "batch.kubernetes.io/job-completion-index"
"""The label or annotation with the completion index of a pod of an Indexed Job."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The object that controls another one."""

    api_version: str
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str
    effect: str
    added: str
    """When, as Kubernetes writes it; empty: unknown."""


@dataclass(frozen=True, slots=True)
class Node:
    """What is kept of a node."""

    uid: str
    name: str
    unschedulable: bool
    taints: tuple[Taint, ...]
    deleted: str
    """Its deletion timestamp; empty: it is not being deleted."""
    cordoned_at: str
    tainted_at: str
    """When its taints were changed last."""


@dataclass(frozen=True, slots=True)
class Toleration:
    """A toleration of a pod; an empty key or effect is for all."""

    key: str
    exists: bool
    """Whether every value is tolerated."""
    value: str
    effect: str
    seconds: int | None
    """For how long; None: for ever."""


@dataclass(frozen=True, slots=True)
class Pod:
    """What is kept of a pod."""

    uid: str
    namespace: str
    name: str
    has_ended: bool
    deleted: str
    """Its deletion timestamp: when it is killed at the latest. Empty: it is not being deleted."""
    disruption: tuple[str, str, str] | None
    """Reason, message and time of its condition DisruptionTarget, if that is true."""
    tolerations: tuple[Toleration, ...]
    owner: Owner | None
    run_id: str
    """The run that it trains; empty: unknown."""
    index: str
    """Its completion index; empty: it has none."""

    @property
    def is_of_node(self) -> bool:
        """Whether each node has one: it is of a DaemonSet or a static pod, and has no ranks."""
        return self.owner is not None and self.owner.kind in ("DaemonSet", "Node")


def read_node(node: Manifest) -> Node:
    """Take from a node what is kept of it."""
    metadata, spec = node["metadata"], node.get("spec") or {}
    return Node(
        uid=metadata["uid"],
        name=metadata["name"],
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(
            Taint(
                key=one.get("key", ""),
                value=one.get("value", ""),
                effect=one.get("effect", ""),
                added=str(one.get("timeAdded") or ""),
            )
            for one in spec.get("taints") or ()
        ),
        deleted=str(metadata.get("deletionTimestamp") or ""),
        cordoned_at=_changed_at(metadata, "f:unschedulable"),
        tainted_at=_changed_at(metadata, "f:taints"),
    )


def read_pod(pod: Manifest) -> Pod:
    """Take from a pod what is kept of it."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    return Pod(
        uid=metadata["uid"],
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        has_ended=status.get("phase") in ("Succeeded", "Failed"),
        deleted=str(metadata.get("deletionTimestamp") or ""),
        disruption=next(
            (
                (one.get("reason", ""), one.get("message", ""), str(one.get("lastTransitionTime") or ""))
                for one in status.get("conditions") or ()
                if one.get("type") == "DisruptionTarget" and one.get("status") == "True"
            ),
            None,
        ),
        tolerations=tuple(
            Toleration(
                key=one.get("key", ""),
                exists=one.get("operator") == "Exists",
                value=one.get("value", ""),
                effect=one.get("effect", ""),
                seconds=one.get("tolerationSeconds"),
            )
            for one in spec.get("tolerations") or ()
        ),
        owner=owner_of(metadata),
        run_id=run_id_of(pod),
        index=str(
            (metadata.get("labels") or {}).get(INDEX) or (metadata.get("annotations") or {}).get(INDEX) or ""
        ),
    )


def owner_of(metadata: Manifest) -> Owner | None:
    """Return the object that controls the one with this metadata; None: nothing does."""
    for one in metadata.get("ownerReferences") or ():
        if one.get("controller"):
            return Owner(one.get("apiVersion", ""), one.get("kind", ""), one.get("name", ""))
    return None


def _changed_at(metadata: Manifest, field: str) -> str:
    """Return when a field of the spec was set, as Kubernetes tracks it; empty if it does not tell."""
    times = [
        str(one.get("time") or "")
        for one in metadata.get("managedFields") or ()
        if field in ((one.get("fieldsV1") or {}).get("f:spec") or {})
    ]
    return max(times, default="")
