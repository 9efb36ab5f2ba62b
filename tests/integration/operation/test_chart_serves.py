"""What the chart renders runs: the real ``muster serve``, asked by its probes and by ``helm test``."""

import json
import os
import re
import subprocess
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from lab.authority import Authority
from lab.patience import PATIENCE, until
from lab.processes import etcd
from lab.processes.command import Job
from muster.client.calls import reason_of
from muster.v1 import session_pb2, session_pb2_grpc
from tests.support.deploy.helm import CHART, Helm, Release, values_of
from tests.support.deploy.kubelet import Container, Files, Node

HOST = "muster.ml.svc"
VIEWER, WORKER = "a-token-for-who-looks-on", "a-token-for-those-who-train"
ETCD_PASSWORD = "of-the-user-muster"
CREDENTIALS = ("MUSTER_TLS_CERT", "MUSTER_TLS_KEY", "MUSTER_TOKEN_FILE")


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The Secrets that the ci/ values name, and what cert-manager would make."""
    folder = tmp_path_factory.mktemp("authority")
    ours, training = Authority(folder, "ours"), Authority(folder, "training")
    serving = ours.issue("serving", HOST)

    def pair(name: str, authority: Authority) -> Files:
        made = authority.issue(name, name)
        return {"tls.crt": made.cert.read_bytes(), "tls.key": made.key.read_bytes()}

    certificate = {
        "tls.crt": serving.cert.read_bytes(),
        "tls.key": serving.key.read_bytes(),
        "ca.crt": ours.ca.read_bytes(),
    }
    tokens = f'[[token]]\nname = "look"\nrole = "viewer"\ntoken = "{VIEWER}"\n'
    tokens += f'[[token]]\nname = "team-a"\nrole = "worker"\nruns = ["team-a-*"]\ntoken = "{WORKER}"\n'
    return {
        "muster-certificate": certificate,
        "muster-tls": certificate,
        "training-ca": {"ca.crt": training.ca.read_bytes()},
        "viewer-of-ours": pair("viewer-of-ours", ours),
        "viewer-of-training": pair("viewer-of-training", training),
        "muster-tokens-of-all-teams": {"tokens.toml": tokens.encode()},
        "muster-viewer-token": {"token": VIEWER.encode()},
    }


def node_of(release: Release, folder: Path, secrets: dict[str, Files], viewer: str = "ours") -> Node:
    return Node(release, folder, secrets | {"muster-viewer-certificate": secrets[f"viewer-of-{viewer}"]})


def coordinator_of(release: Release, node: Node) -> Container:
    return Container(node, release.one("StatefulSet")["spec"]["template"]["spec"], "coordinator")


def scheme_of(release: Release) -> str:
    container = release.one("StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    return str(container["readinessProbe"]["httpGet"]["scheme"])


@pytest.mark.parametrize(
    ("name", "viewer", "strangers"),
    [
        ("default", "ours", (0, 200)),
        ("settings", "ours", (0, 200)),
        ("extras", "ours", (0, 200)),
        ("tls-secret", "ours", (0, 200)),
        ("mtls", "training", (3, 403)),
        ("tokens-secret", "ours", (1, 200)),
        ("secured", "ours", (3, 403)),
    ],
)
def test_the_pod_starts_is_ready_is_healthy_and_ends_in_time(
    helm: Helm, tmp_path: Path, secrets: dict[str, Files], name: str, viewer: str, strangers: tuple[int, int]
):
    release = helm.release(values_of(name))
    node = node_of(release, tmp_path, secrets, viewer)
    with coordinator_of(release, node) as coordinator:
        coordinator.started()
        assert coordinator.probe("livenessProbe")
        assert coordinator.probe("readinessProbe")
        assert coordinator.mounts["/var/lib/muster"].joinpath("muster.db").exists()
        # `kubectl exec`.
        asked = coordinator.run("get", "runs", "-o", "json")
        assert asked.returncode == 0, asked.stderr
        refused = coordinator.run("get", "runs", without=CREDENTIALS)
        http = {"port": "http", "scheme": scheme_of(release), "path": "/metrics"}
        assert (refused.returncode, coordinator.ask(http)) == strangers, refused.stderr
        assert coordinator.stopped() == 0, coordinator.log.read_text()


def test_a_rolling_update_of_replicas_on_etcd_hands_the_lead_over(helm: Helm, tmp_path: Path):
    """Two of the three pods are replaced, one after the other; whichever led, one leads at once again."""
    release, names = helm.release(values_of("etcd")), ("muster-0", "muster-1")
    with etcd.Cluster(tmp_path) as cluster, ExitStack() as running:
        members = values_of("etcd")["state"]["etcd"]["endpoints"]
        addresses = dict.fromkeys(members, cluster.endpoints[0])
        nodes = []
        for name in names:
            (tmp_path / name).mkdir()
            nodes.append(Node(release, tmp_path / name, pod=name, addresses=addresses))
            port = nodes[-1].ports["grpc"][1]
            addresses[f"{name}.muster-headless.ml.svc:7550"] = f"127.0.0.1:{port}"
        for node in nodes:
            node.addresses |= addresses

        def started(node: Node) -> Container:
            pod = running.enter_context(coordinator_of(release, node))
            pod.started()
            until(lambda: pod.probe("readinessProbe"), "it does not become ready")
            assert "/var/lib/muster" not in pod.mounts
            return pod

        def serves(pod: Container) -> bool:
            return pod.run("get", "runs", "--timeout=2").returncode == 0

        pods = [started(node) for node in nodes]
        until(lambda: any(map(serves, pods)), "nobody leads")
        for number, other in ((1, 0), (0, 1)):
            assert pods[number].stopped() == 0, pods[number].log.read_text()
            until(partial(serves, pods[other]), "nobody leads")
            pods[number] = started(nodes[number])
        assert pods[1].run("backup", "/tmp/backup.db").returncode == 0


def session(channel: grpc.Channel, token: str = "") -> str:
    """What the coordinator answers to a worker of team-a: "welcome", or why it refuses."""
    hello = session_pb2.Hello(
        run_id="team-a-1",
        processes=[session_pb2.Process(rank=0, incarnation="a", host="node", pid=1)],
        protocol_version=1,
    )
    connect = session_pb2_grpc.SessionServiceStub(channel).Connect
    shown = (("authorization", f"Bearer {token}"),) if token else ()
    call = connect(iter([session_pb2.ConnectRequest(hello=hello)]), timeout=PATIENCE, metadata=shown)
    try:
        return str(next(call).WhichOneof("message"))
    except grpc.RpcError as error:
        return reason_of(error)


@pytest.mark.parametrize("name", ["relay", "relay-tcp"])
def test_workers_reach_the_coordinator_through_a_relay(
    helm: Helm, tmp_path: Path, secrets: dict[str, Files], name: str
):
    values = values_of(name)
    values["relay"]["upstream"] = ""
    release = helm.release(values)
    node = node_of(release, tmp_path, secrets)
    theirs = {
        "muster-relay-tls": secrets["muster-tls"],
        "muster-relay-certificate": secrets["viewer-of-ours"],
        "muster-relay-token": {"token": WORKER.encode()},
        "muster-tokens-of-workers": secrets["muster-tokens-of-all-teams"],
    }
    upstream = {f"{HOST}:7550": f"127.0.0.1:{node.ports['grpc'][1]}"}
    # A short path, for the socket.
    with tempfile.TemporaryDirectory() as folder, coordinator_of(release, node) as coordinator:
        coordinator.started()
        place = Node(release, Path(folder), secrets | theirs, kind="DaemonSet", addresses=upstream)
        with Container(place, release.one("DaemonSet")["spec"]["template"]["spec"], "relay") as relay:
            relay.started()
            assert relay.probe("livenessProbe")
            assert relay.probe("readinessProbe")
            assert relay.run("doctor").returncode == 0
            if name == "relay":
                socket = relay.mounts["/run/muster"] / "relay.sock"
                assert socket.stat().st_mode & 0o777 == 0o660
                with grpc.insecure_channel(f"unix://{socket}") as channel:
                    assert session(channel) == "welcome"
            else:
                ours, client = secrets["muster-tls"], secrets["viewer-of-ours"]
                credentials = grpc.ssl_channel_credentials(
                    ours["ca.crt"], client["tls.key"], client["tls.crt"]
                )
                address = f"127.0.0.1:{place.ports['grpc'][1]}"
                named = [("grpc.ssl_target_name_override", HOST)]
                with grpc.secure_channel(address, credentials, options=named) as channel:
                    assert session(channel) == "TOKEN_MISSING"
                    assert session(channel, VIEWER) == "ROLE_TOO_LOW"
                    assert session(channel, WORKER) == "welcome"
            assert relay.stopped() == 0, relay.log.read_text()


def admit(endpoint: str, credentials: grpc.ChannelCredentials) -> None:
    """Make users of etcd, and ask everyone for a password."""

    def text(number: int, value: str) -> bytes:
        return bytes([number << 3 | 2, len(value)]) + value.encode()

    with grpc.secure_channel(endpoint, credentials) as channel:
        # AuthUserAddRequest: name = 1, password = 2. AuthUserGrantRoleRequest: user = 1, role = 2.
        for path, request in (
            ("RoleAdd", text(1, "root")),
            *(("UserAdd", text(1, user) + text(2, ETCD_PASSWORD)) for user in ("root", "muster")),
            *(("UserGrantRole", text(1, user) + text(2, "root")) for user in ("root", "muster")),
            ("AuthEnable", b""),
        ):
            call: Any = channel.unary_unary(f"/etcdserverpb.Auth/{path}")
            call(request, timeout=PATIENCE, wait_for_ready=True)


def test_a_replica_shows_etcd_its_certificate_and_its_password(
    helm: Helm, tmp_path: Path, secrets: dict[str, Files]
):
    authority = Authority(tmp_path, "etcds")
    member, client = authority.issue("member"), authority.issue("client")
    shown = authority.ca.read_bytes(), client.key.read_bytes(), client.cert.read_bytes()
    given = {
        "muster-etcd-client": dict(zip(("ca.crt", "tls.key", "tls.crt"), shown, strict=True)),
        "muster-etcd-password": {"password": ETCD_PASSWORD.encode()},
    }
    asked = (
        f"--cert-file={member.cert}",
        f"--key-file={member.key}",
        f"--trusted-ca-file={authority.ca}",
        "--client-cert-auth",
    )
    release = helm.release(values_of("etcd-secured"))
    with etcd.Cluster(tmp_path, extra=asked, scheme="https") as cluster:
        admit(cluster.endpoints[0], grpc.ssl_channel_credentials(*shown))
        addresses = {"etcd.example.org:2379": cluster.endpoints[0]}
        node = Node(release, tmp_path, secrets | given, addresses=addresses)
        addresses["muster-0.muster.example.org:7550"] = f"127.0.0.1:{node.ports['grpc'][1]}"
        node.addresses |= addresses
        with coordinator_of(release, node) as coordinator:
            coordinator.started()
            until(lambda: coordinator.probe("readinessProbe"), "it does not become ready")
            until(lambda: coordinator.run("get", "runs").returncode == 0, coordinator.log.read_text)
            kept = coordinator.run("backup", "/tmp/backup.db")
            assert kept.returncode == 0, kept.stderr
            assert coordinator.stopped() == 0
            assert ETCD_PASSWORD not in coordinator.log.read_text()


KUBECTL = """#!/bin/sh
# kubectl -n ml get secret NAME -o jsonpath={.data.KEY}; the port is forwarded already.
case "$3" in
  get) key=${7#*data.}; key=${key%?}; base64 < "$SECRETS/$5/$(printf %s "$key" | tr -d '\\\\')" ;;
esac
"""


@pytest.mark.parametrize(
    ("name", "viewer"),
    [
        ("default", "ours"),
        ("tls-secret", "ours"),
        ("mtls", "training"),
        ("tokens-secret", "ours"),
        ("ingress", "ours"),
        ("secured", "ours"),
    ],
)
def test_the_lines_of_the_notes_show_the_status_as_they_stand(
    helm: Helm, tmp_path: Path, secrets: dict[str, Files], name: str, viewer: str
):
    release = helm.release(values_of(name))
    node = node_of(release, tmp_path, secrets, viewer)
    for secret in set(re.findall(r"get secret (\S+)", release.notes)):
        (tmp_path / "secrets" / secret).mkdir(parents=True)
        for key, content in node.secret(secret).items():
            (tmp_path / "secrets" / secret / key).write_bytes(content)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    lines = release.notes[release.notes.index("  kubectl -n ml port-forward svc/muster-http 7551:") :].split(
        "\n\n"
    )[0]
    with coordinator_of(release, node) as coordinator:
        coordinator.started()
        shown = subprocess.run(
            ["sh", "-euc", lines.replace("7551", str(node.ports["http"][1]))],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SECRETS": str(tmp_path / "secrets")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["runs"] == []


@pytest.mark.parametrize("name", ["default", "secured"])
def test_helm_test_passes(helm: Helm, tmp_path: Path, secrets: dict[str, Files], name: str):
    release = helm.release(values_of(name))
    node = node_of(release, tmp_path, secrets)
    with coordinator_of(release, node) as coordinator:
        coordinator.started()
        with Container(node, release.one("Pod")["spec"], "test") as test:
            assert test.ended() == 0, test.log.read_text()


def test_helm_test_fails_when_the_coordinator_does_not_answer(
    helm: Helm, tmp_path: Path, secrets: dict[str, Files]
):
    release = helm.release()
    with Container(node_of(release, tmp_path, secrets), release.one("Pod")["spec"], "test") as test:
        # 2 is a command line that is not understood.
        assert test.ended() not in (0, 2), test.log.read_text()


def test_documented_backup_leaves_nothing_on_the_pods_volume(
    helm: Helm, tmp_path: Path, secrets: dict[str, Files]
):
    text = (CHART.parents[2] / "docs/kubernetes.md").read_text()
    make, copy_out, remove = re.findall(r"^\$ kubectl -n muster exec muster-0 -- (.*/backup.*)$", text, re.M)
    file = make.split()[2]
    assert (copy_out, remove) == (f"cat {file} > muster-backup.db", f"rm {file}")
    release = helm.release()
    with coordinator_of(release, node_of(release, tmp_path, secrets)) as coordinator:
        coordinator.started()
        before = set(coordinator.mounts["/var/lib/muster"].iterdir())
        done = coordinator.run(*make.split()[1:])
        assert done.returncode == 0, done.stderr
        assert [one.name for one in coordinator.mounts["/tmp"].iterdir()] == ["backup.db"]
        assert set(coordinator.mounts["/var/lib/muster"].iterdir()) == before
    assert "/var/lib/muster/backup" not in text


def test_it_ends_in_time_while_ranks_wait_and_goes_on_with_what_it_had(
    helm: Helm, tmp_path: Path, secrets: dict[str, Files]
):
    release = helm.release()
    node = node_of(release, tmp_path, secrets)
    endpoint = f"127.0.0.1:{node.ports['grpc'][1]}"
    with coordinator_of(release, node) as first, grpc.insecure_channel(endpoint) as channel:
        first.started()
        job = Job(channel)
        assert first.stopped() == 0, first.log.read_text()
        job.close()
    with coordinator_of(release, node) as second:
        second.started()
        (run,) = json.loads(second.run("get", "runs", "-o", "json").stdout)["runs"]
        assert run["run_id"] == "job1"
