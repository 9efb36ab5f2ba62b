"""Values that the chart takes and refuses, and what it says."""

import inspect
import json
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

from muster.service.cli.serving.serve import serve
from tests.support.deploy.helm import (
    CERTIFICATE,
    CHART,
    ETCD,
    KUBERNETES,
    TOKENS,
    Helm,
    HelmError,
    Manifest,
    container_of,
    etcd,
)

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
MADE_BY_THE_CHART = {
    "config",
    "listen",
    "http",
    "state",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "advertise",
    "etcd_ca",
    "etcd_cert",
    "etcd_key",
    "etcd_user",
    "etcd_password_file",
    "tokens_file",
    "insecure",
    "http_tls",
    "http_tokens",
}
"""Flags that come from values of other names, or are the chart's own business."""

FLAGS = set(inspect.signature(serve).parameters) - {"ctx"}


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


def test_chart_has_a_value_for_every_flag():
    assert set(SCHEMA["properties"]["settings"]["properties"]) == FLAGS - MADE_BY_THE_CHART


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
        ({"relay": {"foldWindowMs": -1}}, "foldWindowMs"),
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
def test_release_name_that_makes_an_invalid_service_name_is_refused(helm: Helm, name: str):
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
            "set the folder's owner in relay.podSecurity.runAsUser",
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


SECURED = {"tls": {"enabled": True, "existingSecret": "s"}}
TOKENS = {"enabled": True, "existingSecret": "s"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "TLS is off: .* Set tls.enabled=true and tokens.enabled=true"),
        ({"tokens": TOKENS}, "TLS is off"),
        (SECURED, "tokens are off: .* Set tokens.enabled=true or tls.clientAuth.enabled=true"),
        (
            {"tls": SECURED["tls"] | {"http": False}, "tokens": TOKENS},
            "^.*tls.http=false: every client that reaches the HTTP port",
        ),
        (
            {"tls": SECURED["tls"] | {"http": False}, "tokens": TOKENS | {"http": False}},
            "tls.http=false and tokens.http=false: every client",
        ),
        (
            SECURED | {"tokens": TOKENS | {"http": False}},
            "tokens.http=false: every client",
        ),
    ],
)
def test_values_without_tls_or_known_callers_are_refused(helm: Helm, values: Manifest, said: str):
    closed = values | {"test": {"enabled": False}, "allowInsecure": False}
    with pytest.raises(HelmError, match=said):
        helm.release(closed)
    opened = helm.release(closed | {"allowInsecure": True}).one("ConfigMap")["data"]["muster.toml"]
    assert "insecure = true" in opened.splitlines()


def test_secured_coordinator_is_not_told_to_be_insecure(helm: Helm):
    values = SECURED | {"tokens": TOKENS, "test": {"enabled": False}, "allowInsecure": False}
    assert "insecure" not in helm.release(values).one("ConfigMap")["data"]["muster.toml"]
