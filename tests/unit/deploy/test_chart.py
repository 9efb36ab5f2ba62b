"""What the chart renders, for every values file in its ci/ folder."""

import copy
import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.deploy import rules
from tests.support.deploy.helm import CHART, Helm, HelmError, Manifest, Release, values_of

KUBERNETES = ("1.27", "1.30", "1.33", "1.37")
"""The oldest that Chart.yaml admits, the newest that the validator knows, and some between."""
CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate"}
"""Kinds that Kubernetes itself does not know."""
CI = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())
FEATURES = ("default", "tls-secret", "mtls", "tokens-secret", "secured", "monitoring", "settings")

AROUND = "\n## As a part of another chart\n"
"""The section whose values are those of another chart."""

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.fixture(scope="session")
def releases(helm: Helm) -> dict[str, Release]:
    """The chart with each of its ci/ values files."""
    return {name: helm.release(values_of(name)) for name in CI}


@pytest.fixture
def other_chart(tmp_path: Path) -> Path:
    """The chart in its next version, with a dashboard and a rules file more."""
    chart = tmp_path / "muster"
    shutil.copytree(CHART, chart)
    text = (chart / "Chart.yaml").read_text()
    text = re.sub(r"(?m)^version: .*", "version: 9.9.9", text)
    (chart / "Chart.yaml").write_text(re.sub(r"(?m)^appVersion: .*", 'appVersion: "9.9"', text))
    for folder in ("dashboards", "rules"):
        (chart / folder).mkdir(exist_ok=True)
    (chart / "dashboards/sample.json").write_text('{"title": "{{run}}"}\n')
    (chart / "rules/sample.rules.yaml").write_text(
        "# A comment.\ngroups:\n  - name: sample\n    rules:\n      - alert: Sample\n"
        "        expr: vector(1) > 0\n"
        '        annotations: {summary: "{{ $value }}", runbook: docs/operations.md#sample}\n'
    )
    return chart


def pod_of(release: Release) -> Manifest:
    pod: Manifest = release.one("StatefulSet")["spec"]["template"]
    return pod


def container_of(release: Release) -> Manifest:
    first: Manifest = pod_of(release)["spec"]["containers"][0]
    assert first["name"] == "muster"
    return first


def matches(selector: Manifest, labels: Manifest) -> bool:
    return selector.items() <= labels.items()


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
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in releases[name].manifests]
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


