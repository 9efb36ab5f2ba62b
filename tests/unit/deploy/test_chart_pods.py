"""What the chart's pods and services have, by the values."""

import re

import pytest

from tests.support.deploy import rules
from tests.support.deploy.helm import CHART, CI, Helm, Manifest, Release, container_of, pod_of, values_of


def assert_restricted(pod: Manifest, ids: bool) -> None:
    """The profile `restricted` of the Pod Security Standards, and a read-only root file system."""
    assert rules.restricted(pod) == []
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    if ids:
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 10001
    else:
        assert not security.keys() & {"runAsUser", "runAsGroup", "fsGroup"}
    for container in rules.containers(pod):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("name", CI)
def test_pods_are_restricted(releases: dict[str, Release], name: str):
    release = releases[name]
    for pod in (pod_of(release)["spec"], *(test["spec"] for test in release.of_kind("Pod"))):
        assert_restricted(pod, ids=name != "restricted-platform")


@pytest.mark.parametrize("name", CI)
def test_secrets_are_not_for_everyone(releases: dict[str, Release], name: str):
    for volume in pod_of(releases[name])["spec"]["volumes"]:
        for kind in ("secret", "projected"):
            if kind in volume:
                assert volume[kind]["defaultMode"] == 0o440
    assert all(
        account["automountServiceAccountToken"] is False
        for account in releases[name].of_kind("ServiceAccount")
    )


# Features


def test_the_grace_period_fits_the_drain(releases: dict[str, Release]):
    assert pod_of(releases["default"])["spec"]["terminationGracePeriodSeconds"] == 15
    assert pod_of(releases["settings"])["spec"]["terminationGracePeriodSeconds"] == 23


@pytest.mark.parametrize(("name", "scheme"), [("default", "HTTP"), ("mtls", "HTTPS"), ("tls-inline", "HTTP")])
def test_probes_ask_over_http(releases: dict[str, Release], name: str, scheme: str):
    container = container_of(releases[name])
    paths = {}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert (asked["port"], asked["scheme"]) == ("http", scheme)
        paths[probe] = asked["path"]
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}


@pytest.mark.parametrize("name", CI)
def test_services_have_only_what_their_type_has(releases: dict[str, Release], name: str):
    for service in releases[name].of_kind("Service"):
        assert rules.service(service) == []


def test_a_load_balancer_is_for_grpc_alone(releases: dict[str, Release]):
    services = {one["metadata"]["name"]: one["spec"] for one in releases["network"].of_kind("Service")}
    clients, page = services["muster"], services["muster-http"]
    assert clients == clients | {
        "type": "LoadBalancer",
        "loadBalancerClass": "service.k8s.aws/nlb",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "externalTrafficPolicy": "Local",
        "ports": [{"name": "grpc", "port": 443, "targetPort": "grpc"}],
    }
    assert (page["type"], page["ports"]) == (
        "ClusterIP",
        [{"name": "http", "port": 8443, "targetPort": "http"}],
    )


def test_the_services_are_as_their_values_say(releases: dict[str, Release]):
    clients, page = (releases["node-port"].one("Service", name) for name in ("muster", "muster-http"))
    assert clients["metadata"]["labels"]["audience"] == "training"
    assert clients["spec"] == clients["spec"] | {
        "type": "NodePort",
        "externalTrafficPolicy": "Local",
        "ipFamilyPolicy": "PreferDualStack",
        "ipFamilies": ["IPv6", "IPv4"],
        "ports": [{"name": "grpc", "port": 7550, "targetPort": "grpc", "nodePort": 30550}],
    }
    assert page["metadata"]["labels"]["audience"] == "people"
    assert page["metadata"]["annotations"] == {"example.org/owner": "platform"}
    assert page["spec"] == page["spec"] | {
        "type": "NodePort",
        "ipFamilyPolicy": "SingleStack",
        "ipFamilies": ["IPv4"],
        "ports": [{"name": "http", "port": 7551, "targetPort": "http"}],
    }


