"""Runs a pod's first container as Kubernetes would, without it: files, command line, probes, end.

The paths at which a container finds its volumes become folders of the test, its ports become free ports of
this machine, and the names of Services become this machine's name.
"""

import base64
import os
import re
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from lab.patience import PATIENCE
from lab.processes import fork_client
from lab.processes.coordinator import MUSTER, free_port
from tests.support.deploy.helm import Manifest, Release

Files = Mapping[str, bytes]


class Node:
    """What the containers of one release share: its objects, Secrets that others made, ports and folders.

    Args:
        release: the rendered chart.
        folder: an empty one.
        secrets: those that the release does not make, by name.
        pod: the name of the coordinator's pod.
        kind: of the object whose containers they are.
        addresses: further addresses of the cluster, and where they are on this machine.
    """

    def __init__(
        self,
        release: Release,
        folder: Path,
        secrets: Mapping[str, Files] | None = None,
        *,
        pod: str = "muster-0",
        kind: str = "StatefulSet",
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.pod = pod
        self.addresses = dict(addresses or {})
        self._objects: dict[tuple[str, str], Files] = {
            ("Secret", name): files for name, files in (secrets or {}).items()
        }
        for one in release.of_kind("ConfigMap"):
            files = {key: text.encode() for key, text in one["data"].items()}
            self._objects["ConfigMap", one["metadata"]["name"]] = files
        for one in release.of_kind("Secret"):
            files = {key: base64.b64decode(text) for key, text in one["data"].items()}
            self._objects["Secret", one["metadata"]["name"]] = files
        template = release.one(kind)["spec"]["template"]
        self.ports = {
            port["name"]: (port["containerPort"], free_port())
            for port in template["spec"]["containers"][0]["ports"]
        }
        self._hosts = {f"{one['metadata']['name']}.ml.svc": one["spec"] for one in release.of_kind("Service")}

    def local(self, text: str, mounts: Mapping[str, Path]) -> str:
        """A text whose paths and addresses of the container are made those of this machine."""
        # In one pass: the paths of this machine may hold those of the container.
        paths = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))
        text = re.sub(paths, lambda match: str(mounts[match[0]]), text) if paths else text
        for address, here in self.addresses.items():
            text = text.replace(address, here)
        for name, (port, ours) in self.ports.items():
            for host in ("0.0.0.0", "[::]"):  # On loopback, the HTTP port would check Host names.
                text = text.replace(f"{host}:{port}", f"0.0.0.0:{ours}")
            text = text.replace(f"localhost:{port}", f"127.0.0.1:{ours}")
            for host, service in self._hosts.items():
                for offered in (one["port"] for one in service["ports"] if one["name"] == name):
                    text = text.replace(f"{host}:{offered}", f"127.0.0.1:{ours}")
        return text

    def mount(self, pod: Manifest, container: Manifest, folder: Path) -> dict[str, Path]:
        """Write the volumes of a container; where each path of it is."""
        mounts = {mount["mountPath"]: folder / mount["name"] for mount in container.get("volumeMounts", [])}
        for target in mounts.values():
            target.mkdir(parents=True, exist_ok=True)
        for volume in pod.get("volumes", []):
            for source in self._sources(volume):
                for path, content in source.items():
                    # Only a ConfigMap's text names paths and addresses of the container.
                    text = self.local(content.decode(), mounts) if "configMap" in volume else content.decode()
                    (folder / volume["name"] / path).write_text(text)
        return mounts

    def secret(self, name: str) -> Files:
        """What `kubectl get secret` shows."""
        return self._objects["Secret", name]

    def _sources(self, volume: Manifest) -> list[Files]:
        match volume:
            case {"configMap": found}:
                return [self._objects["ConfigMap", found["name"]]]
            case {"secret": found}:
                return [self._chosen(found, found["secretName"])]
            case {"projected": {"sources": sources}}:
                return [self._chosen(one["secret"], one["secret"]["name"]) for one in sources]
        return []

    def _chosen(self, source: Manifest, name: str) -> Files:
        files = self.secret(name)
        return {item["path"]: files[item["key"]] for item in source["items"]}


class Container:
    """The first container of a pod, as a process.

    Args:
        node: where it runs.
        pod: its specification.
        name: of the folder of its volumes; a second container of that name finds what the first left.
    """

    def __init__(self, node: Node, pod: Manifest, name: str) -> None:
        self._container: Manifest = pod["containers"][0]
        self._node = node
        self.grace = pod.get("terminationGracePeriodSeconds", 30)
        self.mounts = node.mount(pod, self._container, node.folder / name)
        self.log = node.folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Container":
        with self.log.open("ab") as log:
            command = [str(MUSTER), *(self._local(word) for word in self._container["args"])]
            self._process = fork_client.popen(
                command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _local(self, text: str) -> str:
        return self._node.local(text, self.mounts)

    def _environment(self) -> dict[str, str]:
        """The container's variables, and those that this machine's Python needs."""
        mine = {key: value for key, value in os.environ.items() if key in ("PATH", "PYTHONPATH", "HOME")}
        given: dict[str, str] = {}
        for one in self._container.get("env", []):
            value = one.get("value", "from elsewhere")
            if one.get("valueFrom") == {"fieldRef": {"fieldPath": "metadata.name"}}:
                value = self._node.pod
            for name, before in given.items():
                value = value.replace(f"$({name})", before)
            given[one["name"]] = value
        return mine | {name: self._local(value) for name, value in given.items()}

    def ask(self, asked: Manifest, timeout: float = 10) -> int:
        """The status of an HTTP request, 0 without an answer. No certificate is checked or shown."""
        _, port = self._node.ports[asked["port"]]
        trusting = ssl.create_default_context()
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
        url = f"{asked['scheme'].lower()}://127.0.0.1:{port}{asked['path']}"
        try:
            with urllib.request.urlopen(url, timeout=timeout, context=trusting) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except OSError:
            return 0

    def probe(self, name: str) -> bool:
        """Ask once, as the kubelet does."""
        probe = self._container[name]
        return 200 <= self.ask(probe["httpGet"], probe["timeoutSeconds"]) < 400

    def started(self) -> None:
        """Wait until the startup probe passes, as long as its limits allow."""
        probe = self._container["startupProbe"]
        deadline = time.monotonic() + probe["failureThreshold"] * probe["periodSeconds"]
        while not self.probe("startupProbe"):
            assert self._process is not None
            assert self._process.poll() is None, f"it ended at once:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, "the startup probe does not pass"
            time.sleep(0.05)

    def stopped(self) -> int:
        """SIGTERM; the exit code, or an error if it is still there at the end of the grace period."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=self.grace)

    def ended(self) -> int:
        """The exit code of a container that ends by itself."""
        assert self._process is not None
        return self._process.wait(timeout=PATIENCE)

    def run(self, *arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """``kubectl exec``: another ``muster`` command with the container's variables, less some."""
        environment = {name: value for name, value in self._environment().items() if name not in without}
        command = [str(MUSTER), *(self._local(word) for word in arguments)]
        return fork_client.run(command, env=environment, timeout=PATIENCE)
