"""What the relays, the watchers and the keepers that the chart renders have in common."""

import pytest

from tests.support.deploy import rules
from tests.support.deploy.daemon_sets import let_in_by, metadata_of, pod_of, probes_of
from tests.support.deploy.helm import CERTIFICATE, TOKENS, Helm, HelmError, Manifest, values_of

KINDS = ("relay", "watcher", "keeper")
TOKEN_NEEDED = ({"tokens": TOKENS}, "need a token, too")
CERTIFICATE_NEEDED = (
    {"tls": CERTIFICATE | {"ca": "PEM", "clientAuth": {"enabled": True}}},
    "need a certificate, too",
)


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_none_unless_one_asks(helm: Helm, kind: str):
    release = helm.release({"serviceMonitor": {"enabled": True}, "networkPolicy": {"enabled": True}})
    assert not [one for one in release.manifests if kind in one["metadata"]["name"]]


@pytest.mark.parametrize("kind", KINDS)
def test_under_a_quota_every_container_says_what_it_needs(helm: Helm, kind: str):
    quota = {"requests.cpu", "requests.memory", "limits.cpu", "limits.memory"}
    limited = {"enabled": True, "resources": {"limits": {"cpu": 1}}}
    assert rules.quota(pod_of(helm.release({kind: limited})), quota) == []


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_on_the_nodes_that_the_values_name(helm: Helm, kind: str):
    release, values = helm.release(values_of(kind)), values_of(kind)[kind]
    keys = {"nodeSelector", "tolerations", "priorityClassName"} & values.keys()
    assert keys >= {"nodeSelector", "priorityClassName"}
    assert {key: pod_of(release)[key] for key in keys} == {key: values[key] for key in keys}
    assert values["podLabels"].items() <= metadata_of(release)["labels"].items()
    assert metadata_of(release)["annotations"] == values["podAnnotations"]


@pytest.mark.parametrize("name", [*KINDS, "relay-tcp"])
def test_network_policy_of_the_coordinators_lets_them_in(helm: Helm, name: str):
    assert len(let_in_by(helm.release(values_of(name)))) == 1


@pytest.mark.parametrize("name", ["relay", "relay-tcp", "watcher"])
def test_probes_ask_over_plain_http(helm: Helm, name: str):
    assert probes_of(helm.release(values_of(name))) == {
        "startupProbe": ("/healthz", "HTTP"),
        "livenessProbe": ("/healthz", "HTTP"),
        "readinessProbe": ("/readyz", "HTTP"),
    }


@pytest.mark.parametrize("kind", ["watcher", "keeper"])
@pytest.mark.parametrize(("values", "words"), [TOKEN_NEEDED, CERTIFICATE_NEEDED])
def test_without_credentials_for_the_coordinator_they_are_refused(
    helm: Helm, kind: str, values: Manifest, words: str
):
    with pytest.raises(HelmError, match=f"the {kind}s {words}"):
        helm.release({**values, "test": {"enabled": False}, kind: {"enabled": True}})
