"""Helm in a process of its own, since its library starts Go's threads: lint and render charts, offline."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy/helm/muster"
NAMESPACE = "ml"

Manifest = dict[str, Any]


class HelmError(Exception):
    """Helm refuses the values, or a template fails."""


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
    ) -> Release:
        """Lint the chart and render it.

        Raises:
            HelmError: the values are refused.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"chart": str(chart), "values": values or {}, "name": name, "namespace": namespace}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise HelmError(answer["error"])
        notes = answer["templates"].pop("muster/templates/NOTES.txt")
        manifests = [
            one for text in answer["templates"].values() for one in yaml.load_all(text, Strict) if one
        ]
        return Release(manifests, notes, answer["complaints"])


class Strict(yaml.SafeLoader):
    """Refuses a key that is there twice, as Kubernetes does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice: {keys} {node.start_mark}"
        return super().construct_mapping(node, deep)


@contextmanager
def running() -> Iterator[Helm]:
    """The process, ended at the end."""
    command = [sys.executable, "-m", "tests.support.helm"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Helm(process)
        assert process.stdin is not None
        process.stdin.close()


def values_of(name: str, chart: Path = CHART) -> Manifest:
    """One of the chart's ci/ values files."""
    return yaml.safe_load((chart / f"ci/{name}-values.yaml").read_text()) or {}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import helm_python

    chart, values = request["chart"], request["values"]
    try:
        report = helm_python.lint(chart, values, strict=True, namespace=request["namespace"])
        with helm_python.Chart.load(chart) as loaded:
            loaded.validate_schema(values)
            templates = loaded.render(values, name=request["name"], namespace=request["namespace"])
    except helm_python.HelmError as error:
        return {"error": str(error)}
    complaints = [str(one) for one in report["messages"] if one["severity"] > 1] + report["errors"]
    return {"templates": templates, "complaints": complaints}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
