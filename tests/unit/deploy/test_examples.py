"""What is in deploy/examples is what Kubernetes, Kubeflow, JobSet and torchrun read."""

import os
import re
import signal
import subprocess
import tempfile
import urllib.request
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml
from torch.distributed.run import get_args_parser

from lab.patience import PATIENCE, until
from lab.processes.coordinator import free_port
from lab.processes.relay import Relay
from lab.processes.tools import tool
from muster.service.cli.main import app
from muster.service.security.identity.rules import AUDIENCE
from muster.worker.environment import DEFAULT_STOPPED_EXIT_CODE
from tests.support.deploy import rules
from tests.support.deploy.helm import Helm, Manifest, Strict
from tests.support.expect import some

EXAMPLES = Path(__file__).resolve().parents[3] / "deploy/examples"
RESTORE, SNAPSHOT, ETCD = "restore-pod.yaml", "snapshot-claim.yaml", "etcd.yaml"
SIDECAR, WATCHER = "relay-sidecar.yaml", "watcher-sidecar.yaml"
RUNTIME, TRAINJOB = "training-runtime.yaml", "trainjob.yaml"
NAMES = sorted(
    {path.name for path in EXAMPLES.glob("*.yaml")} - {RESTORE, SNAPSHOT, ETCD, SIDECAR, WATCHER, TRAINJOB}
)
"""The training jobs under torchrun."""


def read(name: str) -> Manifest:
    manifest: Manifest = yaml.load((EXAMPLES / name).read_text(), Strict)
    return manifest


def job_of(manifest: Manifest) -> Manifest | None:
    """The Job in it, where there is one."""
    if manifest["kind"] == "JobSet":
        assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert set(manifest["spec"]) == {"failurePolicy", "replicatedJobs"}
        (replicated,) = manifest["spec"]["replicatedJobs"]
        assert set(replicated) == {"name", "replicas", "template"}
        spec = replicated["template"]["spec"]
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    if manifest["kind"] == "ClusterTrainingRuntime":
        assert manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        (replicated,) = manifest["spec"]["template"]["spec"]["replicatedJobs"]
        nodes = manifest["spec"]["mlPolicy"]["numNodes"]
        # JobSet makes an indexed Job of it, and Trainer sets both numbers.
        spec = replicated["template"]["spec"] | {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
        }
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    return manifest if manifest["kind"] == "Job" else None


