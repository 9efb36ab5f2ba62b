"""The keepers that the chart renders, and what a job must have to use them."""

from typing import Any

import pytest
import typer.main
import yaml

from muster.keeper.settings import host_and_port
from muster.service.cli.main import app
from tests.support.deploy import rules
from tests.support.deploy.daemon_sets import container_of, environment_of, metadata_of, pod_of
from tests.support.deploy.helm import Helm, HelmError, Manifest, Release, values_of

NAME = "muster-keeper"


@pytest.fixture(scope="module")
def release(helm: Helm) -> Release:
    """With everything that keepers may have."""
    return helm.release(values_of("keeper"))


def on(**values: Any) -> Manifest:
    return {"keeper": {"enabled": True, **values}}


def flags_of(release: Release) -> list[str]:
    arguments: list[str] = container_of(release)["args"]
    assert arguments[0] == "keep"
    return arguments[1:]


def test_flags_are_those_of_the_command(helm: Helm, release: Release):
    group: Any = typer.main.get_command(app)
    known = {name for option in group.commands["keep"].params for name in option.opts}
    assert {flag.partition("=")[0] for flag in flags_of(release)} <= known
    assert flags_of(release) == [
        "--folder=/mnt/nvme/muster",
        "--runs=team-a.*",
        "--runs=shared",
        "--idle=259200",
        "--listen=0.0.0.0:0",
        "--listen-ranks=$(MUSTER_NODE_ADDRESS):0",
        "--quota=2000000000000",
        "--upload-rate=500000000",
    ]
    assert flags_of(helm.release(on()))[:2] == ["--folder=/var/lib/muster-local", "--runs=*"]


@pytest.mark.parametrize("address", ["10.0.0.7", "fd00::7"])
def test_ranks_of_other_pods_reach_the_keeper_at_its_pods_address(release: Release, address: str):
    (flag,) = (one for one in flags_of(release) if one.startswith("--listen-ranks="))
    assert environment_of(release)["MUSTER_NODE_ADDRESS"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    given = flag.partition("=")[2].replace("$(MUSTER_NODE_ADDRESS)", address)
    assert host_and_port(given) == (address, 0)


def test_folder_is_the_nodes_at_the_same_path(helm: Helm, release: Release):
    for one in (release, helm.release(on())):
        (folder,) = (flag.partition("=")[2] for flag in flags_of(one) if flag.startswith("--folder="))
        (mount,) = (each for each in container_of(one)["volumeMounts"] if each["name"] == "local")
        (volume,) = (each for each in pod_of(one)["volumes"] if each["name"] == "local")
        assert mount["mountPath"] == folder
        assert volume["hostPath"] == {"path": folder, "type": "DirectoryOrCreate"}


def test_failure_domain_is_a_label_of_the_pod(helm: Helm, release: Release):
    def of(one: Release) -> object:
        return environment_of(one).get("MUSTER_FAILURE_DOMAIN")

    zone = {"fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"}}
    assert of(helm.release(on())) == zone
    assert of(release) == {"fieldRef": {"fieldPath": "metadata.labels['example.org/rack']"}}
    assert of(helm.release(on(failureDomainLabel=""))) is None


# Who they are


def test_folder_is_given_to_their_user_by_a_root_that_may_do_nothing_else(helm: Helm):
    (first,) = pod_of(helm.release(on()))["initContainers"]
    assert first["command"] == ["chown", "10001:10001", "/var/lib/muster-local"]
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert "initContainers" not in pod_of(helm.release(on(chown=False, podSecurity={"runAsUser": None})))


def test_keepers_of_jobs_that_run_as_root_have_none_of_its_rights(release: Release):
    pod = pod_of(release)
    assert "initContainers" not in pod
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (0, False)
    security = container_of(release)["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)


def test_keepers_with_a_node_folder_break_only_the_expected_pod_security_rules(helm: Helm):
    assert rules.restricted(pod_of(helm.release(on()))) == [
        "volume local is of a forbidden kind",
        "folder: capabilities.add",
        "folder: may run as root",
    ]
    pod = pod_of(helm.release(on(chown=False, hostNetwork=True)))
    assert rules.restricted(pod) == ["hostNetwork is forbidden", "volume local is of a forbidden kind"]
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)


