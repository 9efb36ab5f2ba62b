"""Several replicas on etcd, and the chart as a part of another chart."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.support.deploy.helm import (
    CHART,
    ETCD,
    Helm,
    Manifest,
    Release,
    container_of,
    environment_of,
    matches,
    pod_of,
    values_of,
)

AROUND = "\n## As a part of another chart\n"
"""The section whose values are those of another chart."""
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


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


def test_etcd_credentials_come_from_secrets(releases: dict[str, Release]):
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


def test_readme_lists_the_parent_chart_values_that_are_admitted_and_unused():
    readme = (CHART / "README.md").read_text()
    (sentence,) = re.findall(r"are refused\. Only (.*) are\s+admitted and not used", readme)
    assert set(re.findall(r"`(\w+)`", sentence)) == SCHEMA["properties"].keys() - VALUES.keys()
