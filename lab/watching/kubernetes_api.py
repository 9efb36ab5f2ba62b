"""The least of an API server for those that read and watch: objects in memory, lists, watches, patches.

It answers as Kubernetes does: 403 for what its rules do not allow, 410 for a resource version that it has
forgotten, bookmarks, and `DELETED` for an object that no longer matches a watch's selector.
"""

import copy
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lab.http_server import serving

Manifest = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace (empty for none) and name."""

PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+)(?P<subresource>/status)?)?"
)


@dataclass(frozen=True)
class Asked:
    """A request, as a rule of RBAC sees it."""

    verb: str
    group: str
    plural: str
    namespace: str
    name: str
    selector: str
    """Its field selector."""
    token: str


@dataclass(frozen=True)
class Change:
    """What happened to an object."""

    revision: int
    key: Key
    before: Manifest | None
    after: Manifest | None


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class KubernetesApi:
    """The objects, and what was asked."""

    url: str
    allows: Callable[[Asked], bool] = lambda _: True
    objects: dict[Key, Manifest] = field(default_factory=dict)
    unserved: set[str] = field(default_factory=set)
    """Plurals of APIs that this server does not have."""
    asked: list[Asked] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Is notified when anything happens."""
    _changes: list[Change] = field(default_factory=list)
    _revision: int = 1
    _oldest: int = 0
    """Watches cannot begin before this revision."""
    _breaks: int = 0
    """How often all connections were broken off."""
    _bookmarks: int = 0

    # ------------------------------------------------------------------ what tests do

    def put(self, plural: str, manifest: Manifest) -> None:
        """Create or replace an object."""
        metadata = manifest["metadata"]
        self._change((plural, metadata.get("namespace", ""), metadata["name"]), copy.deepcopy(manifest))

    def edit(self, plural: str, name: str, namespace: str = "", **spec_or_status: Any) -> None:
        """Change fields of an object: ``metadata``, ``spec`` and ``status`` are merged into what it has."""
        key = (plural, namespace, name)
        manifest = copy.deepcopy(self.objects[key])
        merge(manifest, spec_or_status)
        self._change(key, manifest)

    def delete(self, plural: str, name: str, namespace: str = "") -> None:
        """Remove an object."""
        self._change((plural, namespace, name), None)

    def forget(self) -> None:
        """Forget all changes: every client must list again."""
        with self.changed:
            self._revision += 1
            self._oldest = self._revision
            self.changed.notify_all()

    def bookmark(self) -> None:
        """Send a bookmark to all watches."""
        with self.changed:
            self._revision += 1
            self._bookmarks += 1
            self.changed.notify_all()

    def break_off(self) -> None:
        """End all watches in the middle of a line."""
        with self.changed:
            self._breaks += 1
            self.changed.notify_all()

    def wait_for(self, wanted: Callable[[], bool], seconds: float = 20.0) -> None:
        """Wait until something is true, which may depend on objects and on what was asked."""
        with self.changed:
            assert self.changed.wait_for(wanted, seconds), self.asked

    def verbs(self, plural: str) -> list[str]:
        """Return what was asked of a collection, in order."""
        return [one.verb for one in self.asked if one.plural == plural]

    # ------------------------------------------------------------------ what the server does

    def note(self, asked: Asked) -> None:
        with self.changed:
            self.asked.append(asked)
            self.changed.notify_all()
        if not self.allows(asked):
            what = f"{asked.verb} {asked.plural}"
            raise Refused(HTTPStatus.FORBIDDEN, f"{asked.plural} is forbidden: the user cannot {what}")

    def list(self, plural: str, namespace: str, query: dict[str, str]) -> Manifest:
        with self.changed:
            items = [one for key, one in self.objects.items() if matches(key, one, plural, namespace, query)]
            return {"kind": "List", "metadata": {"resourceVersion": str(self._revision)}, "items": items}

    def read(self, key: Key) -> Manifest:
        if key not in self.objects:
            raise Refused(HTTPStatus.NOT_FOUND, f'{key[0]} "{key[2]}" not found')
        return self.objects[key]

    def patch(self, key: Key, patch: Manifest) -> Manifest:
        manifest = copy.deepcopy(self.read(key))
        merge(manifest, patch)
        self._change(key, manifest)
        return self.objects[key]

    def apply(self, key: Key, manifest: Manifest) -> Manifest:
        """A server-side apply to the status of an object, whose lists are maps by name."""
        current = copy.deepcopy(self.read(key))
        if manifest["metadata"].get("uid") != current["metadata"]["uid"]:
            raise Refused(HTTPStatus.CONFLICT, f"{key[2]} is another object by now: its uid differs")
        for name, entries in manifest["status"].items():
            for entry in entries:
                known = next(one for one in current["status"][name] if one["name"] == entry["name"])
                if key[0] == "evictions":
                    check_responder(current, known, entry)
                started = {"startTime": known["startTime"]} if "startTime" in known else {}
                known.clear()  # The responder manages all other fields: what it leaves out is removed.
                known.update(started | entry)
        self._change(key, current)
        return self.objects[key]

    @property
    def before(self) -> tuple[int, int]:
        """How many breaks and bookmarks a watch that is asked for now has missed."""
        return self._breaks, self._bookmarks

    def events(
        self, plural: str, namespace: str, query: dict[str, str], before: tuple[int, int]
    ) -> Iterator[Manifest | None]:
        """The events of a watch; None: its connection breaks."""
        version = int(query["resourceVersion"])
        breaks, bookmarks = before
        with self.changed:
            while True:
                if version < self._oldest:
                    yield gone()
                    return
                for change in [one for one in self._changes if one.revision > version]:
                    version = change.revision
                    earlier = (
                        change.before
                        if change.before and matches(change.key, change.before, plural, namespace, query)
                        else None
                    )
                    after = (
                        change.after
                        if change.after and matches(change.key, change.after, plural, namespace, query)
                        else None
                    )
                    if after is not None:
                        yield {"type": "MODIFIED" if earlier else "ADDED", "object": after}
                    elif earlier is not None:
                        metadata = {**earlier["metadata"], "resourceVersion": str(version)}
                        yield {"type": "DELETED", "object": {**earlier, "metadata": metadata}}
                if bookmarks < self._bookmarks and query.get("allowWatchBookmarks") == "true":
                    bookmarks, version = self._bookmarks, self._revision
                    yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}
                if breaks < self._breaks:
                    yield None
                    return
                self.changed.wait()

    def _change(self, key: Key, after: Manifest | None) -> None:
        with self.changed:
            self._revision += 1
            before = self.objects.get(key)
            if after is None:
                del self.objects[key]
            else:
                after["metadata"]["resourceVersion"] = str(self._revision)
                after["metadata"].setdefault("uid", f"uid-of-{'-'.join(key)}")
                self.objects[key] = after
            self._changes.append(Change(self._revision, key, before, after))
            self.changed.notify_all()


