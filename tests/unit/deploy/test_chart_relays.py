"""The relays that the chart renders: on a socket of each node, or on a port."""

from typing import Any

import pytest
import yaml

from muster.relay.listen_address import parse_listen_address
from tests.support.deploy import rules
from tests.support.deploy.daemon_sets import container_of, environment_of, pod_of
from tests.support.deploy.helm import Helm, Manifest, Release, values_of

ON_SOCKET, ON_PORT = "relay", "relay-tcp"
NAME = "muster-relay"


@pytest.fixture(scope="module")
def releases(helm: Helm) -> dict[str, Release]:
    return {name: helm.release(values_of(name)) for name in (ON_SOCKET, ON_PORT)}


def flags_of(release: Release) -> dict[str, str]:
    command, *flags = container_of(release)["args"]
    assert command == "relay"
    return {name: value for name, _, value in (flag.partition("=") for flag in flags)}


def on(**values: Any) -> Manifest:
    return {"relay": {"enabled": True, **values}}


# Where they listen


def test_the_socket_is_in_a_folder_of_the_node(releases: dict[str, Release]):
    release = releases[ON_SOCKET]
    flags, pod = flags_of(release), pod_of(release)
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    path = parse_listen_address(flags["--listen"]).path
    assert path is not None
    assert str(path.parent) == mount["mountPath"]
    assert pod["volumes"] == [
        {"name": mount["name"], "hostPath": {"path": "/var/run/training/muster", "type": "DirectoryOrCreate"}}
    ]
    assert (flags["--socket-mode"], flags["--fold-window-ms"]) == ("660", "0.5")
    assert [port["name"] for port in container["ports"]] == ["http"]
    assert not release.of_kind("Certificate")
    assert not [one for one in release.of_kind("Service") if one["metadata"]["name"] == NAME]


def test_how_long_it_waits_is_the_commands_own_default(helm: Helm):
    assert "--fold-window-ms" not in flags_of(helm.release(on()))
    assert flags_of(helm.release(on(foldWindowMs=0)))["--fold-window-ms"] == "0"


def test_audit_log_is_written_when_asked_for(helm: Helm):
    assert "--audit-log" not in flags_of(helm.release(on()))
    assert flags_of(helm.release(on(auditLog="-")))["--audit-log"] == "-"


def test_the_folder_is_given_to_the_relays_user_by_a_root_that_may_do_nothing_else(helm: Helm):
    (first,) = pod_of(helm.release(on()))["initContainers"]
    (container,) = pod_of(helm.release(on()))["containers"]
    assert first["command"] == ["chown", "10001:10001", container["volumeMounts"][0]["mountPath"]]
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert first["image"] == container["image"]
    no_group = helm.release(on(podSecurity={"runAsGroup": None}))
    assert pod_of(no_group)["initContainers"][0]["command"][1] == "10001"
    by_hand = helm.release(on(socket={"chown": False}, podSecurity={"runAsUser": None}))
    assert "initContainers" not in pod_of(by_hand)


def test_relays_with_a_node_socket_break_only_the_expected_pod_security_rules(
    helm: Helm, releases: dict[str, Release]
):
    faults = rules.restricted(pod_of(releases[ON_SOCKET]))
    assert faults == [
        "volume socket is of a forbidden kind",
        "folder: capabilities.add",
        "folder: may run as root",
    ]
    assert rules.restricted(pod_of(helm.release(on(socket={"chown": False})))) == faults[:1]


def test_on_a_port_they_are_restricted(releases: dict[str, Release]):
    pod = pod_of(releases[ON_PORT])
    assert rules.restricted(pod) == []
    for one in map(pod_of, releases.values()):
        assert (one["automountServiceAccountToken"], one["enableServiceLinks"]) == (False, False)
        for container in rules.containers(one):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {volume["secret"]["defaultMode"] for volume in pod["volumes"] if "secret" in volume} == {0o440}


def test_a_port_leads_to_the_relay_of_the_callers_node(releases: dict[str, Release]):
    service = releases[ON_PORT].one("Service", NAME)["spec"]
    assert service["internalTrafficPolicy"] == "Local"
    assert service["ports"] == [{"name": "grpc", "port": 7560, "targetPort": "grpc"}]


def test_on_a_port_they_ask_for_what_the_coordinator_asks_for(helm: Helm, releases: dict[str, Release]):
    flags = flags_of(releases[ON_PORT])
    assert set(flags) == {
        "--listen",
        "--http",
        "--tls-cert",
        "--tls-key",
        "--tls-client-ca",
        "--tokens-file",
    }
    volumes = {one["name"]: one for one in pod_of(releases[ON_PORT])["volumes"]}
    # The coordinator's key is on no node, and neither are the tokens of operators.
    assert volumes["tls"]["secret"]["secretName"] == "muster-relay-tls"
    assert volumes["tokens"]["secret"]["secretName"] == "muster-tokens-of-workers"
    (certificate,) = (
        one for one in releases[ON_PORT].of_kind("Certificate") if one["metadata"]["name"] == NAME
    )
    assert certificate["spec"]["secretName"] == "muster-relay-tls"
    assert certificate["spec"]["dnsNames"][0] == "muster-relay.ml.svc"
    # A coordinator that asks for nothing has relays that ask for nothing, and have no rights to lend.
    assert "--insecure" in flags_of(helm.release(on(tcp={"enabled": True})))


def test_on_a_port_they_may_have_secrets_of_their_own(helm: Helm):
    values = values_of(ON_PORT)
    values["relay"]["tcp"] |= {"tlsSecret": "mine", "tokensSecret": "theirs"}
    release = helm.release(values)
    named = {one["secret"]["secretName"] for one in pod_of(release)["volumes"] if "secret" in one}
    assert named == {"mine", "theirs", "muster-tls"}
    assert len(release.of_kind("Certificate")) == 1