def objects_of(schema: Manifest, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Manifest]]:
    """Every object in the schema, with its path; 0 stands for an item of a list."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if schema.get("type") == "object":
        yield path, schema
    for key, inner in schema.get("properties", {}).items():
        yield from objects_of(inner, (*path, key))
    if "items" in schema:
        yield from objects_of(schema["items"], (*path, 0))


def at(path: tuple[Any, ...], value: Any) -> Any:
    for step in reversed(path):
        value = [value] if step == 0 else {step: value}
    return value


CLOSED = [path for path, schema in objects_of(SCHEMA) if schema.get("additionalProperties") is False]


def test_every_object_of_the_schema_is_closed_a_map_or_kubernetes_own():
    for path, schema in objects_of(SCHEMA):
        assert schema.get("additionalProperties", True) is not True or "$comment" in schema, path


@pytest.mark.parametrize("path", CLOSED, ids=lambda path: ".".join(map(str, path)) or "root")
def test_a_misspelt_key_is_refused_and_named(helm: Helm, path: tuple[Any, ...]):
    with pytest.raises(HelmError, match="misspelt"):
        helm.release(at(path, {"misspelt": 1}))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"replicaCount": 3}, "replicaCount"),
        ({"settings": {"session_ttll": 3}}, "session_ttll"),
        ({"settings": {"max_runs": "many"}}, "max_runs"),
        ({"settings": {"session_ttl": 0.5}}, "session_ttl"),
        ({"settings": {"log_format": "xml"}}, "log_format"),
        ({"persistence": {"accessModes": ["ReadOnlyMany"]}}, "accessModes"),
        ({"persistence": {"size": "10"}}, "size"),
        ({"persistence": {"size": 10}}, "size"),
        ({"persistence": {"size": "0Gi"}}, "size"),
        ({"persistence": {"size": "10GB"}}, "size"),
        ({"persistence": {"size": "1m"}}, "size"),
        ({"resources": {"limits": {"memory": "1gi"}}}, "memory"),
        ({"fullnameOverride": "muster.ml"}, "fullnameOverride"),
        ({"fullnameOverride": "1st"}, "fullnameOverride"),
        ({"fullnameOverride": "m" * 53}, "fullnameOverride"),
        ({"nameOverride": "muster.ml"}, "nameOverride"),
        ({"podSecurity": {"runAsUser": 0}}, "runAsUser"),
        ({"service": {"grpcPort": 0}}, "grpcPort"),
        ({"image": {"digest": "sha256:abc"}}, "digest"),
        ({"tokens": {"entries": [{"name": "a", "role": "root", "token": "t"}]}}, "role"),
        ({"tokens": {"entries": [{"name": "a", "role": "worker"}]}}, "entries"),
        ({"commonLabels": {"app.kubernetes.io/name": "other"}}, "app.kubernetes.io/name"),
        ({"podDisruptionBudget": {"maxUnavailable": 2}}, "maxUnavailable"),
        ({"replicas": 0}, "replicas"),
        ({"state": {"type": "postgres"}}, "type"),
        ({"advertise": "muster.example.org"}, "advertise"),
        ({"state": {"type": "etcd", "etcd": {"endpoints": ["http://etcd:2379"]}}}, "endpoints"),
        ({"state": {"type": "etcd", "etcd": {"endpoints": ["etcd"]}}}, "endpoints"),
        ({"relay": {"upstream": "unix:///run/other.sock"}}, "upstream"),
        ({"relay": {"upstream": "a:7550,b"}}, "upstream"),
        ({"relay": {"patienceMs": -1}}, "patienceMs"),
        ({"relay": {"socket": {"mode": "rw-"}}}, "mode"),
        ({"relay": {"socket": {"mode": 660}}}, "mode"),
        ({"relay": {"socket": {"folder": "run/muster"}}}, "folder"),
        ({"relay": {"podSecurity": {"runAsUser": 0}}}, "runAsUser"),
    ],
)
def test_a_wrong_value_is_refused_and_named(helm: Helm, values: Manifest, names: str):
    with pytest.raises(HelmError, match=names):
        helm.release(values)


@pytest.mark.parametrize("name", ["1st", "team.a"])
def test_a_release_whose_service_could_have_no_such_name_is_refused(helm: Helm, name: str):
    with pytest.raises(HelmError, match=f'"{name}-muster" is to be the name of a Service'):
        helm.release(name=name)
    helm.release({"fullnameOverride": "muster"}, name=name)


@pytest.mark.parametrize("size", ["1Gi", "500M", "0.5Ti", "10737418240", 10_737_418_240])
def test_a_size_has_a_unit_or_is_a_number_of_bytes(helm: Helm, size: str | int):
    release = helm.release({"persistence": {"size": size}, "fullnameOverride": "m" * 52})
    for version in KUBERNETES:
        kubernetes_validate.validate(release.one("StatefulSet"), version, strict=True)


def test_memory_may_be_in_kibibytes(helm: Helm):
    container = container_of(helm.release({"resources": {"limits": {"memory": "1048576Ki"}}}))
    assert container["resources"]["limits"] == {"memory": "1048576Ki"}


CERTIFICATE = {"enabled": True, "certificate": "PEM", "privateKey": "PEM"}
TOKENS = {"enabled": True, "existingSecret": "tokens"}


def etcd(**more: Any) -> Manifest:
    """Values of a state in etcd."""
    return {"type": "etcd", "etcd": {"endpoints": ["etcd:2379"], **more}}


ETCD = etcd()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tls": {"enabled": True}}, "give the certificate in one way"),
        ({"tls": {**CERTIFICATE, "existingSecret": "x"}}, "give the certificate in one way"),
        ({"tls": {"enabled": True, "certificate": "PEM"}}, "belong together"),
        ({"tls": {"existingSecret": "x"}}, "tls.enabled is false"),
        ({"tls": {"clientAuth": {"enabled": True}}}, "tls.enabled is false"),
        ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "name the issuer"),
        ({"tls": {**CERTIFICATE, "clientAuth": {"enabled": True}}}, "which CA signs"),
        ({"tls": {**CERTIFICATE, "ca": "PEM", "clientAuth": {"enabled": True}}}, "`helm test` needs a cert"),
        ({"tokens": {"enabled": True}}, "give the tokens in one way"),
        ({"tokens": {"existingSecret": "x"}}, "tokens.enabled is false"),
        ({"tokens": TOKENS}, "`helm test` needs a token"),
        (
            {"tokens": TOKENS, "test": {"enabled": False}, "serviceMonitor": {"enabled": True}},
            "Prometheus needs a token",
        ),
        ({"persistence": {"enabled": False, "existingClaim": "x"}}, "nothing would be kept"),
        (
            {"service": {"nodePort": 30550}},
            "service.nodePort is for a Service of type NodePort or LoadBalancer",
        ),
        ({"service": {"externalTrafficPolicy": "Local"}}, "service.externalTrafficPolicy is for"),
        ({"service": {"type": "NodePort", "loadBalancerClass": "nlb"}}, "service.loadBalancerClass is for"),
        (
            {"httpService": {"loadBalancerSourceRanges": ["10.0.0.0/8"]}},
            "httpService.loadBalancerSourceRanges is",
        ),
        ({"ingress": {"enabled": True}}, "say for which hosts"),
        ({"replicas": 3}, "replicas is 3, and state.type is sqlite: two coordinators would ruin the file"),
        ({"state": {"type": "etcd"}}, "say where it is in state.etcd.endpoints"),
        ({"state": {"etcd": {"endpoints": ["etcd:2379"]}}}, "state.type is sqlite: set state.type=etcd"),
        ({"state": ETCD, "persistence": {"existingClaim": "x"}}, "nothing would be kept on it"),
        ({"state": etcd(user="muster")}, "belong together"),
        ({"state": etcd(tls={"clientCertificate": True})}, "name the Secret that has it"),
        (
            {"tokens": TOKENS, "test": {"enabled": False}, "relay": {"enabled": True}},
            "the relays need a token, too",
        ),
        (
            {
                "tls": {**CERTIFICATE, "ca": "PEM", "clientAuth": {"enabled": True}},
                "test": {"enabled": False},
                "relay": {"enabled": True},
            },
            "the relays need a certificate, too",
        ),
        (
            {"tls": CERTIFICATE, "relay": {"enabled": True, "tcp": {"enabled": True}}},
            "a certificate for muster-relay.ml.svc in relay.tcp.tlsSecret",
        ),
        (
            {
                "tokens": {"enabled": True, "existingSecret": "s"},
                "client": {"tokenSecret": "t"},
                "relay": {"enabled": True, "tcp": {"enabled": True}, "client": {"tokenSecret": "t"}},
            },
            "workers' tokens and issuers alone in relay.tcp.tokensSecret",
        ),
        (
            {"relay": {"enabled": True, "podSecurity": {"runAsUser": None}}},
            "say to whom the folder is given in relay.podSecurity.runAsUser",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(helm: Helm, values: Manifest, sentence: str):
    with pytest.raises(HelmError, match=sentence):
        helm.release(values)


def test_every_key_that_the_schema_knows_has_a_default():
    def compare(schema: Manifest, values: Any, path: str) -> None:
        # An empty map is a default, too, and flags have theirs in `muster serve`.
        if not values or path == ".settings":
            return
        for key, inner in schema.get("properties", {}).items():
            if key not in ("global", "enabled") or path:
                assert key in values, f"{path}.{key}"
                compare(inner, values[key], f"{path}.{key}")

    compare(SCHEMA, VALUES, "")


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


def test_what_is_kept_would_show_a_change(helm: Helm, releases: dict[str, Release]):
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
def test_selectors_find_the_coordinator_or_the_relays_and_not_the_test(
    releases: dict[str, Release], name: str
):
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
        assert found == [f"{coordinator}-relay" if of.split()[0].endswith("-relay") else coordinator], of


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
def test_what_a_pod_refers_to_is_rendered_or_named_by_the_values(releases: dict[str, Release], name: str):
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


# Several replicas


def environment_of(release: Release) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container_of(release)["env"]}


def test_replicas_share_a_state_in_etcd_and_no_volume(releases: dict[str, Release]):
    release = releases["etcd"]
    spec = release.one("StatefulSet")["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"]) == (3, "Parallel")
    assert "volumeClaimTemplates" not in spec
    assert {volume["name"] for volume in pod_of(release)["spec"]["volumes"]} == {"tmp", "config"}
    members = ",".join(f"etcd-{number}.etcd.etcd.svc:2379" for number in range(3))
    assert environment_of(release)["MUSTER_STATE"] == f"etcd://{members}/ml/muster"
    assert "replicas" not in releases["default"].one("StatefulSet")["spec"]


def test_each_replica_advertises_a_name_that_stays_its_own(releases: dict[str, Release]):
    release = releases["etcd"]
    environment = environment_of(release)
    assert environment["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert environment["MUSTER_SERVE_ADVERTISE"] == "$(POD_NAME).muster-headless.ml.svc:7550"
    elsewhere = environment_of(releases["etcd-secured"])["MUSTER_SERVE_ADVERTISE"]
    assert elsewhere == "$(POD_NAME).muster.example.org:7550"
    headless = release.one("Service", "muster-headless")["spec"]
    assert headless["publishNotReadyAddresses"] is True
    assert {"name": "grpc", "port": 7550, "targetPort": "grpc"} in headless["ports"]
    (certificate,) = releases["etcd-secured"].of_kind("Certificate")
    assert "*.muster-headless.ml.svc" in certificate["spec"]["dnsNames"]


def test_what_etcd_asks_for_comes_from_secrets(releases: dict[str, Release]):
    release = releases["etcd-secured"]
    environment = environment_of(release)
    assert {name.removeprefix("MUSTER_SERVE_ETCD_") for name in environment if "_ETCD_" in name} == {
        "CA",
        "CERT",
        "KEY",
        "USER",
        "PASSWORD_FILE",
    }
    (mount,) = (one for one in container_of(release)["volumeMounts"] if one["name"] == "etcd")
    (volume,) = (one for one in pod_of(release)["spec"]["volumes"] if one["name"] == "etcd")
    items = [item for source in volume["projected"]["sources"] for item in source["secret"]["items"]]
    files = {f"{mount['mountPath']}/{item['path']}" for item in items}
    named = {environment[f"MUSTER_SERVE_ETCD_{name}"] for name in ("CA", "CERT", "KEY", "PASSWORD_FILE")}
    assert named == files
    assert environment["MUSTER_STATE"] == "etcd://etcd.example.org:2379/muster/second"


def test_replicas_are_spread_over_nodes_unless_the_values_say_how(releases: dict[str, Release]):
    (spread,) = pod_of(releases["etcd"])["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
        "kubernetes.io/hostname",
        "ScheduleAnyway",
    )
    assert matches(spread["labelSelector"]["matchLabels"], pod_of(releases["etcd"])["metadata"]["labels"])
    given = values_of("etcd-secured")["topologySpreadConstraints"]
    assert pod_of(releases["etcd-secured"])["spec"]["topologySpreadConstraints"] == given
    assert "topologySpreadConstraints" not in pod_of(releases["default"])["spec"]


@pytest.mark.parametrize("name", ["etcd", "etcd-secured"])
def test_a_drain_leaves_a_majority_of_the_replicas(releases: dict[str, Release], name: str):
    replicas = releases[name].one("StatefulSet")["spec"]["replicas"]
    budget = releases[name].one("PodDisruptionBudget")["spec"]
    assert replicas - budget["maxUnavailable"] > replicas // 2


def test_the_network_policy_lets_replicas_reach_etcd_and_each_other(helm: Helm, releases: dict[str, Release]):
    release = releases["etcd-secured"]
    policy, labels = release.one("NetworkPolicy")["spec"], pod_of(release)["metadata"]["labels"]
    etcd_rule, peers, dns = policy["egress"]
    assert etcd_rule == {"ports": [{"port": 2379}], "to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}
    for rule in (peers, next(one for one in policy["ingress"] if one["ports"] == [{"port": "grpc"}])):
        selectors = [
            one["podSelector"]["matchLabels"]
            for one in rule.get("to", rule.get("from"))
            if "podSelector" in one
        ]
        assert any(matches(selector, labels) for selector in selectors)
    assert {one["port"] for one in dns["ports"]} == {53}
    anywhere = helm.release({"state": ETCD, "networkPolicy": {"enabled": True}})
    assert anywhere.one("NetworkPolicy")["spec"]["egress"][0] == {"ports": [{"port": 2379}]}
    assert "egress" not in releases["network"].one("NetworkPolicy")["spec"]


def test_the_notes_name_every_replica(helm: Helm, releases: dict[str, Release]):
    notes = releases["etcd"].notes
    assert "coming up as muster-0 to 2 in namespace ml" in notes
    every = ",".join(f"muster-{number}.muster-headless.ml.svc:7550" for number in range(3))
    assert f"Or name each: {every}\n" in notes
    assert "persistence is off" not in notes
    upgraded = helm.release({**values_of("etcd"), "updateStrategy": {"type": "OnDelete"}}, upgrade=True).notes
    assert all(f"  kubectl -n ml delete pod muster-{number}\n" in upgraded for number in range(3))


# As a part of another chart


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, {"training-muster"}),
        ({"muster": {"enabled": False}}, set()),
        ({"muster-2": {"enabled": True}}, {"training-muster", "training-muster-2"}),
        (
            {"global": {"imageRegistry": "registry.example.org"}, "muster": {"commonLabels": {"a": "b"}}},
            {"training-muster"},
        ),
    ],
)
def test_it_is_a_part_of_another_chart(helm: Helm, umbrella: Path, values: Manifest, names: set[str]):
    release = helm.release(values, chart=umbrella, name="training")
    sets = {one["metadata"]["name"]: one for one in release.of_kind("StatefulSet")}
    assert sets.keys() == names
    for name, one in sets.items():
        selector = one["spec"]["selector"]["matchLabels"]
        assert selector["app.kubernetes.io/name"] == name.removeprefix("training-")
        services = [service["metadata"]["name"] for service in release.of_kind("Service")]
        assert {name, f"{name}-http", f"{name}-headless"} <= set(services)
    assert ("is coming up as training-muster-0" in release.notes) is ("training-muster" in names)


def test_it_is_a_part_of_another_chart_as_documented(helm: Helm, umbrella: Path):
    text = (CHART.parents[2] / "docs/kubernetes.md").read_text()
    section = text.partition(AROUND)[2].partition("\n## ")[0]
    depends, values = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", section, re.S))
    metadata = yaml.safe_load((umbrella / "Chart.yaml").read_text())
    (umbrella / "Chart.yaml").write_text(yaml.safe_dump(metadata | depends))
    release = helm.release(values, chart=umbrella, name="training")
    name = release.one("StatefulSet")["metadata"]["name"]
    assert f"it is `{name}`" in section
    values["muster"]["enabled"] = False
    assert helm.release(values, chart=umbrella, name="training").of_kind("StatefulSet") == []
    depends["dependencies"][0] |= {"alias": "roll-call", "condition": "roll-call.enabled"}
    (umbrella / "Chart.yaml").write_text(yaml.safe_dump(metadata | depends))
    values = {"roll-call": {"enabled": True, "allowInsecure": True}}
    release = helm.release(values, chart=umbrella, name="training")
    assert release.one("StatefulSet")["metadata"]["name"] in section


def test_what_comes_from_the_chart_around_it_is_admitted_as_documented():
    readme = (CHART / "README.md").read_text()
    (sentence,) = re.findall(r"are refused\. Only (.*) are\s+admitted and not used", readme)
    assert set(re.findall(r"`(\w+)`", sentence)) == SCHEMA["properties"].keys() - VALUES.keys()


# Closed by default

SECURED = {"tls": {"enabled": True, "existingSecret": "s"}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "TLS is off: .* Set tls.enabled=true and tokens.enabled=true"),
        ({"tokens": {"enabled": True, "existingSecret": "s"}}, "TLS is off"),
        (SECURED, "tokens are off: .* Set tokens.enabled=true or tls.clientAuth.enabled=true"),
    ],
)
def test_values_without_tls_or_known_callers_are_refused(helm: Helm, values: Manifest, said: str):
    closed = values | {"test": {"enabled": False}, "allowInsecure": False}
    with pytest.raises(HelmError, match=said):
        helm.release(closed)
    opened = helm.release(closed | {"allowInsecure": True}).one("ConfigMap")["data"]["muster.toml"]
    assert "insecure = true" in opened.splitlines()


def test_secured_coordinator_is_not_told_to_be_insecure(helm: Helm):
    tokens = {"enabled": True, "existingSecret": "s"}
    values = SECURED | {"tokens": tokens, "test": {"enabled": False}, "allowInsecure": False}
    assert "insecure" not in helm.release(values).one("ConfigMap")["data"]["muster.toml"]


# Pod security


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


# Nodes, quotas, disks


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


# Certificates, monitoring, the rest


def test_a_certificate_of_cert_manager(releases: dict[str, Release]):
    certificate = releases["tls-cert-manager"].one("Certificate")
    assert certificate["apiVersion"] == "cert-manager.io/v1"
    assert certificate["spec"] == {
        "secretName": "muster-tls",
        "issuerRef": {"name": "training", "kind": "ClusterIssuer", "group": "cert-manager.io"},
        "duration": "2160h",
        "renewBefore": "720h",
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "usages": ["digital signature", "server auth"],
        "dnsNames": [
            "muster.ml.svc",
            "muster",
            "muster.ml",
            "muster.ml.svc.cluster.local",
            "muster-0.muster-headless.ml.svc",
            "muster-0.muster-headless.ml.svc.cluster.local",
            "muster-http.ml.svc",
            "muster-http.ml.svc.cluster.local",
            "muster.example.org",
        ],
    }


def test_prometheus_scrapes_one_service_once(releases: dict[str, Release]):
    monitor = releases["monitoring"].one("ServiceMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert {"team": "training", "release": "kube-prometheus-stack"}.items() <= monitor["metadata"][
        "labels"
    ].items()
    assert monitor["spec"]["endpoints"] == [
        {
            "port": "http",
            "path": "/metrics",
            "interval": "5s",
            "scrapeTimeout": "4s",
            "scheme": "http",
            "relabelings": [
                {"targetLabel": "job", "replacement": "ml/muster"},
                {"targetLabel": "cluster", "replacement": "east"},
            ],
            "metricRelabelings": [{"sourceLabels": ["__name__"], "regex": "python_gc_.*", "action": "drop"}],
        }
    ]
    assert monitor["metadata"]["namespace"] == "monitoring"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["ml"]}
    selector = monitor["spec"]["selector"]["matchLabels"]
    services = releases["monitoring"].of_kind("Service")
    assert [one["metadata"]["name"] for one in services if matches(selector, one["metadata"]["labels"])] == [
        "muster-http"
    ]


def test_prometheus_shows_who_it_is(releases: dict[str, Release]):
    (endpoint,) = releases["secured"].one("ServiceMonitor")["spec"]["endpoints"]
    viewer = "muster-viewer-certificate"
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "serverName": "muster.ml.svc",
        "ca": {"secret": {"name": "muster-tls", "key": "ca.crt"}},
        "cert": {"secret": {"name": viewer, "key": "tls.crt"}},
        "keySecret": {"name": viewer, "key": "tls.key"},
    }
    assert endpoint["authorization"] == {"credentials": {"name": "muster-viewer-token", "key": "token"}}


def test_every_rules_file_is_in_one_prometheus_rule(helm: Helm, other_chart: Path):
    values = values_of("monitoring")
    values["prometheusRule"]["runbooks"] = "https://example.org/muster/"
    rule = helm.release(values, chart=other_chart).one("PrometheusRule")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    # What is particular wins over what is common.
    assert rule["metadata"]["labels"]["team"] == "platform"
    files = sorted((other_chart / "rules").iterdir())
    groups = itertools.chain.from_iterable(yaml.safe_load(file.read_text())["groups"] for file in files)
    names = [group["name"] for group in groups]
    assert [group["name"] for group in rule["spec"]["groups"]] == names
    (sample,) = (group for group in rule["spec"]["groups"] if group["name"] == "sample")
    assert sample["rules"] == [
        {
            "alert": "Sample",
            "expr": "vector(1) > 0",
            "annotations": {
                "summary": "{{ $value }}",
                "runbook": "docs/operations.md#sample",
                "runbook_url": "https://example.org/muster/docs/operations.md#sample",
            },
        }
    ]


def test_every_dashboard_is_a_config_map_that_grafana_finds(helm: Helm, other_chart: Path):
    release = helm.release(values_of("monitoring"), chart=other_chart)
    files = {path.name: path.read_text() for path in (other_chart / "dashboards").iterdir()}
    found: dict[str, str] = {}
    for one in release.of_kind("ConfigMap"):
        labels = one["metadata"]["labels"]
        if labels.get("grafana_dashboard") == "1":
            assert labels["grafana"] == "main"
            assert one["metadata"]["annotations"] == {"grafana_folder": "Training"}
            found |= one["data"]
    assert {f"muster-{name}": json.loads(text) for name, text in files.items()} == {
        name: json.loads(text) for name, text in found.items()
    }


def test_monitoring_is_off_by_default(helm: Helm, other_chart: Path):
    release = helm.release(chart=other_chart)
    assert len(release.of_kind("ConfigMap")) == 1
    assert not CUSTOM & {manifest["kind"] for manifest in release.manifests}


def test_the_network_policy_lets_in_what_is_listed_and_the_test(releases: dict[str, Release]):
    spec = releases["secured"].one("NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in spec
    rules = {rule["ports"][0]["port"]: rule["from"] for rule in spec["ingress"]}
    test = releases["secured"].one("Pod")["metadata"]["labels"]
    for port, listed in values_of("secured")["networkPolicy"].items():
        if port != "enabled":
            *peers, tester = rules[port.removesuffix("From")]
            assert peers == listed
            assert matches(tester["podSelector"]["matchLabels"], test)
    open_rules = releases["network"].one("NetworkPolicy")["spec"]["ingress"]
    assert open_rules == [{"ports": [{"port": "grpc"}]}, {"ports": [{"port": "http"}]}]


def test_the_test_hook_asks_the_service(releases: dict[str, Release]):
    test = releases["network"].one("Pod")
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = test["spec"]["containers"]
    assert container["args"] == ["doctor"]
    assert container["env"] == [{"name": "MUSTER_ENDPOINT", "value": "muster.ml.svc:443"}]
    secured = releases["secured"].one("Pod")["spec"]["containers"][0]
    assert {variable["name"]: variable["value"] for variable in secured["env"]} == {
        "MUSTER_ENDPOINT": "muster.ml.svc:7550",
        "MUSTER_TLS_CA": "/etc/muster/client/ca.crt",
        "MUSTER_TLS_SERVER_NAME": "muster.ml.svc",
        "MUSTER_TLS_CERT": "/etc/muster/client/tls.crt",
        "MUSTER_TLS_KEY": "/etc/muster/client/tls.key",
        "MUSTER_TOKEN_FILE": "/etc/muster/client/token",
    }


def test_extra_objects_are_rendered(releases: dict[str, Release]):
    release = releases["extras"]
    assert release.one("ConfigMap", "muster-endpoint")["data"] == {"MUSTER_ENDPOINT": "muster.ml.svc:7550"}
    assert release.one("ConfigMap", "muster-extra")["data"] == {"page": "muster-http"}


def test_labels_are_on_every_object(releases: dict[str, Release]):
    for manifest in releases["monitoring"].manifests:
        labels = manifest["metadata"]["labels"]
        assert labels["team"] in ("training", "platform")
        assert labels["app.kubernetes.io/managed-by"] == "Helm"


def test_long_and_odd_names_stay_within_kubernetes_bounds(helm: Helm):
    release = helm.release(
        values_of("monitoring"), name="a-release-with-a-name-that-is-as-long-as-helm-admits1"
    )
    for service in release.of_kind("Service"):
        assert len(service["metadata"]["name"]) <= 63
    # Kubernetes puts the name, a hyphen and a hash of ten characters into a label.
    assert len(release.one("StatefulSet")["metadata"]["name"]) <= 52
    assert (
        helm.release({"fullnameOverride": "muster"}, name="123").one("StatefulSet")["spec"]["selector"][
            "matchLabels"
        ]["app.kubernetes.io/instance"]
        == "123"
    )


# The notes


def pasted(notes: str) -> list[Manifest]:
    """The environment that the notes tell to paste into a container."""
    lines = notes.split("Paste this", 1)[1].splitlines()
    start = lines.index("  env:")
    block = list(itertools.takewhile(str.strip, lines[start:]))
    pasted: list[Manifest] = yaml.safe_load("\n".join(block))["env"]
    return pasted


@pytest.mark.parametrize("name", FEATURES)
def test_what_the_notes_tell_to_paste_is_valid(releases: dict[str, Release], name: str):
    variables = pasted(releases[name].notes)
    container = {"name": "train", "image": "train", "env": variables}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": [container]}}
    kubernetes_validate.validate(pod, KUBERNETES[-1], strict=True)
    names = {variable["name"] for variable in variables}
    assert {"MUSTER_ENDPOINT", "POD_IP"} <= names
    assert ("MUSTER_TLS_CA" in names) == (name in {"tls-secret", "mtls", "secured"})
    assert ("MUSTER_TLS_CERT" in names) == (name in {"mtls", "secured"})
    assert ("MUSTER_TOKEN_FILE" in names) == (name in {"tokens-secret", "secured"})


def test_the_notes_name_the_endpoint_and_flags_that_torchrun_knows(releases: dict[str, Release]):
    from torch.distributed.run import get_args_parser

    notes = releases["network"].notes
    assert "value: muster.ml.svc:443" in notes
    line = notes[notes.index("torchrun ") :].split("\n\n")[0].replace("\\\n", " ")
    line = line.replace("=N ", "=2 ").replace("=GPUS", "=8")
    arguments = get_args_parser().parse_args(shlex.split(line)[1:])
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("muster", "$MUSTER_ENDPOINT")
    assert arguments.training_script == "train.py"


@pytest.mark.parametrize(
    ("name", "warnings"),
    [
        ("default", ["TLS and tokens are off"]),
        ("tls-secret", ["tokens are off"]),
        ("tokens-secret", ["TLS is off"]),
        ("secured", []),
        ("ephemeral", ["TLS and tokens are off", "persistence is off"]),
    ],
)
def test_the_notes_warn_of_what_is_open(releases: dict[str, Release], name: str, warnings: list[str]):
    said = [line for line in releases[name].notes.splitlines() if line.startswith("WARNING")]
    assert len(said) == len(warnings)
    for line, warning in zip(said, warnings, strict=True):
        assert warning in line


@pytest.mark.parametrize(
    ("values", "lacking"),
    [
        ({}, None),
        ({"tokens": TOKENS, "client": {"tokenSecret": "viewer"}}, None),
        ({"tokens": TOKENS}, "client.tokenSecret"),
        (
            {"tokens": TOKENS, "tls": {**CERTIFICATE, "ca": "PEM", "clientAuth": {"enabled": True}}},
            "client.certificateSecret and client.tokenSecret",
        ),
    ],
)
def test_the_notes_tell_to_ask_the_pod_only_if_it_can_show_who_it_is(
    helm: Helm, values: Manifest, lacking: str | None
):
    notes = helm.release({**values, "test": {"enabled": False}}).notes
    assert ("kubectl -n ml exec muster-0 -- muster get runs" in notes) is (lacking is None)
    assert (f"set {lacking} for `kubectl exec`" in notes) is (lacking is not None)


def test_the_notes_wait_for_what_every_update_strategy_has(releases: dict[str, Release]):
    """`kubectl rollout status` is an error with OnDelete."""
    for release in releases.values():
        assert "rollout status" not in release.notes
        name = release.one("StatefulSet")["metadata"]["name"]
        replicas = release.one("StatefulSet")["spec"].get("replicas", 1)
        wait = f"kubectl -n ml wait --for='jsonpath={{.status.readyReplicas}}={replicas}' --timeout=5m"
        assert f"{wait} statefulset/{name}\n" in release.notes


def test_the_notes_of_an_upgrade_tell_to_delete_a_pod_that_waits_for_it(helm: Helm):
    line = "  kubectl -n ml delete pod muster-0\n"
    waits = values_of("scheduling")
    assert line in helm.release(waits, upgrade=True).notes
    assert line not in helm.release(waits).notes
    assert line not in helm.release(upgrade=True).notes


def test_the_notes_of_a_certificate_alone_tell_what_comes_next(helm: Helm):
    values = values_of("tls-cert-manager")
    values["tls"]["enabled"] = False
    release = helm.release(values)
    assert release.one("Certificate")["spec"]["secretName"] == "muster-tls"
    assert "wait --for=condition=Ready --timeout=5m certificate/muster\n" in release.notes
    assert "TLS and tokens are off" in release.notes