def check_responder(eviction: Manifest, known: Manifest, entry: Manifest) -> None:
    """What Kubernetes asks of a change of ``status.responders``."""
    states = {one["name"]: one["state"] for one in eviction["status"]["targetResponders"]}
    if states[entry["name"]] != "Active":
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f"responder {entry['name']} is not active")
    is_changed = "completionTime" in known and entry.get("completionTime") != known["completionTime"]
    if is_changed or "startTime" in entry:
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "a time that was set is immutable")


def gone() -> Manifest:
    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
    return {"type": "ERROR", "object": status}


def merge(target: Manifest, patch: Manifest) -> None:
    """A JSON merge patch."""
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict) and isinstance(target.get(name), dict):
            merge(target[name], value)
        else:
            target[name] = copy.deepcopy(value)


def matches(key: Key, one: Manifest, plural: str, namespace: str, query: dict[str, str]) -> bool:
    if key[0] != plural or namespace not in ("", key[1]):
        return False
    fields = {"metadata.name": key[2], "spec.nodeName": one.get("spec", {}).get("nodeName", "")}
    labels = one["metadata"].get("labels", {})
    return all(
        values.get(name, "") == value
        for parameter, values in (("fieldSelector", fields), ("labelSelector", labels))
        for part in query.get(parameter, "").split(",")
        if part
        for name, _, value in [part.partition("=")]
    )


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    api: KubernetesApi

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: what was asked is in `KubernetesApi.asked`."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        found = PATH.fullmatch(url.path)
        try:
            if found is None:
                raise Refused(HTTPStatus.NOT_FOUND, f"there is nothing at {url.path}")
            self._route(found, query, body)
        except Refused as refused:
            self._send(
                {"kind": "Status", "status": "Failure", "message": str(refused), "code": refused.status},
                refused.status,
            )

    do_GET = do_PATCH = _answer  # noqa: N815 (these are the names it looks for)

    def _route(self, found: re.Match[str], query: dict[str, str], body: bytes) -> None:
        plural, namespace, name = found["plural"], found["namespace"] or "", found["name"] or ""
        watches = query.get("watch") == "true"
        verb = "patch" if self.command == "PATCH" else "watch" if watches else "get" if name else "list"
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        selector = query.get("fieldSelector", "")
        before = self.api.before
        resource = plural + (found["subresource"] or "")
        self.api.note(Asked(verb, found["group"] or "", resource, namespace, name, selector, token))
        if plural in self.api.unserved:
            raise Refused(HTTPStatus.NOT_FOUND, "the server could not find the requested resource")
        match verb:
            case "patch":
                key, change = (plural, namespace, name), json.loads(body)
                if self.headers["Content-Type"] == "application/apply-patch+yaml":
                    assert found["subresource"], self.path
                    assert query.keys() == {"fieldManager", "force"}, self.path
                    self._send(self.api.apply(key, change))
                else:
                    assert self.headers["Content-Type"] == "application/merge-patch+json"
                    self._send(self.api.patch(key, change))
            case "watch":
                self._stream(self.api.events(plural, namespace, query, before))
            case "get":
                self._send(self.api.read((plural, namespace, name)))
            case "list":
                self._send(self.api.list(plural, namespace, query))

    def _send(self, content: Manifest, status: HTTPStatus = HTTPStatus.OK) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, events: Iterator[Manifest | None]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        try:
            for event in events:
                if event is None:
                    self._chunk(b'{"type": "MODI')
                    return
                self._chunk(json.dumps(event).encode() + b"\n")
            self._chunk(b"")
        except OSError:
            pass  # Its watcher has gone.

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def running(tls: ssl.SSLContext | None = None) -> Iterator[KubernetesApi]:
    """A server without objects."""
    handler = type("_Handler", (Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        api = KubernetesApi(f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}")
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        handler.api = api  # type: ignore[attr-defined]
        with serving(server):  # A watch has a thread until its client goes.
            try:
                yield api
            finally:
                api.break_off()


def kubeconfig(url: str, token: str = "") -> Manifest:
    """The configuration with which a client reaches a server."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "small", "cluster": {"server": url}}],
        "users": [{"name": "tester", "user": {"token": token} if token else {}}],
        "contexts": [{"name": "small", "context": {"cluster": "small", "user": "tester"}}],
        "current-context": "small",
    }


def node(name: str = "node-1", **fields: Any) -> Manifest:
    """A node."""
    return {"metadata": {"name": name, "uid": f"uid-of-{name}"}, "spec": {}, **fields}


def pod(name: str, node_name: str = "node-1", namespace: str = "team-a", **fields: Any) -> Manifest:
    """A pod that runs."""
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-of-{name}", **fields.pop("metadata", {})}
    spec = {"nodeName": node_name, **fields.pop("spec", {})}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running", **fields.pop("status", {})}}


def disruption(reason: str, message: str = "", at: str = "2026-11-25T10:00:00Z") -> Manifest:
    """The condition of a pod that is to be disrupted."""
    return {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": at,
    }


def eviction(pod_name: str, responder: str, state: str = "Active", namespace: str = "team-a") -> Manifest:
    """The Eviction of a pod, as its controller makes it of an EvictionRequest."""
    last = "imperative-eviction.k8s.io/evictor"
    states = {responder: state, last: "Active" if state == "Completed" else "Inactive"}
    name = f"evict-{pod_name}"
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-of-{name}"},
        "spec": {"target": {"pod": {"name": pod_name, "uid": f"uid-of-{pod_name}"}}},
        "status": {
            "requesters": [{"name": "example.org/maintenance", "intent": "Eviction"}],
            "targetResponders": [{"name": one, "state": of_it} for one, of_it in states.items()],
            "responders": [{"name": one} for one in states],
        },
    }


def answer_in(api: KubernetesApi, name: str, namespace: str = "team-a") -> Manifest:
    """What the first responder of an Eviction has answered."""
    answer: Manifest = api.objects["evictions", namespace, name]["status"]["responders"][0]
    return answer
