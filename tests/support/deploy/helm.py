"""Helm in a process of its own, since its library starts Go's threads: lint, render, install, upgrade."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import helm_python

CHART = Path(__file__).resolve().parents[3] / "deploy/helm/muster"
NAMESPACE = "ml"
CI = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())
"""The values files of the chart's ci/ folder, by name."""
KUBERNETES = ("1.27", "1.30", "1.33", "1.37")
"""The oldest that Chart.yaml admits, the newest that the validator knows, and some between."""
CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate"}
"""Kinds that Kubernetes itself does not know."""

Manifest = dict[str, Any]


CERTIFICATE = {"enabled": True, "certificate": "PEM", "privateKey": "PEM"}
TOKENS = {"enabled": True, "existingSecret": "tokens"}


def etcd(**more: Any) -> Manifest:
    """Values of a state in etcd."""
    return {"type": "etcd", "etcd": {"endpoints": ["etcd:2379"], **more}}


ETCD = etcd()


class HelmError(Exception):
    """Helm refuses the values, a template fails, or the cluster refuses what was rendered."""


@dataclass(frozen=True)
class Release:
    """What an installation would bring."""

    manifests: list[Manifest]
    notes: str
    complaints: list[str]
    """Of the strict linter: errors and warnings."""

    def of_kind(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Manifest:
        (found,) = (one for one in self.of_kind(kind) if name in (None, one["metadata"]["name"]))
        return found


def pod_of(release: Release) -> Manifest:
    pod: Manifest = release.one("StatefulSet")["spec"]["template"]
    return pod


def container_of(release: Release) -> Manifest:
    first: Manifest = pod_of(release)["spec"]["containers"][0]
    assert first["name"] == "muster"
    return first


def matches(selector: Manifest, labels: Manifest) -> bool:
    return selector.items() <= labels.items()


def environment_of(release: Release) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container_of(release)["env"]}


def trusted(values: Manifest | None, chart: Path = CHART) -> Manifest:
    """Values with which our chart may do without TLS and tokens, unless they say otherwise."""
    knows = chart.is_dir() and "\nallowInsecure:" in (chart / "values.yaml").read_text()
    return ({"allowInsecure": True} if knows else {}) | (values or {})


class Helm:
    """The process; it answers one line of JSON with another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def release(
        self,
        values: Manifest | None = None,
        *,
        chart: Path = CHART,
        name: str = "muster",
        namespace: str = NAMESPACE,
        upgrade: bool = False,
    ) -> Release:
        """Lint the chart and render it, as `helm template` does: there is no cluster to look anything up in.

        Raises:
            HelmError: the values are refused.
        """
        answer = self.ask(
            action="render",
            chart=str(chart),
            values=trusted(values, chart),
            name=name,
            namespace=namespace,
            upgrade=upgrade,
        )
        notes, manifests = "", []
        for path, text in answer["templates"].items():
            if path.endswith("NOTES.txt"):
                notes += text
            else:
                manifests += [one for one in yaml.load_all(text, Strict) if one]
        return Release(manifests, notes, answer["complaints"])

    def ask(self, **request: Any) -> dict[str, Any]:
        """Have the process do something.

        Raises:
            HelmError: it fails.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise HelmError(answer["error"])
        return answer


class Strict(yaml.CSafeLoader):
    """Refuses a key that is there twice, as Kubernetes does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice: {keys} {node.start_mark}"
        return super().construct_mapping(node, deep)


@contextmanager
def running() -> Iterator[Helm]:
    """The process, ended at the end."""
    command = [sys.executable, "-m", "tests.support.deploy.helm"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Helm(process)
        assert process.stdin is not None
        process.stdin.close()


def values_of(name: str, chart: Path = CHART) -> Manifest:
    """One of the chart's ci/ values files."""
    return yaml.safe_load((chart / f"ci/{name}-values.yaml").read_text()) or {}


@functools.cache
def cluster_of(kubeconfig: str, namespace: str) -> "helm_python.Config":
    """A connection, kept for as long as the process: helm's records of its releases are in its memory."""
    import helm_python

    return helm_python.Config(kubeconfig_content=kubeconfig, namespace=namespace, storage_driver="memory")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import helm_python

    try:
        if request["action"] == "render":
            return render(request)
        cluster = cluster_of(request["kubeconfig"], request["namespace"])
        return {"done": getattr(cluster, request["action"])(*request["arguments"])}
    except helm_python.HelmError as error:
        return {"error": str(error)}


def render(request: dict[str, Any]) -> dict[str, Any]:
    import helm_python

    chart, values, namespace = request["chart"], request["values"], request["namespace"]
    report = helm_python.lint(chart, values, strict=True, namespace=namespace)
    with helm_python.Chart.load(chart) as loaded:
        loaded.validate_schema(values)
        upgrade = request["upgrade"]
        templates = loaded.render(
            values, name=request["name"], namespace=namespace, is_upgrade=upgrade, is_install=not upgrade
        )
    complaints = [str(one) for one in report["messages"] if one["severity"] > 1] + report["errors"]
    return {"templates": templates, "complaints": complaints}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