def pod_of(manifest: Manifest) -> Manifest:
    if job := job_of(manifest):
        template = job["spec"]["template"]
    else:
        assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
        assert set(manifest["spec"]) == {"runPolicy", "pytorchReplicaSpecs"}
        assert set(manifest["spec"]["runPolicy"]) == {"cleanPodPolicy"}
        worker = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
        assert set(worker) == {"replicas", "restartPolicy", "template"}
        template = worker["template"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_they_are_valid(name: str, version: str):
    manifest = read(name)
    kubernetes_validate.validate(pod_of(manifest), version, strict=True)
    if job := job_of(manifest):
        kubernetes_validate.validate(job, version, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_namespace_that_enforces_restricted_admits_them(name: str):
    pod = pod_of(read(name))["spec"]
    assert rules.restricted(pod) == []
    del pod["containers"][0]["securityContext"]
    assert rules.restricted(pod) != []


@pytest.mark.parametrize("name", NAMES)
def test_torchrun_reads_their_flags(name: str):
    (container,) = pod_of(read(name))["spec"]["containers"]
    assert container["command"] == ["torchrun"]
    variables = {variable["name"] for variable in container["env"]}
    arguments: Any = get_args_parser().parse_args(container["args"])
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("muster", "$(MUSTER_ENDPOINT)")
    assert arguments.local_addr == "$(POD_IP)"
    used = {word.partition(")")[0] for argument in container["args"] for word in argument.split("$(")[1:]}
    assert used <= variables
    assert int(arguments.nnodes.split(":")[-1]) == nodes_of(read(name))


@pytest.mark.parametrize("name", [*NAMES, SIDECAR])
def test_ranks_know_their_node_by_the_name_that_kubernetes_uses(name: str):
    (container,) = pod_of(read(name))["spec"]["containers"]
    (node,) = [variable for variable in container["env"] if variable["name"] == "MUSTER_NODE_NAME"]
    assert node["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "pytorchjob.yaml"])
def test_pods_of_a_stopped_run_are_made_again_and_do_not_count(name: str):
    job = some(job_of(read(name)))["spec"]
    (container,) = job["template"]["spec"]["containers"]
    first = job["podFailurePolicy"]["rules"][0]
    assert (first["action"], first["onExitCodes"]) == (
        "Ignore",
        {"containerName": container["name"], "operator": "In", "values": [DEFAULT_STOPPED_EXIT_CODE]},
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "pytorchjob.yaml"])
def test_pods_that_a_drain_ends_with_another_code_are_made_again_and_do_not_count(name: str):
    """Such as 137 after SIGKILL, or 143 before the first call of the save point."""
    _, disrupted = some(job_of(read(name)))["spec"]["podFailurePolicy"]["rules"]
    assert disrupted == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }


def test_pods_of_a_stopped_pytorchjob_are_started_again():
    spec = read("pytorchjob.yaml")["spec"]
    assert spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "OnFailure"
    # The operator sums the restarts of all pods, and each stop restarts each of them.
    assert "backoffLimit" not in spec["runPolicy"]


def test_trainjob_uses_the_runtime_of_the_examples():
    job, runtime = read(TRAINJOB), read(RUNTIME)
    assert (job["apiVersion"], job["kind"]) == (runtime["apiVersion"], "TrainJob")
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    # Trainer looks for both by these names.
    assert (replicated["name"], container["name"]) == ("node", "node")


def test_the_job_with_a_service_account_mounts_its_token_for_muster_alone():
    pod = pod_of(read("service-account.yaml"))["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("trainer", False)
    (token, authority) = pod["volumes"][0]["projected"]["sources"]
    assert token["serviceAccountToken"]["audience"] == AUDIENCE
    variables = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    mounted = pod["containers"][0]["volumeMounts"][0]["mountPath"]
    assert variables["MUSTER_TOKEN_FILE"] == f"{mounted}/{token['serviceAccountToken']['path']}"
    assert variables["MUSTER_TLS_CA"] == f"{mounted}/{authority['configMap']['items'][0]['path']}"


def nodes_of(manifest: Manifest) -> int:
    if job := job_of(manifest):
        assert job["spec"]["completions"] == job["spec"]["parallelism"]
        return int(job["spec"]["completions"])
    return int(manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"])


def test_the_pod_that_restores_is_restricted_and_has_the_volume_of_the_chart(helm: Helm):
    pod, release = read(RESTORE), helm.release()
    kubernetes_validate.validate(pod, "1.27", strict=True)
    theirs = release.one("StatefulSet")["spec"]["template"]["spec"]
    security = {
        key: value for key, value in theirs["securityContext"].items() if key != "fsGroupChangePolicy"
    }
    assert pod["spec"]["securityContext"] == security
    (ours,), (container,) = pod["spec"]["containers"], theirs["containers"]
    assert ours["securityContext"] == container["securityContext"]
    assert ours["env"][0] in container["env"]
    assert rules.restricted(pod["spec"]) == []
    assert rules.quota(pod["spec"], {"limits.cpu", "limits.memory", "requests.cpu", "requests.memory"}) == []
    (claim,) = release.one("StatefulSet")["spec"]["volumeClaimTemplates"]
    wanted = f"{claim['metadata']['name']}-{release.one('StatefulSet')['metadata']['name']}-0"
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == wanted
    assert ours["volumeMounts"][0] == container["volumeMounts"][0]


def test_the_pod_that_restores_mounts_secrets_and_a_snapshot_once_its_lines_are_no_comments(helm: Helm):
    claim = read(SNAPSHOT)
    kubernetes_validate.validate(claim, "1.27", strict=True)
    text = (EXAMPLES / RESTORE).read_text()
    pod = yaml.load(re.sub(r"^( +)# (- name:| +\w+:)", r"\1\2", text, flags=re.MULTILINE), Strict)
    kubernetes_validate.validate(pod, "1.27", strict=True)
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    assert mounts[-2:] == [
        {"name": "etcd", "mountPath": "/etcd"},
        {"name": "snapshot", "mountPath": "/snapshot"},
    ]
    assert pod["spec"]["volumes"][-2] == {"name": "etcd", "secret": {"secretName": "muster-etcd"}}
    assert pod["spec"]["volumes"][-1] == {
        "name": "snapshot",
        "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]},
    }


def test_the_pod_that_restores_ends_when_it_is_told():
    """By a handler of its own: a signal's default action does not end the first process of a container."""
    (container,) = read(RESTORE)["spec"]["containers"]
    with subprocess.Popen(container["command"], start_new_session=True, stdout=subprocess.PIPE) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        # The trap is set before the first child is there.
        try:
            until(children.read_text, "it starts no child")
            process.terminate()
            assert process.wait(timeout=PATIENCE) == 0
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_readme_names_each():
    readme = (EXAMPLES / "README.md").read_text()
    assert all(
        f"[{name}]({name})" in readme for name in [*NAMES, TRAINJOB, SIDECAR, WATCHER, RESTORE, SNAPSHOT]
    )


# ---------------------------------------------------------------------- the relay in the pod


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_job_with_a_relay_is_valid_and_admitted_where_restricted_is_enforced(version: str):
    kubernetes_validate.validate(read(SIDECAR), version, strict=True)
    assert rules.restricted(pod_of(read(SIDECAR))["spec"]) == []


def test_the_ranks_find_the_relay_of_their_pod_and_the_coordinator_behind_it():
    pod = pod_of(read(SIDECAR))["spec"]
    (relay,), (train,) = pod["initContainers"], pod["containers"]
    assert relay["restartPolicy"] == "Always"
    listens = relay["args"][1].removeprefix("--listen=")
    (upstream,), endpoint = relay["env"], train["env"][0]
    assert endpoint["value"] == f"{listens},{upstream['value']}"
    assert relay["volumeMounts"][0] == train["volumeMounts"][0]
    # Its user alone may open it, and there is but one.
    assert not any("socket-mode" in argument for argument in relay["args"])
    assert not {"runAsUser", "runAsGroup"} & (relay["securityContext"] | train["securityContext"]).keys()


def test_the_relay_listens_in_a_volume_that_everyone_may_write(tmp_path: Path):
    """As Kubernetes makes an emptyDir."""
    (relay,) = pod_of(read(SIDECAR))["spec"]["initContainers"]
    path = PurePosixPath(relay["args"][1].removeprefix("--listen=unix://"))
    below = path.relative_to(relay["volumeMounts"][0]["mountPath"])
    with tempfile.TemporaryDirectory() as volume:
        Path(volume).chmod(0o777)
        with Relay(tmp_path, f"127.0.0.1:{free_port()}", listen=f"unix://{volume}/{below}") as running:
            assert running.get("/readyz")
            assert Path(volume, below).is_socket()


# ---------------------------------------------------------------------- the watcher in the pod


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_job_with_a_watcher_is_valid_and_admitted_where_restricted_is_enforced(version: str):
    kubernetes_validate.validate(read(WATCHER), version, strict=True)
    assert rules.restricted(pod_of(read(WATCHER))["spec"]) == []


def test_watcher_in_the_pod_watches_the_node_of_the_ranks():
    pod = pod_of(read(WATCHER))["spec"]
    (watcher,), (train,) = pod.pop("initContainers"), pod["containers"]
    assert watcher["restartPolicy"] == "Always"
    of_watcher, of_ranks = ({one["name"]: one for one in part["env"]} for part in (watcher, train))
    assert of_watcher.items() <= of_ranks.items()
    command, *options = watcher["args"]
    group: Any = typer.main.get_command(app)
    given = group.commands[command].make_context(command, options, resilient_parsing=True).params
    assert (given["source"], given["http"]) == (["aws"], "0.0.0.0:7551")
    # All else is the plain Job.
    assert pod == pod_of(read("job.yaml"))["spec"]


# ---------------------------------------------------------------------- etcd


def etcd_objects() -> dict[str, Manifest]:
    documents = yaml.load_all((EXAMPLES / ETCD).read_text(), Strict)
    return {document["kind"]: document for document in documents}


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_the_etcd_is_valid_and_admitted_where_restricted_is_enforced(version: str):
    found = etcd_objects()
    for manifest in found.values():
        kubernetes_validate.validate(manifest, version, strict=True)
    assert rules.restricted(found["StatefulSet"]["spec"]["template"]["spec"]) == []
    selector = found["StatefulSet"]["spec"]["selector"]["matchLabels"]
    assert found["Service"]["spec"]["selector"] == selector
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == selector
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == selector
    (etcd,) = found["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in etcd["ports"]}
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
    assert found["StatefulSet"]["spec"]["serviceName"] == found["Service"]["metadata"]["name"]


def test_etcd_takes_the_arguments_of_the_manifest(tmp_path: Path):
    """One member of one, on this machine's ports."""
    (container,) = etcd_objects()["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    arguments = [argument.replace("$(POD_NAME)", "etcd-0") for argument in container["args"]]
    ours = {"--data-dir": str(tmp_path / "data")}
    client, peer, metrics = (f"http://127.0.0.1:{free_port()}" for _ in range(3))
    ours |= {"--listen-client-urls": client, "--advertise-client-urls": client}
    ours |= {"--listen-peer-urls": peer, "--initial-advertise-peer-urls": peer}
    ours |= {"--initial-cluster": f"etcd-0={peer}", "--listen-metrics-urls": metrics}
    flags = dict(argument.split("=", 1) for argument in arguments) | ours
    process = subprocess.Popen(
        [tool("etcd", "etcd-server"), *(f"{name}={value}" for name, value in flags.items())],
        stderr=subprocess.DEVNULL,
    )

    def healthy() -> bool:
        assert process.poll() is None, "it ended at once"
        with suppress(OSError), urllib.request.urlopen(f"{metrics}/health", timeout=PATIENCE) as answer:
            return b'"health":"true"' in answer.read()
        return False

    try:
        until(healthy, "it is not healthy")
    finally:
        process.kill()
        process.wait()
