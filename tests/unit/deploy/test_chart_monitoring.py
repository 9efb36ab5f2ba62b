"""Certificates, monitoring and the objects around the coordinator."""

import itertools
import json
from pathlib import Path

import yaml

from tests.support.deploy.helm import (
    CUSTOM,
    Helm,
    Release,
    matches,
    values_of,
)


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


def test_prometheus_authenticates_with_certificate_and_token(releases: dict[str, Release]):
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


def test_prometheus_trusts_the_authorities_of_another_secret(helm: Helm):
    values = values_of("secured")
    values["client"]["caSecret"] = "both"
    (endpoint,) = helm.release(values).one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["tlsConfig"]["ca"] == {"secret": {"name": "both", "key": "ca.crt"}}


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
