"""What the real helm does to a cluster with the chart: installed, upgraded, refused and rolled back."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deploy import cluster as support
from tests.support.deploy.cluster import Client, Cluster
from tests.support.deploy.helm import CHART, Helm, HelmError, Manifest, values_of

TLS = {"tls": {"enabled": True, "existingSecret": "certificate"}}
ON_DELETE = {"updateStrategy": {"type": "OnDelete"}}
CHART_0_1_0 = CHART.parents[2] / "tests/releases/muster-0.1.0.tgz"
CERT_MANAGER = {"certManager": {"enabled": True, "issuerRef": {"name": "training"}}}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with support.running() as running:
        yield running


@pytest.fixture
def client(helm: Helm, cluster: Cluster) -> Client:
    return Client(helm, cluster)


def pod_of(cluster: Cluster) -> Manifest:
    """What the next pod is made of."""
    return copy.deepcopy(cluster.one("StatefulSet")["spec"]["template"])


def configuration_of(cluster: Cluster, pod: Manifest) -> str:
    """What a pod finds in its configuration at each start."""
    (volume,) = (one for one in pod["spec"]["volumes"] if one["name"] == "config")
    return str(cluster.one("ConfigMap", volume["configMap"]["name"])["data"]["muster.toml"])


# Names


def test_two_of_them_in_one_release_are_told_apart(client: Client, cluster: Cluster, umbrella: Path):
    """Though the name of one begins with that of the other."""
    both = {"muster": {"enabled": True}, "muster-2": {"enabled": True}}
    client.install(both, umbrella)
    client.upgrade(both, umbrella)
    assert cluster.names("StatefulSet") == {"muster", "muster-muster-2"}
    with pytest.raises(HelmError, match=r'is StatefulSet "muster-muster-2".* would be "roll-call"'):
        client.upgrade({**both, "muster-2": {"enabled": True, "fullnameOverride": "roll-call"}}, umbrella)


def test_an_upgrade_that_would_rename_it_by_another_alias_is_refused(
    client: Client, cluster: Cluster, umbrella: Path
):
    client.install({"muster": {"enabled": True}}, umbrella)
    before = list(cluster.done)
    sentence = (
        r'is StatefulSet "muster", of chart muster-.* muster-2 would be "muster-muster-2".*'
        "fullnameOverride=muster and nameOverride=muster"
    )
    other: Manifest = {"muster": {"enabled": False}, "muster-2": {"enabled": True}}
    with pytest.raises(HelmError, match=sentence):
        client.upgrade(other, umbrella)
    assert cluster.done == before
    other["muster-2"] |= {"fullnameOverride": "muster", "nameOverride": "muster"}
    client.upgrade(other, umbrella)
    assert cluster.names("StatefulSet") == {"muster"}


def test_one_of_chart_0_1_0_that_gets_an_alias_is_refused(client: Client, cluster: Cluster, umbrella: Path):
    client.install(chart=CHART_0_1_0)
    before = list(cluster.done)
    with pytest.raises(HelmError, match=r"of chart muster-0\.1\.0, and muster-2 would be"):
        client.upgrade({"muster": {"enabled": False}, "muster-2": {"enabled": True}}, umbrella)
    assert cluster.done == before


def test_a_second_one_is_added_by_its_name(client: Client, cluster: Cluster, umbrella: Path):
    client.install({"muster": {"enabled": True}}, umbrella)
    both: Manifest = {"muster": {"enabled": True}, "muster-2": {"enabled": True}}
    with pytest.raises(HelmError, match=r"one more beside it, set fullnameOverride=muster-muster-2\."):
        client.upgrade(both, umbrella)
    both["muster-2"]["fullnameOverride"] = "muster-muster-2"
    client.upgrade(both, umbrella)
    assert cluster.names("StatefulSet") == {"muster", "muster-muster-2"}
    # By now it is there, and is not asked again.
    del both["muster-2"]["fullnameOverride"]
    client.upgrade(both, umbrella)


def test_the_stateful_set_of_one_of_two_may_be_away_during_an_upgrade(
    client: Client, cluster: Cluster, umbrella: Path
):
    both: Manifest = {"muster": {"enabled": True}, "muster-2": {"enabled": True}}
    client.install(both, umbrella)
    cluster.delete(("StatefulSet", "ml", "muster-muster-2"))
    both["muster-2"]["persistence"] = {"size": "10Gi"}
    client.upgrade(both, umbrella)
    assert cluster.names("StatefulSet") == {"muster", "muster-muster-2"}


@pytest.mark.parametrize("values", [{"fullnameOverride": "roll-call"}, {"nameOverride": "roll-call"}])
def test_an_upgrade_that_would_rename_the_coordinator_is_refused_before_anything_changes(
    client: Client, cluster: Cluster, values: Manifest
):
    client.install()
    before = list(cluster.done)
    sentence = r'is StatefulSet "muster".* would be "(muster-)?roll-call".*fullnameOverride=muster'
    with pytest.raises(HelmError, match=sentence):
        client.upgrade(values)
    assert cluster.done == before


def test_an_upgrade_that_would_select_another_pod_is_refused_before_the_service_selects_none(
    helm: Helm, cluster: Cluster
):
    client = Client(helm, cluster, "training-muster")
    client.install()
    before = list(cluster.done)
    with pytest.raises(
        HelmError, match=r"app\.kubernetes\.io/name=muster, which Kubernetes lets nobody change"
    ):
        client.upgrade({"nameOverride": "training"})
    assert cluster.done == before


def test_an_upgrade_that_keeps_another_name_passes_and_other_releases_do_not_matter(
    helm: Helm, client: Client, cluster: Cluster
):
    names = {"fullnameOverride": "roll-call"}
    client.install(names)
    other = Client(helm, cluster, "other")
    other.install()
    client.upgrade({**names, "image": {"tag": "2"}})
    other.upgrade()
    assert cluster.names("StatefulSet") == {"roll-call", "other-muster"}


def test_the_stateful_set_may_be_away_during_an_upgrade(client: Client, cluster: Cluster):
    """As it is while the volume grows (docs/kubernetes.md)."""
    client.install()
    pod = pod_of(cluster)
    cluster.delete(("StatefulSet", "ml", "muster"))
    client.upgrade({"persistence": {"size": "10Gi"}})
    assert cluster.names("StatefulSet") == {"muster"}
    # The pod that runs is of the same revision, and is not replaced.
    assert pod_of(cluster) == pod


def test_an_upgrade_that_is_rendered_without_a_cluster_passes(helm: Helm):
    release = helm.release({"fullnameOverride": "roll-call"}, upgrade=True)
    assert release.one("StatefulSet")["metadata"]["name"] == "roll-call"


# Configuration


def test_a_refused_upgrade_leaves_the_running_pod_the_configuration_it_was_made_with(
    client: Client, cluster: Cluster
):
    client.install()
    pod = pod_of(cluster)
    configuration = configuration_of(cluster, pod)
    with pytest.raises(HelmError, match=r"spec\.volumeClaimTemplates may not change"):
        client.upgrade({**TLS, "persistence": {"size": "2Gi"}, "settings": {"session_ttl": 20}})
    assert pod_of(cluster) == pod
    assert configuration_of(cluster, pod) == configuration
    client.rollback()
    assert pod_of(cluster) == pod
    assert configuration_of(cluster, pod) == configuration
    # Nothing of the upgrade stays.
    assert len(cluster.names("ConfigMap")) == 1


@pytest.mark.parametrize("change", [TLS, {"settings": {"session_ttl": 20}}])
def test_a_pod_that_waits_to_be_deleted_keeps_the_configuration_it_was_made_with(
    client: Client, cluster: Cluster, change: Manifest
):
    client.install(ON_DELETE)
    pod = pod_of(cluster)
    configuration = configuration_of(cluster, pod)
    client.upgrade(ON_DELETE | change)
    assert configuration_of(cluster, pod) == configuration
    assert configuration_of(cluster, pod_of(cluster)) != configuration


def test_switch_to_on_delete_keeps_the_configuration_of_the_running_pod(client: Client, cluster: Cluster):
    client.install()
    client.upgrade(ON_DELETE)
    pod = pod_of(cluster)
    client.upgrade(ON_DELETE | {"settings": {"session_ttl": 20}})
    assert "session_ttl = 10\n" in configuration_of(cluster, pod)


def test_a_configuration_that_no_pod_reads_is_removed(client: Client, cluster: Cluster):
    client.install()
    client.upgrade({"settings": {"session_ttl": 20}})
    assert len(cluster.names("ConfigMap")) == 1
    created = next(index for index, done in enumerate(cluster.done) if done.startswith("apply StatefulSet"))
    removed = next(index for index, done in enumerate(cluster.done) if done.startswith("delete ConfigMap"))
    assert created < removed


def test_a_rollback_brings_the_configuration_back(client: Client, cluster: Cluster):
    client.install()
    configuration = configuration_of(cluster, pod_of(cluster))
    client.upgrade({"settings": {"session_ttl": 20}})
    client.rollback()
    assert configuration_of(cluster, pod_of(cluster)) == configuration


def test_tokens_in_the_values_change_without_a_restart(client: Client, cluster: Cluster):
    values = values_of("tokens-inline")
    client.install(values)
    pod, secret = pod_of(cluster), copy.deepcopy(cluster.one("Secret"))
    values["tokens"]["entries"].pop()
    client.upgrade(values)
    assert pod_of(cluster) == pod
    assert cluster.one("Secret")["data"] != secret["data"]


# Secrets of others


def made_by_others(cluster: Cluster, name: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": {}}
    cluster.write("create", ("Secret", "ml", name), secret)


@pytest.mark.parametrize(("kind", "name"), [("tokens", "muster-tokens"), ("tls", "muster-tls")])
def test_one_moves_from_values_to_a_secret_and_back(client: Client, cluster: Cluster, kind: str, name: str):
    """Under the names of docs/kubernetes.md, and of cert-manager's Secret."""
    inline = values_of(f"{kind}-inline")
    existing = {**inline, kind: {"enabled": True, "existingSecret": name}}
    client.install(inline)
    made_by_others(cluster, name)
    client.upgrade(existing)
    assert cluster.names("Secret") == {name}
    client.upgrade(inline)
    assert cluster.names("Secret") == {name, f"muster-{kind}-inline"}


