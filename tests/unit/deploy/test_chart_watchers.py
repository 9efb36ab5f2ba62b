"""The watchers that the chart renders, and what Kubernetes lets them do."""

import base64
import itertools
import re
from typing import Any

import pytest
import typer.main

from muster.service.cli.main import app
from tests.support.deploy import rules
from tests.support.deploy.daemon_sets import container_of, environment_of, pod_of
from tests.support.deploy.helm import Helm, HelmError, Manifest, Release, values_of

NAME, ACCOUNT = "muster-watcher", ("ml", "muster-watcher")
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "impersonate")
RESOURCES = (
    ("", "nodes"),
    ("", "pods"),
    ("", "secrets"),
    ("", "configmaps"),
    ("", "pods/exec"),
    ("", "pods/eviction"),
    ("", "nodes/status"),
    ("batch", "jobs"),
    ("jobset.x-k8s.io", "jobsets"),
    ("trainer.kubeflow.org", "trainjobs"),
    ("lifecycle.k8s.io", "evictionrequests"),
    ("lifecycle.k8s.io", "evictions"),
    ("lifecycle.k8s.io", "evictions/status"),
)
NAMESPACES = ("", "ml", "team-a", "team-b", "team-c")
READS = {(verb, "nodes", namespace) for verb in ("list", "watch") for namespace in NAMESPACES}


@pytest.fixture(scope="module")
def release(helm: Helm) -> Release:
    """With everything that a watcher may have."""
    return helm.release(values_of("watcher"))


def on(**values: Any) -> Manifest:
    return {"watcher": {"enabled": True, **values}}


def granted(release: Release, account: tuple[str, str] = ACCOUNT) -> set[tuple[str, str, str]]:
    """Everything that an account may do: verb, resource and namespace."""
    return {
        (verb, plural, namespace)
        for verb, (group, plural), namespace in itertools.product(VERBS, RESOURCES, NAMESPACES)
        if rules.may(release.manifests, account, verb, group, plural, namespace)
    }


def test_without_them_there_are_no_roles(helm: Helm):
    release = helm.release({"serviceMonitor": {"enabled": True}, "networkPolicy": {"enabled": True}})
    assert not {"ClusterRole", "Role"} & {one["kind"] for one in release.manifests}


# What they may do


def test_by_default_they_may_read_nodes_and_nothing_else(helm: Helm):
    assert granted(helm.release(on())) == READS


def test_they_may_read_pods_where_the_values_say_so(helm: Helm):
    release = helm.release(on(kubernetes={"namespaces": ["team-a", "team-b"]}))
    pods = {(verb, "pods", where) for verb in ("list", "watch") for where in ("team-a", "team-b")}
    assert granted(release) == READS | pods


def test_they_may_answer_evictions_where_the_values_say_so(helm: Helm):
    values = {"namespaces": ["team-a"], "evictions": True}
    granted_more = granted(helm.release(on(kubernetes=values))) - granted(
        helm.release(on(kubernetes={"namespaces": ["team-a"]}))
    )
    reads = {(verb, "evictions", "team-a") for verb in ("list", "watch")}
    assert granted_more == reads | {("patch", "evictions/status", "team-a")}


def test_they_may_change_jobs_only_to_annotate_them(helm: Helm):
    release = helm.release(on(annotate=True, kubernetes={"namespaces": ["team-a", "team-b"]}))
    jobs = {
        (verb, plural, namespace)
        for verb in ("get", "patch")
        for plural in ("jobs", "jobsets", "trainjobs")
        for namespace in ("team-a", "team-b")
    }
    assert {one for one in granted(release) if one[1] not in ("nodes", "pods")} == jobs


def test_without_kubernetes_they_may_do_nothing_there(helm: Helm):
    release = helm.release(on(sources=["aws"]))
    assert granted(release) == set()
    assert not {"ClusterRole", "Role"} & {one["kind"] for one in release.manifests}
    assert "volumes" not in pod_of(release)


