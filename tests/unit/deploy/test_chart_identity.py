"""Service accounts in the chart: what the coordinator gets the cluster's keys with, and what it reads."""

import base64
from pathlib import Path
from typing import Any

import pytest

from muster.service.security import tokens
from muster.service.security.grants import Role
from muster.service.security.identity.rules import FetchedFrom, ServiceAccounts
from tests.support.deploy.helm import Helm, HelmError, Manifest, Release, values_of

KUBERNETES = Path("/etc/muster/kubernetes")
ON = {"enabled": True, "entries": [{"namespace": "a", "account": "*", "role": "worker"}]}


@pytest.fixture(scope="module")
def release(helm: Helm) -> Release:
    return helm.release(values_of("service-accounts"))


def keys_volume(pod: Manifest) -> list[Manifest]:
    """The sources of the volume that is mounted where the tokens file says."""
    mounts = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    found: list[Manifest] = volumes[mounts[str(KUBERNETES)]]["projected"]["sources"]
    return found


def test_the_tokens_file_is_one_that_the_coordinator_reads(release: Release, tmp_path: Path):
    file = tmp_path / "tokens.toml"
    (secret,) = release.of_kind("Secret")
    file.write_bytes(base64.b64decode(secret["data"]["tokens.toml"]))
    found = tokens.load(file)
    assert [grant.name for grant in found.grants] == ["monitoring"]
    (issuer,) = found.issuers
    assert (issuer.url, issuer.audience) == ("https://kubernetes.default.svc.cluster.local", "muster")
    assert issuer.keys == FetchedFrom(
        url="https://kubernetes.default.svc/openid/v1/jwks",
        ca_file=KUBERNETES / "ca.crt",
        token_file=KUBERNETES / "token",
    )
    assert found.rules == (
        ServiceAccounts(
            issuer="cluster", namespace="team-a", account="*", role=Role.WORKER, runs=("team-a.*",)
        ),
        ServiceAccounts(
            issuer="cluster", namespace="ml-ops", account='on "call"', role=Role.OPERATOR, runs=("*",)
        ),
    )


def test_the_pod_has_a_token_of_its_own_and_no_other(release: Release):
    pod = release.one("StatefulSet")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert keys_volume(pod) == [
        # Without an audience it is for the API server.
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3_600}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    ]


def test_without_service_accounts_there_is_none(helm: Helm):
    pod = helm.release(values_of("tokens-inline")).one("StatefulSet")["spec"]["template"]["spec"]
    assert str(KUBERNETES) not in {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert "serviceAccountToken" not in str(pod["volumes"])


def test_the_network_policy_lets_it_out_to_the_api_server(helm: Helm, release: Release):
    server, dns = release.one("NetworkPolicy")["spec"]["egress"]
    ports = [{"port": 443}, {"port": 6_443}]
    assert server == {"ports": ports, "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}
    assert {one["port"] for one in dns["ports"]} == {53}
    anywhere = values_of("service-accounts") | {"networkPolicy": {"enabled": True}}
    assert helm.release(anywhere).one("NetworkPolicy")["spec"]["egress"][0] == {"ports": ports}


def test_with_etcd_it_is_let_out_to_both(helm: Helm):
    values = values_of("service-accounts") | {
        "state": {"type": "etcd", "etcd": {"endpoints": ["etcd:2379"]}},
        "networkPolicy": {"enabled": True},
    }
    rules = helm.release(values).one("NetworkPolicy")["spec"]["egress"]
    assert [sorted(port["port"] for port in one["ports"] if port["port"] != "grpc") for one in rules] == [
        [443, 6_443],
        [2_379],
        [],
        [53, 53],
    ]


def test_a_relay_on_a_port_checks_the_same_tokens(helm: Helm):
    relay = {
        "enabled": True,
        "tcp": {"enabled": True, "tlsSecret": "s", "tokensSecret": "w"},
        "client": {"tokenSecret": "t"},
    }
    release = helm.release(values_of("service-accounts") | {"relay": relay})
    assert keys_volume(release.one("DaemonSet")["spec"]["template"]["spec"])
    policy = release.one("NetworkPolicy", "muster-relay")["spec"]
    assert [{"port": 443}, {"port": 6_443}] in [rule["ports"] for rule in policy["egress"]]
    # On a socket it asks for none.
    socket = helm.release(values_of("service-accounts") | {"relay": relay | {"tcp": {"enabled": False}}})
    assert "serviceAccountToken" not in str(socket.one("DaemonSet"))


def test_the_notes_say_what_a_job_mounts(release: Release):
    assert "serviceAccountToken: {audience: muster, path: token}" in release.notes
    assert "A token of role worker in Secret" not in release.notes


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"enabled": True, "serviceAccounts": {"enabled": True}}, "give the tokens in one way"),
        ({"enabled": True, "existingSecret": "s", "serviceAccounts": ON}, "give the tokens in one way"),
        ({"enabled": True, "serviceAccounts": ON | {"enabled": False}}, "serviceAccounts.enabled is false"),
        ({"serviceAccounts": {"enabled": True}}, "tokens.enabled is false"),
    ],
)
def test_values_that_contradict_each_other_are_refused(helm: Helm, given: dict[str, Any], sentence: str):
    with pytest.raises(HelmError, match=sentence):
        helm.release({"tokens": given, "test": {"enabled": False}})


def test_a_secret_of_ones_own_may_name_the_cluster(helm: Helm):
    given = {"enabled": True, "existingSecret": "mine", "serviceAccounts": {"enabled": True}}
    release = helm.release({"tokens": given, "test": {"enabled": False}})
    assert keys_volume(release.one("StatefulSet")["spec"]["template"]["spec"])
    assert release.of_kind("Secret") == []