@pytest.mark.parametrize("kind", ["tokens", "tls"])
def test_a_secret_of_ones_own_may_not_have_the_name_of_the_charts(helm: Helm, kind: str):
    values = {kind: {"enabled": True, "existingSecret": f"muster-{kind}-inline"}, "test": {"enabled": False}}
    with pytest.raises(
        HelmError, match=f'{kind}.existingSecret: "muster-{kind}-inline" is the name of the Secret'
    ):
        helm.release(values)


# cert-manager


def test_another_certificate_stays_until_that_of_cert_manager_is_there(client: Client, cluster: Cluster):
    client.install(TLS)
    with pytest.raises(
        HelmError, match="where it is on, apply a Certificate of your own with secretName muster-tls"
    ):
        client.upgrade({"tls": {"enabled": True, **CERT_MANAGER}})
    made_by_others(cluster, "muster-tls")
    client.upgrade({"tls": {"enabled": True, **CERT_MANAGER}})


def test_tls_of_cert_manager_waits_for_the_certificate_in_a_live_release(client: Client, cluster: Cluster):
    client.install()
    pod = pod_of(cluster)
    with pytest.raises(HelmError, match='cert-manager has not made Secret "muster-tls" yet'):
        client.upgrade({"tls": {"enabled": True, **CERT_MANAGER}})
    client.upgrade({"tls": CERT_MANAGER})
    assert cluster.one("Certificate")["spec"]["secretName"] == "muster-tls"
    assert pod_of(cluster) == pod
    made_by_others(cluster, "muster-tls")
    client.upgrade({"tls": {"enabled": True, **CERT_MANAGER}})
    assert pod_of(cluster) != pod


