"""Rules of the API server that decide whether what the chart renders is admitted, each in words of its own.

Every function returns the faults it finds, as sentences; none is an empty list.
"""

from collections.abc import Iterator
from typing import Any

Manifest = dict[str, Any]

STATEFUL_SET_MAY_CHANGE = {
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
}
"""From the sentence with which the API server refuses a change of any other field of a StatefulSet's spec."""

VOLUMES_OF_RESTRICTED = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""From the Pod Security Standards, profile Restricted."""


def immutable(before: Manifest, after: Manifest) -> list[str]:
    """What an update changes that Kubernetes lets nobody change."""
    kind = before["kind"]
    if kind == "StatefulSet":
        old, new = before["spec"], after["spec"]
        changed = {field for field in old.keys() | new.keys() if old.get(field) != new.get(field)}
        return [f"spec.{field} may not change" for field in sorted(changed - STATEFUL_SET_MAY_CHANGE)]
    if kind in ("ConfigMap", "Secret"):
        fixed = {"data", "immutable"} if before.get("immutable") else set()
        fixed |= {"type"} if kind == "Secret" else set()
        return [f"{field} may not change" for field in sorted(fixed) if before.get(field) != after.get(field)]
    if kind == "Service" and before["spec"].get("type") == after["spec"].get("type") == "LoadBalancer":
        old_class, new_class = (one["spec"].get("loadBalancerClass") for one in (before, after))
        return ["spec.loadBalancerClass may not change"] if old_class != new_class else []
    return []


def quota(pod: Manifest, counted: set[str]) -> list[str]:
    """What a ResourceQuota misses: every container must say all that it counts, such as ``limits.cpu``."""
    return [
        f"{container['name']} must say {one}"
        for container in containers(pod)
        for one in sorted(counted)
        if one.partition(".")[2] not in container.get("resources", {}).get(one.partition(".")[0], {})
    ]


def restricted(pod: Manifest) -> list[str]:
    """What the profile Restricted of the Pod Security Standards refuses."""
    security = pod.get("securityContext", {})
    faults = [f"{field} is forbidden" for field in ("hostNetwork", "hostPID", "hostIPC") if pod.get(field)]
    for volume in pod.get("volumes", []):
        if not volume.keys() - {"name"} <= VOLUMES_OF_RESTRICTED:
            faults.append(f"volume {volume['name']} is of a forbidden kind")
    for container in containers(pod):
        name, own = container["name"], container.get("securityContext", {})
        both = security | own
        if own.get("privileged"):
            faults.append(f"{name}: privileged")
        if own.get("allowPrivilegeEscalation") is not False:
            faults.append(f"{name}: allowPrivilegeEscalation is not false")
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []):
            faults.append(f"{name}: capabilities.drop has no ALL")
        if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            faults.append(f"{name}: capabilities.add")
        if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
            faults.append(f"{name}: may run as root")
        if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            faults.append(f"{name}: seccompProfile")
        if any(port.get("hostPort") for port in container.get("ports", [])):
            faults.append(f"{name}: hostPort")
    return faults


def service(manifest: Manifest) -> list[str]:
    """Fields of a Service that only some types have."""
    spec = manifest["spec"]
    kind = spec.get("type", "ClusterIP")
    faults = []
    if kind != "LoadBalancer":
        fields = ("loadBalancerClass", "loadBalancerSourceRanges", "allocateLoadBalancerNodePorts")
        faults += [f"{field} is for LoadBalancer" for field in fields if field in spec]
    if kind == "ClusterIP":
        faults += ["externalTrafficPolicy is for what is reached from outside"] * (
            "externalTrafficPolicy" in spec
        )
        faults += ["nodePort is for what is reached from outside"] * any(
            "nodePort" in p for p in spec["ports"]
        )
    if len(spec.get("ipFamilies", [])) > 1 and spec.get("ipFamilyPolicy", "SingleStack") == "SingleStack":
        faults.append("two ipFamilies need an ipFamilyPolicy for two")
    return faults


def may(
    manifests: list[Manifest], account: tuple[str, str], verb: str, group: str, plural: str, namespace: str
) -> bool:
    """Whether RBAC lets a service account do something.

    Args:
        manifests: the roles and bindings, among others.
        account: its namespace and name.
        verb: such as `list`.
        group: of the resource; empty for the core's.
        plural: the resource.
        namespace: where; empty: everywhere, or where there are no namespaces.
    """
    subject = {"kind": "ServiceAccount", "namespace": account[0], "name": account[1]}
    for binding in manifests:
        where = binding["metadata"].get("namespace", "")
        if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding") or subject not in binding["subjects"]:
            continue
        if binding["kind"] == "RoleBinding" and where != namespace:
            continue
        role = binding["roleRef"]
        in_namespace = where if role["kind"] == "Role" else ""
        for one in manifests:
            found = (one["kind"], one["metadata"]["name"], one["metadata"].get("namespace", ""))
            if found == (role["kind"], role["name"], in_namespace) and any(
                _covers(rule, verb, group, plural) for rule in one["rules"]
            ):
                return True
    return False


def _covers(rule: Manifest, verb: str, group: str, plural: str) -> bool:
    # A rule with names is for none of the lists and watches that are asked about here.
    return "resourceNames" not in rule and all(
        wanted in rule[field] or "*" in rule[field]
        for field, wanted in (("verbs", verb), ("apiGroups", group), ("resources", plural))
    )


def containers(pod: Manifest) -> Iterator[Manifest]:
    """All of a pod's."""
    yield from pod.get("initContainers", [])
    yield from pod["containers"]