def test_they_have_an_account_of_their_own(helm: Helm, release: Release):
    assert pod_of(release)["serviceAccountName"] == NAME
    annotations = values_of("keeper")["keeper"]["serviceAccount"]["annotations"]
    assert release.one("ServiceAccount", NAME)["metadata"]["annotations"] == annotations
    other = helm.release(on(serviceAccount={"create": False, "name": "mine"}))
    assert pod_of(other)["serviceAccountName"] == "mine"
    assert {one["metadata"]["name"] for one in other.of_kind("ServiceAccount")} == {"muster"}


def test_they_reach_the_coordinator_and_show_what_it_asks_for(helm: Helm, release: Release):
    environment = environment_of(release)
    assert {
        name: value for name, value in environment.items() if name.startswith(("MUSTER_T", "MUSTER_E"))
    } == {
        "MUSTER_ENDPOINT": "muster.ml.svc:7550",
        "MUSTER_TLS_CA": "/etc/muster/client/ca.crt",
        "MUSTER_TLS_SERVER_NAME": "muster.ml.svc",
        "MUSTER_TLS_CERT": "/etc/muster/client/tls.crt",
        "MUSTER_TLS_KEY": "/etc/muster/client/tls.key",
        "MUSTER_TOKEN_FILE": "/etc/muster/client/token",
    }
    (client,) = (one for one in pod_of(release)["volumes"] if one["name"] == "client")
    sources = client["projected"]["sources"]
    assert {"serviceAccountToken"} in [set(source) for source in sources]
    named = helm.release(on(endpoint="a.example.org:7550"))
    assert environment_of(named)["MUSTER_ENDPOINT"] == "a.example.org:7550"


@pytest.mark.parametrize(
    ("keeper", "words"),
    [
        ({"runs": []}, "runs"),
        ({"folder": "nvme"}, "folder"),
        ({"quota": "2Ti"}, "quota"),
        ({"podSecurity": {"runAsUser": -1}}, "runAsUser"),
        ({"podSecurity": {"runAsUser": None}}, "set the folder's owner"),
        ({"failureDomainLabel": "a'b"}, "failureDomainLabel"),
    ],
)
def test_values_that_cannot_work_are_refused(helm: Helm, keeper: Manifest, words: str):
    with pytest.raises(HelmError, match=words):
        helm.release(on(**keeper))


# Around them


def test_network_policy_is_as_the_values_say(helm: Helm, release: Release):
    labels = metadata_of(release)["labels"]
    policy = release.one("NetworkPolicy", NAME)["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    listed = values_of("keeper")["networkPolicy"]["grpcFrom"]
    assert rule["from"][:-1] == listed
    assert rule["from"][-1]["podSelector"]["matchLabels"].items() <= labels.items()
    everyone = helm.release({"networkPolicy": {"enabled": True}} | on())
    assert everyone.one("NetworkPolicy", NAME)["spec"]["ingress"] == [{}]


def test_keeper_container_has_image_environment_and_volumes_for_shared_storage(release: Release):
    values, container = values_of("keeper")["keeper"], container_of(release)
    assert container["image"] == values["image"]
    assert container["envFrom"] == values["envFrom"]
    assert values["extraVolumeMounts"][0] in container["volumeMounts"]
    assert values["extraVolumes"][0] in pod_of(release)["volumes"]
    assert environment_of(release)["MUSTER_STORAGE_OPTIONS"] == values["extraEnv"][0]["value"]


def test_notes_say_what_a_job_needs(helm: Helm):
    notes = helm.release(on()).notes
    block = notes[notes.index("Local checkpoints outlive pods") :].split("\n\n")[1]
    said = yaml.safe_load(block)
    assert said["env"] == [{"name": "MUSTER_KEEPER", "value": "node"}]
    assert said["volumeMounts"] == [{"name": "muster-local", "mountPath": "/var/lib/muster-local"}]
    assert said["volumes"][0]["hostPath"]["path"] == "/var/lib/muster-local"
    assert said["securityContext"] == {"runAsUser": 10001}