def test_roles_can_be_made_by_others(helm: Helm):
    release = helm.release(on(rbac={"create": False}))
    assert granted(release) == set()
    assert "kubernetes" in [volume["name"] for volume in pod_of(release)["volumes"]]


def test_no_other_pod_has_their_account(helm: Helm):
    release = helm.release(on() | {"relay": {"enabled": True}})
    accounts = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]["serviceAccountName"]
        for kind in ("StatefulSet", "DaemonSet")
        for one in release.of_kind(kind)
    }
    assert accounts == {"muster": "muster", "muster-relay": "muster", NAME: NAME}
    assert granted(release, ("ml", "muster")) == set()


def test_names_of_two_releases_do_not_meet(helm: Helm):
    first, second = (helm.release(on(), namespace=namespace) for namespace in ("ml", "other"))
    names = [
        one["metadata"]["name"]
        for release in (first, second)
        for kind in ("ClusterRole", "ClusterRoleBinding")
        for one in release.of_kind(kind)
    ]
    assert len(set(names)) == 2
    assert names[0] == names[1]


def test_account_can_be_one_that_exists(helm: Helm):
    release = helm.release(on(serviceAccount={"create": False, "name": "mine"}))
    assert pod_of(release)["serviceAccountName"] == "mine"
    assert granted(release, ("ml", "mine")) == READS
    assert {one["metadata"]["name"] for one in release.of_kind("ServiceAccount")} == {"muster"}


# The pods


def test_flags_are_those_of_the_command(release: Release):
    command, *flags = container_of(release)["args"]
    assert command == "watch"
    group: Any = typer.main.get_command(app)
    known = {name for option in group.commands["watch"].params for name in option.opts}
    assert {flag.partition("=")[0] for flag in flags} <= known
    assert flags == [
        "--source=kubernetes",
        "--source=aws",
        "--lead=900",
        "--interval=0.5",
        "--http=0.0.0.0:7551",
        "--namespace=team-a",
        "--namespace=team-b",
        "--pod-selector=app=train",
        "--cordon=stop",
        "--taint=example.org/leaving",
        "--evictions",
        "--annotate",
    ]


