"""The least of an API server with which helm installs, upgrades and rolls back: objects in memory.

It keeps objects as they are applied, and refuses what Kubernetes refuses by `tests.support.deploy.rules`.
There are no controllers, so no pod is ever made, and no defaults but the one replica of a StatefulSet.
"""

import copy
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from lab.http_server import serving
from lab.watching.kubernetes_api import kubeconfig
from tests.support.deploy.helm import CHART, NAMESPACE, Helm, Manifest, trusted
from tests.support.deploy.rules import immutable

KINDS = {
    "v1": ("Secret", "ConfigMap", "Service", "ServiceAccount", "PersistentVolumeClaim", "Pod"),
    "apps/v1": ("StatefulSet",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy", "Ingress"),
    "cert-manager.io/v1": ("Certificate",),
}
"""Every kind that the chart makes in the releases that are tried here."""

VERSION = r"/apis?/(?P<version>v1|[^/]+/v1)"
OBJECT = re.compile(VERSION + r"/namespaces/(?P<namespace>[^/]+)/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?")


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: HTTPStatus, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


def plural_of(kind: str) -> str:
    lower = kind.lower()
    return f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}es" if lower.endswith("s") else f"{lower}s"


PLURALS = {plural_of(kind): kind for kinds in KINDS.values() for kind in kinds}

Key = tuple[str, str, str]
"""Kind, namespace and name."""