# The coordinator


def test_they_reach_the_service_that_workers_reach(releases: dict[str, Release]):
    assert environment_of(releases[ON_SOCKET]) == {"MUSTER_ENDPOINT": "muster.ml.svc:7550"}


def test_they_show_a_token_and_a_certificate_of_their_own(helm: Helm, releases: dict[str, Release]):
    shown = {
        "MUSTER_TLS_CA": "/etc/muster/client/ca.crt",
        "MUSTER_TLS_CERT": "/etc/muster/client/tls.crt",
        "MUSTER_TLS_KEY": "/etc/muster/client/tls.key",
        "MUSTER_TOKEN_FILE": "/etc/muster/client/token",
    }
    # Another name than the Service's must be one of the certificate's.
    named = values_of(ON_PORT)["relay"]["upstream"]
    assert environment_of(releases[ON_PORT]) == {"MUSTER_ENDPOINT": named, **shown}
    (certificate,) = (
        one for one in releases[ON_PORT].of_kind("Certificate") if one["metadata"]["name"] == "muster"
    )
    assert named.partition(":")[0] in certificate["spec"]["dnsNames"]
    (client,) = (one for one in pod_of(releases[ON_PORT])["volumes"] if one["name"] == "client")
    names = {source["secret"]["name"] for source in client["projected"]["sources"]}
    assert names == {"muster-tls", "muster-relay-certificate", "muster-relay-token"}
    values = values_of(ON_PORT)
    values["client"]["caSecret"] = "both"
    (client,) = (one for one in pod_of(helm.release(values))["volumes"] if one["name"] == "client")
    assert client["projected"]["sources"][0]["secret"]["name"] == "both"
    values = values_of(ON_PORT)
    values["relay"]["upstream"] = ""
    assert environment_of(helm.release(values)) == {
        "MUSTER_ENDPOINT": "muster.ml.svc:7550",
        "MUSTER_TLS_SERVER_NAME": "muster.ml.svc",
        **shown,
    }


@pytest.mark.parametrize("name", [ON_SOCKET, ON_PORT])
def test_network_policy_is_as_the_values_say(releases: dict[str, Release], name: str):
    release = releases[name]
    theirs = release.one("NetworkPolicy", NAME)["spec"]
    coordinator, *_, dns = theirs["egress"]
    of_coordinator = release.one("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert is_of(coordinator["to"][0], of_coordinator)
    assert {one["port"] for one in dns["ports"]} == {53}
    listed = values_of(name)["networkPolicy"]["grpcFrom"]
    http = {"ports": [{"port": "http"}]}
    assert theirs["ingress"] == (
        [http] if name == ON_SOCKET else [{"ports": [{"port": "grpc"}], "from": listed}, http]
    )


def is_of(peer: Manifest, labels: Manifest) -> bool:
    selected: Manifest = peer["podSelector"]["matchLabels"]
    return selected.items() <= labels.items()


def test_names_that_are_not_the_pods_may_be_anywhere(helm: Helm):
    values = {
        "networkPolicy": {"enabled": True},
        "advertise": "$(POD_NAME).muster.example.org:7650",
        **on(upstream="a.example.org:7550,b.example.org:7550"),
    }
    _, elsewhere, _ = helm.release(values).one("NetworkPolicy", NAME)["spec"]["egress"]
    assert elsewhere == {"ports": [{"port": 7550}, {"port": 7650}]}


# Nodes, probes, Prometheus


def test_nodes_of_the_coordinator_are_not_theirs(helm: Helm):
    elsewhere = {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"operator": "Exists"}], **on()}
    assert not pod_of(helm.release(elsewhere)).keys() & {"nodeSelector", "tolerations"}


def test_they_are_replaced_some_at_a_time_or_by_hand(helm: Helm, releases: dict[str, Release]):
    default = helm.release(on()).one("DaemonSet")["spec"]["updateStrategy"]
    assert default == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}}
    assert releases[ON_PORT].one("DaemonSet")["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_prometheus_scrapes_them_as_a_job_of_their_own(helm: Helm, releases: dict[str, Release]):
    (endpoint,) = releases[ON_SOCKET].one("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "http"
    # The dashboards find the relays of a coordinator by its job and `-relay`.
    (coordinators,) = releases[ON_SOCKET].one("ServiceMonitor")["spec"]["endpoints"]
    (job,) = (one["replacement"] for one in coordinators["relabelings"] if one["targetLabel"] == "job")
    assert endpoint["relabelings"] == [
        {"targetLabel": "job", "replacement": f"{job}-relay"},
        {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"},
    ]
    elsewhere = helm.release(values_of("monitoring") | on()).one("PodMonitor")
    assert elsewhere["metadata"]["namespace"] == "monitoring"
    assert elsewhere["spec"]["namespaceSelector"] == {"matchNames": ["ml"]}
    assert not releases[ON_PORT].of_kind("PodMonitor")


def test_the_notes_say_how_workers_reach_them(releases: dict[str, Release]):
    notes = releases[ON_SOCKET].notes
    block = notes[notes.index("Workers reach the relay of their node") :].split("\n\n")[1]
    pod = yaml.safe_load(block)
    (variable,) = pod["env"]
    assert variable["value"] == "unix:///run/muster/relay.sock,muster.ml.svc:7550"
    (mount,), (volume,) = pod["volumeMounts"], pod["volumes"]
    assert mount["mountPath"] == "/run/muster"
    assert mount["readOnly"] is True
    assert volume["hostPath"]["path"] == "/var/run/training/muster"
    assert pod["securityContext"]["supplementalGroups"] == [10001]
    assert "muster-relay.ml.svc:7560,muster.ml.svc:7550" in releases[ON_PORT].notes