def test_an_ingress_shows_the_page(releases: dict[str, Release]):
    release = releases["ingress"]
    ingress = release.one("Ingress")
    assert ingress["metadata"]["annotations"] == {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"}
    assert ingress["metadata"]["labels"]["audience"] == "people"
    backend = {"service": {"name": "muster-http", "port": {"name": "http"}}}
    hosts = ["muster.example.org", "training.example.org"]
    assert ingress["spec"] == {
        "ingressClassName": "nginx",
        "tls": [{"secretName": "muster-page", "hosts": hosts}],
        "rules": [
            {"host": host, "http": {"paths": [{"path": path, "pathType": kind, "backend": backend}]}}
            for host, path, kind in zip(hosts, ["/", "/*"], ["Prefix", "ImplementationSpecific"], strict=True)
        ],
    }
    assert "The Ingress shows it at https://muster.example.org/." in release.notes


def test_the_pod_has_what_is_put_beside_the_coordinator(releases: dict[str, Release]):
    release, values = releases["pod-extras"], values_of("pod-extras")
    pod, container = pod_of(release)["spec"], container_of(release)
    assert [one["name"] for one in pod["containers"]] == ["muster", "ship"]
    assert pod["initContainers"] == values["initContainers"]
    assert container["envFrom"] == values["envFrom"]
    assert container["volumeMounts"][-1:] == values["extraVolumeMounts"]
    assert pod["volumes"][-1:] == values["extraVolumes"]
    for one in (pod, release.one("Pod")["spec"]):
        for key in ("hostAliases", "dnsPolicy", "dnsConfig", "runtimeClassName"):
            assert one[key] == values[key]


def test_the_claim_has_its_annotations(releases: dict[str, Release]):
    (claim,) = releases["volume"].one("StatefulSet")["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["annotations"] == values_of("volume")["persistence"]["annotations"]


def evicted_volumes(release: Release) -> str:
    annotations: Manifest = pod_of(release)["metadata"]["annotations"]
    return str(annotations["cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"])


def test_the_autoscaler_may_remove_the_node_unless_the_state_is_on_it(releases: dict[str, Release]):
    """It keeps nodes with volumes that would be lost, except for those named here."""
    for name in ("default", "ephemeral"):
        local = {one["name"] for one in pod_of(releases[name])["spec"]["volumes"] if "emptyDir" in one}
        kept = local - set(evicted_volumes(releases[name]).split(","))
        assert kept == ({"state"} if name == "ephemeral" else set())
    assert evicted_volumes(releases["pod-extras"]) == "tmp,shipped"
    # What else is annotated takes nothing away.
    assert evicted_volumes(releases["extras"]) == "tmp"


def test_a_node_is_drained_with_the_flag_for_local_volumes_and_no_taint_stays(releases: dict[str, Release]):
    text = (CHART.parents[2] / "docs/kubernetes.md").read_text()
    assert any("emptyDir" in one for one in pod_of(releases["default"])["spec"]["volumes"])
    assert re.findall(r"kubectl drain .*", text) == [
        "kubectl drain NODE --ignore-daemonsets --delete-emptydir-data"
    ]
    taints = re.findall(r"kubectl taint node NODE (\S+)", text)
    assert taints
    assert {taint for taint in taints if taint.endswith("-")} == {
        f"{taint}-" for taint in taints if not taint.endswith("-")
    }


def test_every_pod_can_live_under_a_quota(releases: dict[str, Release]):
    counted = {"requests.cpu", "requests.memory", "limits.cpu", "limits.memory"}
    for pod in (pod_of(releases["pod-extras"])["spec"], releases["pod-extras"].one("Pod")["spec"]):
        assert rules.quota(pod, counted) == []
    assert rules.quota(releases["default"].one("Pod")["spec"], counted) == ["doctor must say limits.cpu"]


def test_a_volume_grows_without_a_restart(helm: Helm, releases: dict[str, Release]):
    assert pod_of(helm.release({"persistence": {"size": "10Gi"}})) == pod_of(releases["default"])


def test_tmp_is_bounded_where_one_says_so(releases: dict[str, Release]):
    def tmp(name: str) -> Manifest:
        volumes: list[Manifest] = pod_of(releases[name])["spec"]["volumes"]
        (found,) = (one["emptyDir"] for one in volumes if one["name"] == "tmp")
        return dict(found)

    assert (tmp("default"), tmp("pod-extras")) == ({}, {"sizeLimit": "2Gi"})