def test_each_knows_the_name_of_its_node(release: Release):
    assert environment_of(release)["MUSTER_NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


def test_they_are_restricted(helm: Helm, release: Release):
    for one in (release, helm.release(on())):
        pod = pod_of(one)
        assert rules.restricted(pod) == []
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
        assert container_of(one)["securityContext"]["readOnlyRootFilesystem"] is True


def test_network_of_the_node_is_what_it_costs(helm: Helm):
    pod = pod_of(helm.release(on(hostNetwork=True)))
    assert rules.restricted(pod) == ["hostNetwork is forbidden"]
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"


def test_no_taint_ends_them(release: Release):
    """The notice of a taint that ends pods is theirs to give."""
    assert pod_of(release)["tolerations"] == [{"operator": "Exists"}]


def test_token_of_kubernetes_is_where_its_clients_look(release: Release):
    mounts = {one["name"]: one["mountPath"] for one in container_of(release)["volumeMounts"]}
    assert mounts["kubernetes"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    (volume,) = (one for one in pod_of(release)["volumes"] if one["name"] == "kubernetes")
    sources = volume["projected"]["sources"]
    assert [set(source) for source in sources] == [{"serviceAccountToken"}, {"configMap"}]
    assert "audience" not in sources[0]["serviceAccountToken"]


# The coordinator


def test_they_reach_the_service_that_workers_reach(helm: Helm, release: Release):
    assert environment_of(release)["MUSTER_ENDPOINT"] == "muster.ml.svc:7550"
    named = helm.release(on(endpoint="a.example.org:7550"))
    assert environment_of(named)["MUSTER_ENDPOINT"] == "a.example.org:7550"


def client_of(release: Release) -> list[Manifest]:
    (volume,) = (one for one in pod_of(release)["volumes"] if one["name"] == "client")
    sources: list[Manifest] = volume["projected"]["sources"]
    return sources


def test_they_show_the_token_of_their_account(release: Release):
    environment = environment_of(release)
    assert environment["MUSTER_TOKEN_FILE"] == "/etc/muster/client/token"
    assert environment["MUSTER_TLS_CA"] == "/etc/muster/client/ca.crt"
    token = {"audience": "muster", "expirationSeconds": 3600, "path": "token"}
    assert {"serviceAccountToken": token} in client_of(release)


def test_they_show_a_token_of_ours_if_there_is_one(helm: Helm):
    values = values_of("watcher")
    values["watcher"]["client"] = {"tokenSecret": "of-watchers"}
    sources = client_of(helm.release(values))
    assert not [source for source in sources if "serviceAccountToken" in source]
    assert "of-watchers" in [source["secret"]["name"] for source in sources]


def test_without_tokens_they_show_none(helm: Helm):
    assert "MUSTER_TOKEN_FILE" not in environment_of(helm.release(on()))


@pytest.mark.parametrize(
    ("watcher", "words"),
    [
        ({"annotate": True}, "say in which namespaces"),
        ({"kubernetes": {"evictions": True}}, "say in which namespaces"),
        ({"kubernetes": {"evictions": True}, "sources": ["aws"]}, "needs kubernetes in watcher.sources"),
        ({"annotate": True, "sources": ["aws"]}, "needs kubernetes in watcher.sources"),
        ({"sources": []}, "sources"),
        ({"sources": ["kubernetes", "slurm"]}, "sources"),
        ({"kubernetes": {"cordon": "panic"}}, "cordon"),
        ({"kubernetes": {"namespaces": ["*"]}}, "namespaces"),
        ({"kubernetes": {"podSelector": "app = train"}}, "podSelector"),
        ({"podSecurity": {"runAsUser": 0}}, "runAsUser"),
    ],
)
def test_values_that_contradict_each_other_are_refused(helm: Helm, watcher: Manifest, words: str):
    with pytest.raises(HelmError, match=words):
        helm.release(on(**watcher))


# Around them


def test_network_policy_is_as_the_sources_need(release: Release):
    theirs = release.one("NetworkPolicy", NAME)["spec"]
    assert theirs["ingress"] == [{"ports": [{"port": "http"}]}]
    coordinator, api_server, metadata, dns = theirs["egress"]
    assert coordinator["ports"] == [{"port": "grpc"}]
    assert {one["port"] for one in api_server["ports"]} == {443, 6443}
    assert metadata["to"] == [{"ipBlock": {"cidr": "169.254.169.254/32"}}]
    assert {one["port"] for one in dns["ports"]} == {53}


def test_network_policy_has_only_what_the_sources_need(helm: Helm):
    values = {"networkPolicy": {"enabled": True}}
    egress = helm.release(values | on()).one("NetworkPolicy", NAME)["spec"]["egress"]
    assert not [one for one in egress if "ipBlock" in str(one)]
    egress = helm.release(values | on(sources=["aws"])).one("NetworkPolicy", NAME)["spec"]["egress"]
    assert not [one for one in egress if {"port": 6443} in one["ports"]]


def test_prometheus_scrapes_them_as_a_job_of_their_own(release: Release):
    (endpoint,) = release.one("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"][0] == {"targetLabel": "job", "replacement": "ml/muster-watcher"}
    assert endpoint["port"] == "http"


def test_rule_for_their_account_can_be_written_in_the_values(release: Release):
    secret = release.one("Secret", "muster-tokens-inline")["data"]["tokens.toml"]
    toml = base64.b64decode(secret).decode()
    rule = re.search(r'(?s)account = "muster-watcher".*?role = "(\w+)"', toml)
    assert rule is not None
    assert rule[1] == "watcher"