class Cluster:
    """The objects, and what was done to them.

    Args:
        url: where the server is reached.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.objects: dict[Key, Manifest] = {}
        self.lock = threading.Lock()
        """Held while a request is answered."""
        self.done: list[str] = []
        """Changes in their order, such as `create ConfigMap/muster`."""
        self._applied: dict[Key, Manifest] = {}

    def kinds(self) -> set[str]:
        return {kind for kind, _, _ in self.objects}

    def names(self, kind: str) -> set[str]:
        return {name for found, _, name in self.objects if found == kind}

    def one(self, kind: str, name: str | None = None) -> Manifest:
        (found,) = (
            one for (its, _, called), one in self.objects.items() if its == kind and name in (None, called)
        )
        return found

    def scale(self, name: str, replicas: int) -> None:
        """`kubectl scale statefulset`."""
        self.one("StatefulSet", name)["spec"]["replicas"] = replicas

    def read(self, key: Key) -> Manifest:
        if key not in self.objects:
            kind, _, name = key
            raise Refused(HTTPStatus.NOT_FOUND, "NotFound", f'{plural_of(kind)} "{name}" not found')
        return self.objects[key]

    def list(self, kind: str, namespace: str, selector: str) -> list[Manifest]:
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        return [
            one
            for (its, where, _), one in self.objects.items()
            if (its, where) == (kind, namespace)
            and wanted.items() <= one["metadata"].get("labels", {}).items()
        ]

    def write(self, verb: str, key: Key, manifest: Manifest) -> Manifest:
        """Create or apply an object."""
        kind, namespace, name = key
        live = self.objects.get(key)
        if verb == "create" and live is not None:
            raise Refused(HTTPStatus.CONFLICT, "AlreadyExists", f'{plural_of(kind)} "{name}" already exists')
        merged = (
            copy.deepcopy(manifest) if live is None else merge(live, self._applied.get(key, {}), manifest)
        )
        if live is not None and (faults := immutable(live, merged)):
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid", f'{kind} "{name}" is invalid: {faults}')
        merged["metadata"] = {
            "uid": f"{kind}-{name}",
            **merged["metadata"],
            "namespace": namespace,
            "name": name,
        }
        if kind == "StatefulSet":
            merged["spec"].setdefault("replicas", 1)
        self._note("create" if live is None else verb, key)
        self.objects[key], self._applied[key] = merged, copy.deepcopy(manifest)
        return merged

    def delete(self, key: Key) -> Manifest:
        found = self.read(key)
        self._note("delete", key)
        del self.objects[key]
        self._applied.pop(key, None)
        return found

    def _note(self, verb: str, key: Key) -> None:
        kind, _, name = key
        self.done.append(f"{verb} {kind}/{name}")


def group(version: str) -> Manifest:
    one = {"groupVersion": version, "version": "v1"}
    return {"name": version.partition("/")[0], "versions": [one], "preferredVersion": one}


def resources(version: str) -> Manifest:
    verbs = ["create", "delete", "get", "list", "patch", "update"]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [
            {
                "name": plural_of(kind),
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": True,
                "verbs": verbs,
            }
            for kind in KINDS.get(version, ())
        ],
    }


def path_of(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def specification(path: str) -> Manifest:
    """OpenAPI, of which helm reads whether the server finds unknown fields by itself."""
    version = path.partition("/")[2]
    group, _, number = version.rpartition("/")
    return {
        "openapi": "3.0.0",
        "info": {"title": "small", "version": "1"},
        "paths": {
            f"/{path}/namespaces/{{namespace}}/{plural_of(kind)}/{{name}}": {
                "patch": {
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                    "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
                }
            }
            for kind in KINDS[version]
        },
    }


def merge(live: Manifest, applied: Manifest, new: Manifest) -> Manifest:
    """Server-side apply by one manager: what it no longer applies goes, what others set stays.

    Raises:
        Refused: it applies another value than one that somebody else set in place of its own.
    """
    merged = {key: value for key, value in live.items() if key not in applied or key in new}
    for key, value in new.items():
        before, now = applied.get(key), live.get(key)
        if isinstance(value, dict) and isinstance(now, dict):
            merged[key] = merge(now, before if isinstance(before, dict) else {}, value)
        elif key in applied and now not in (before, value):
            raise Refused(HTTPStatus.CONFLICT, "Conflict", f"Apply failed with 1 conflict: {key}")
        else:
            merged[key] = value
    return merged


class Handler(BaseHTTPRequestHandler):
    """One connection of helm's."""

    protocol_version = "HTTP/1.1"
    # An answer in one piece: the second of two would wait for the acknowledgement of the first.
    wbufsize = -1
    cluster: Cluster

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: what was done is in `Cluster.done`."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            with self.cluster.lock:
                status, content = HTTPStatus.OK, self._route(body)
        except Refused as refused:
            status = refused.status
            content = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
            content |= {"reason": refused.reason, "message": str(refused)}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 (these are the names it looks for)

    def _route(self, body: bytes) -> Manifest:
        url = urlsplit(self.path)
        if (found := OBJECT.fullmatch(url.path)) and (kind := PLURALS.get(found["plural"])):
            return self._object(found, kind, parse_qs(url.query).get("labelSelector", [""])[0], body)
        if found := re.fullmatch(VERSION, url.path):
            return resources(found["version"])
        match url.path:
            case "/version":
                return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
            case "/api":
                return {"kind": "APIVersions", "versions": ["v1"]}
            case "/apis":
                groups = [group(version) for version in KINDS if "/" in version]
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
            case "/openapi/v3":
                return {
                    "paths": {one: {"serverRelativeURL": f"/openapi/v3/{one}"} for one in map(path_of, KINDS)}
                }
            case path if path.startswith("/openapi/v3/"):
                return specification(path.removeprefix("/openapi/v3/"))
        raise Refused(HTTPStatus.NOT_FOUND, "NotFound", f"there is nothing at {url.path}")

    def _object(self, found: re.Match[str], kind: str, selector: str, body: bytes) -> Manifest:
        namespace, name = found["namespace"], found["name"]
        match self.command:
            case "GET" if name:
                return self.cluster.read((kind, namespace, name))
            case "GET":
                items = self.cluster.list(kind, namespace, selector)
                return {"kind": f"{kind}List", "apiVersion": found["version"], "metadata": {}, "items": items}
            case "DELETE":
                return self.cluster.delete((kind, namespace, name))
            case "PATCH":
                return self.cluster.write("apply", (kind, namespace, name), yaml.safe_load(body))
        manifest = yaml.safe_load(body)
        return self.cluster.write("create", (kind, namespace, manifest["metadata"]["name"]), manifest)


class Client:
    """What one types at a cluster: helm, for a release in the namespace of the tests.

    Args:
        helm: the process.
        cluster: where to.
        name: of the release.
    """

    def __init__(self, helm: Helm, cluster: Cluster, name: str = "muster") -> None:
        self._helm = helm
        self._cluster = cluster
        self._name = name

    def install(self, values: Manifest | None = None, chart: Path = CHART) -> None:
        self._do("install", str(chart), self._name, trusted(values, chart))

    def upgrade(self, values: Manifest | None = None, chart: Path = CHART) -> None:
        self._do("upgrade", str(chart), self._name, trusted(values, chart))

    def rollback(self) -> None:
        self._do("rollback", self._name)

    def uninstall(self) -> None:
        self._do("uninstall", self._name)

    def _do(self, action: str, *arguments: Any) -> None:
        config = yaml.safe_dump(kubeconfig(self._cluster.url))
        self._helm.ask(action=action, arguments=arguments, kubeconfig=config, namespace=NAMESPACE)


@contextmanager
def running() -> Iterator[Cluster]:
    """An empty cluster."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        cluster = Handler.cluster = Cluster(f"http://127.0.0.1:{server.server_port}")
        with serving(server):
            yield cluster
