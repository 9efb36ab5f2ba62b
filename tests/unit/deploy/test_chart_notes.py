"""The notes that Helm prints after an installation."""

import itertools
import shlex

import kubernetes_validate
import pytest
import yaml

from tests.support.deploy.helm import (
    CERTIFICATE,
    KUBERNETES,
    TOKENS,
    Helm,
    Manifest,
    Release,
    values_of,
)

FEATURES = ("default", "tls-secret", "mtls", "tokens-secret", "secured", "monitoring", "settings")


def pasted(notes: str) -> list[Manifest]:
    """The environment that the notes tell to paste into a container."""
    lines = notes.split("Paste this", 1)[1].splitlines()
    start = lines.index("  env:")
    block = list(itertools.takewhile(str.strip, lines[start:]))
    pasted: list[Manifest] = yaml.safe_load("\n".join(block))["env"]
    return pasted


@pytest.mark.parametrize("name", FEATURES)
def test_environment_variables_in_the_notes_are_valid_in_a_pod(releases: dict[str, Release], name: str):
    variables = pasted(releases[name].notes)
    container = {"name": "train", "image": "train", "env": variables}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": [container]}}
    kubernetes_validate.validate(pod, KUBERNETES[-1], strict=True)
    names = {variable["name"] for variable in variables}
    assert {"MUSTER_ENDPOINT", "POD_IP", "MUSTER_NODE_NAME"} <= names
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
def test_notes_suggest_kubectl_exec_only_if_the_pod_has_client_credentials(
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