def test_a_release_that_waits_for_its_first_certificate_can_be_corrected(client: Client, cluster: Cluster):
    client.install({"tls": {"enabled": True, **CERT_MANAGER}})
    right = {"certManager": {"enabled": True, "issuerRef": {"name": "right"}}}
    client.upgrade({"tls": {"enabled": True, **right}})
    assert cluster.one("Certificate")["spec"]["issuerRef"]["name"] == "right"


# From chart 0.1.0


def test_one_that_was_stopped_for_a_restore_is_not_started_by_the_way(client: Client, cluster: Cluster):
    """0.1.0 set the number of replicas: without it the API server takes its default, which is 1."""
    client.install(chart=CHART_0_1_0)
    cluster.scale("muster", 0)
    before = list(cluster.done)
    with pytest.raises(HelmError, match=r'"muster" is scaled to 0 and of chart 0\.1\.0.*Scale it to 1 first'):
        client.upgrade()
    assert cluster.done == before
    cluster.scale("muster", 1)
    client.upgrade()
    cluster.scale("muster", 0)
    client.upgrade()
    assert cluster.one("StatefulSet")["spec"]["replicas"] == 0


def test_documented_annotation_keeps_the_configuration_of_a_0_1_0_pod_during_an_upgrade(
    client: Client, cluster: Cluster
):
    """With `OnDelete` the pod runs on, and 0.1.0 let helm remove what it reads."""
    text = (CHART.parents[2] / "docs/kubernetes.md").read_text()
    line = r"annotate (\S+) -l app.kubernetes.io/instance=muster,helm.sh/chart=(\S+) (\S+)=(\S+)$"
    ((kinds, chart, key, value),) = re.findall(line, text, re.M)
    values = {k: v for k, v in values_of("tokens-inline").items() if k != "allowInsecure"} | ON_DELETE
    client.install(values, CHART_0_1_0)
    pod, secrets = pod_of(cluster), cluster.names("Secret")
    for one in cluster.objects.values():
        if one["kind"].lower() in kinds.split(",") and one["metadata"]["labels"]["helm.sh/chart"] == chart:
            one["metadata"].setdefault("annotations", {})[key] = value
    client.upgrade(values)
    assert configuration_of(cluster, pod)
    assert secrets < cluster.names("Secret")


