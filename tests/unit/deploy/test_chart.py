"""What the chart renders, for every values file in its ci/ folder."""

import copy
import json
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.support.deploy import rules
from tests.support.deploy.helm import (
    CHART,
    CI,
    CUSTOM,
    KUBERNETES,
    Helm,
    Manifest,
    Release,
    container_of,
    matches,
    pod_of,
    values_of,
)

AROUND = "\n## As a part of another chart\n"
"""The section whose values are those of another chart."""


# The linter, the validator, the schema


@pytest.mark.parametrize("name", CI)
def test_the_strict_linter_has_no_complaint(releases: dict[str, Release], name: str):
    assert releases[name].complaints == []


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_is_valid_for_kubernetes(releases: dict[str, Release], version: str):
    every = [manifest for release in releases.values() for manifest in release.manifests]
    different = {json.dumps(manifest, sort_keys=True) for manifest in every if manifest["kind"] not in CUSTOM}
    for manifest in different:
        kubernetes_validate.validate(json.loads(manifest), version, strict=True)


def test_the_validator_would_find_a_fault(releases: dict[str, Release]):
    broken = copy.deepcopy(releases["default"].one("StatefulSet"))
    broken["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES[0], strict=True)


@pytest.mark.parametrize("name", CI)
def test_names_are_there_once(releases: dict[str, Release], name: str):
    names = [
        (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"])
        for one in releases[name].manifests
    ]
    assert len(names) == len(set(names))


def test_the_values_in_the_documentation_are_values_of_the_chart(helm: Helm):
    before, _, section = (CHART.parents[2] / "docs/kubernetes.md").read_text().partition(AROUND)
    text = before + section[section.index("\n## ") :]
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    together: Manifest = {}
    for block in blocks:
        values = yaml.safe_load(block)
        assert helm.release(values).complaints == []
        together |= values
    assert helm.release(together).complaints == []


# What an upgrade may not change


def kept(release: Release) -> Manifest:
    """What Kubernetes lets nobody change, and what the volume is found by."""
    manifest = release.one("StatefulSet")
    spec = manifest["spec"]
    fields = ("serviceName", "selector", "podManagementPolicy", "volumeClaimTemplates")
    mounts = [mount for mount in container_of(release)["volumeMounts"] if mount["name"] == "state"]
    return {"name": manifest["metadata"]["name"], "mounts": mounts} | {field: spec[field] for field in fields}


def test_an_upgrade_of_values_and_chart_keeps_the_volume(
    helm: Helm, releases: dict[str, Release], other_chart: Path
):
    other_storage = {"ephemeral", "existing-claim", "volume", "etcd", "etcd-secured"}
    other_name = {"names"}
    before = kept(releases["default"])
    for name in set(CI) - other_storage - other_name:
        assert kept(releases[name]) == before, name
        assert kept(helm.release(values_of(name), chart=other_chart)) == before, name
    assert helm.release(chart=other_chart).one("StatefulSet") != releases["default"].one("StatefulSet")


def test_the_selectors_of_other_objects_stay_too(helm: Helm, releases: dict[str, Release], other_chart: Path):
    after = helm.release(values_of("extras"), chart=other_chart)
    for kind, name in (
        ("Service", "muster"),
        ("Service", "muster-http"),
        ("Service", "muster-headless"),
        ("PodDisruptionBudget", "muster"),
    ):
        assert (
            after.one(kind, name)["spec"]["selector"]
            == releases["default"].one(kind, name)["spec"]["selector"]
        )


def test_immutable_fields_differ_after_a_change_of_volume_or_name(helm: Helm, releases: dict[str, Release]):
    assert kept(releases["volume"]) != kept(releases["default"])
    assert kept(helm.release({"nameOverride": "other"})) != kept(releases["default"])


def test_the_chart_alone_restarts_nothing(helm: Helm, releases: dict[str, Release], other_chart: Path):
    image = {"image": {"tag": yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]}}
    assert pod_of(helm.release(image, chart=other_chart)) == pod_of(releases["default"])


def test_a_change_of_the_configuration_restarts_the_coordinator(helm: Helm, releases: dict[str, Release]):
    changed = helm.release({"settings": {"session_ttl": 11}})
    assert pod_of(changed) != pod_of(releases["default"])


# How the objects hang together


@pytest.mark.parametrize("name", CI)
def test_selectors_find_the_pods_that_they_are_named_after(releases: dict[str, Release], name: str):
    release = releases[name]
    sets = [*release.of_kind("StatefulSet"), *release.of_kind("DaemonSet")]
    pods = {one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"] for one in sets}
    pods |= {test["metadata"]["name"]: test["metadata"]["labels"] for test in release.of_kind("Pod")}
    selectors = {
        service["metadata"]["name"]: service["spec"]["selector"] for service in release.of_kind("Service")
    }
    for kind, field in (
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
        ("StatefulSet", "selector"),
        ("DaemonSet", "selector"),
        ("PodMonitor", "selector"),
    ):
        for one in release.of_kind(kind):
            selectors[f"{one['metadata']['name']} {kind}"] = one["spec"][field]["matchLabels"]
    coordinator = release.one("StatefulSet")["metadata"]["name"]
    for of, selector in selectors.items():
        found = [pod for pod, labels in pods.items() if matches(selector, labels)]
        on_nodes = re.search("-(relay|watcher|keeper)$", of.split()[0])
        assert found == [f"{coordinator}{on_nodes[0] if on_nodes else ''}"], of


@pytest.mark.parametrize("name", CI)
def test_ports_are_found_by_name(releases: dict[str, Release], name: str):
    release = releases[name]
    ports = {port["name"]: port["containerPort"] for port in container_of(release)["ports"]}
    assert ports == {"grpc": 7550, "http": 7551}
    offered = {}
    for service in release.of_kind("Service"):
        assert all(port["name"] == port["targetPort"] for port in service["spec"]["ports"])
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        offered[component] = [port["name"] for port in service["spec"]["ports"]]
    assert offered.pop("relay", ["grpc"]) == ["grpc"]
    assert offered == {"client": ["grpc"], "http": ["http"], "headless": ["grpc", "http"]}


def referred(pod: Manifest) -> set[tuple[str, str]]:
    """What a pod's volumes and its account refer to, by kind and name."""
    found = {("ServiceAccount", pod["serviceAccountName"])}
    for volume in pod.get("volumes", []):
        if "configMap" in volume:
            found.add(("ConfigMap", volume["configMap"]["name"]))
        if "secret" in volume:
            found.add(("Secret", volume["secret"]["secretName"]))
        if "persistentVolumeClaim" in volume:
            found.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for source in volume.get("projected", {}).get("sources", []):
            if "secret" in source:
                found.add(("Secret", source["secret"]["name"]))
            elif "configMap" in source and source["configMap"]["name"] != "kube-root-ca.crt":
                # That one is in every namespace.
                found.add(("ConfigMap", source["configMap"]["name"]))
    return found


@pytest.mark.parametrize("name", CI)
def test_objects_referenced_by_a_pod_are_rendered_or_named_in_the_values(
    releases: dict[str, Release], name: str
):
    release, values = releases[name], json.dumps(values_of(name))
    made = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in release.manifests}
    made |= {("Secret", one["spec"]["secretName"]) for one in release.of_kind("Certificate")}
    pods = [pod_of(release)["spec"], *(test["spec"] for test in release.of_kind("Pod"))]
    pods += [one["spec"]["template"]["spec"] for one in release.of_kind("DaemonSet")]
    for kind, wanted in set().union(*map(referred, pods)) - made:
        assert f'"{wanted}"' in values, f"{kind} {wanted} is made by nobody"
    for pod in pods:
        claims = release.one("StatefulSet")["spec"].get("volumeClaimTemplates", [])
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in claims}
        for container in rules.containers(pod):
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