# Restoring, removing


def test_an_upgrade_leaves_a_coordinator_that_was_stopped_for_a_restore_stopped(
    client: Client, cluster: Cluster
):
    client.install()
    cluster.scale("muster", 0)
    client.upgrade({"settings": {"session_ttl": 20}})
    assert cluster.one("StatefulSet")["spec"]["replicas"] == 0


@pytest.mark.parametrize(("values", "left"), [({}, set()), (ON_DELETE, {"ConfigMap", "Secret"})])
def test_the_documented_line_removes_what_helm_leaves(
    helm: Helm, client: Client, cluster: Cluster, values: Manifest, left: set[str]
):
    text = (CHART.parents[2] / "docs/kubernetes.md").read_text()
    (line,) = re.findall(
        r"kubectl -n muster delete (pod,\S+) -l app.kubernetes.io/instance=(\S+),(\S+)$", text, re.M
    )
    kinds, name, label = line
    client.install(values_of("tokens-inline") | values)
    client.uninstall()
    assert cluster.kinds() == left
    test = helm.release(name=name).one("Pod")
    for one in (*cluster.objects.values(), test):
        assert one["kind"].lower() in kinds.split(",")
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == name
        assert label in labels
    # The coordinator's pod goes with its StatefulSet.
    assert label not in helm.release().one("StatefulSet")["spec"]["template"]["metadata"]["labels"]


# Between SQLite and etcd

REPLICATED = values_of("etcd")


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ({}, REPLICATED, "is in SQLite, on its volume, and with state.type=etcd"),
        ({"persistence": {"enabled": False}}, REPLICATED, "is in SQLite, and with state.type=etcd"),
        (REPLICATED, {"commonLabels": {"team": "a"}}, "is in etcd, and with state.type=sqlite"),
    ],
)
def test_an_upgrade_that_would_begin_without_the_state_is_refused(
    client: Client, cluster: Cluster, before: Manifest, after: Manifest, sentence: str
):
    client.install(before)
    done = list(cluster.done)
    with pytest.raises(HelmError, match=sentence):
        client.upgrade(after)
    assert cluster.done == done


def test_it_moves_to_etcd_when_its_stateful_set_is_gone(client: Client, cluster: Cluster):
    """As documented: the volume's claim is no business of helm's, and stays."""
    client.install()
    cluster.delete(("StatefulSet", "ml", "muster"))
    client.upgrade(REPLICATED)
    assert cluster.one("StatefulSet")["spec"]["replicas"] == 3
    client.upgrade({**REPLICATED, "replicas": 5})
    assert cluster.one("StatefulSet")["spec"]["replicas"] == 5
