"""The Dockerfile's own steps, carried out without Docker, and the coordinator that comes of them."""

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from lab.patience import PATIENCE, until
from lab.processes.coordinator import free_port
from tests.support.deploy import dockerfile
from tests.support.deploy.dockerfile import Image

ROOT = Path(__file__).resolve().parents[3]
PINNED = (ROOT / "requirements/service.txt").read_text()
WATCH = (
    "import sys; sys.argv = ['muster', 'watch', '--source=kubernetes', '--endpoint=127.0.0.1:1']\n"
    "from muster.service.cli.script import main; main()"
)
"""A watcher outside of a pod."""
LIST = """
import importlib.metadata, json
print(json.dumps({one.name: one.version for one in importlib.metadata.distributions()}))
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return dockerfile.build(ROOT / "Dockerfile", tmp_path_factory.mktemp("image"))


def run(image: Image, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*dockerfile.unprivileged(), *command],
        env=image.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.fixture
def started(image: Image) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The image's entry point and command, and its HTTP port."""
    ports = {"0.0.0.0:7550": free_port(), "0.0.0.0:7551": free_port()}
    command = image.command["ENTRYPOINT"] + image.command["CMD"]
    assert all(any(address in word for word in command) for address in ports)
    for address, port in ports.items():
        command = [image.local(word).replace(address, f"127.0.0.1:{port}") for word in command]
    with subprocess.Popen(
        [*dockerfile.unprivileged(), *command],
        env=image.environment,
        cwd=image.at("."),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process, ports["0.0.0.0:7551"]
        process.kill()


def test_the_image_is_for_no_root_and_is_stopped_gently(image: Image):
    assert image.user == "10001:10001"
    assert image.signal == "SIGTERM"


def test_the_coordinator_starts_as_the_user_and_ends_on_the_signal(
    image: Image, started: tuple[subprocess.Popen[str], int]
):
    process, port = started
    until(lambda: ready(port) or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]
    if dockerfile.unprivileged():
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "Uid:\t10001\t10001\t10001\t10001" in status
        assert "Groups:\t\n" in status or "Groups:\t \n" in status
    assert image.at("/var/lib/muster/muster.db").exists()
    process.send_signal(getattr(signal, image.signal))
    assert process.wait(timeout=PATIENCE) == 0


def test_image_has_a_bill_of_its_packages(image: Image):
    """All that is installed there, at the versions that are pinned with hashes."""
    bill = json.loads(image.at("/opt/muster/sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "muster-coordinator")
    listed = {one["name"]: one["version"] for one in bill["components"]}
    installed = run(image, str(image.at("/opt/muster/bin/python")), "-c", LIST)
    assert listed == {
        canonicalize_name(name): version
        for name, version in json.loads(installed.stdout).items()
        if name != "muster-coordinator"
    }
    for one in bill["components"]:
        assert one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}"
        assert f"\n{one['name']}=={one['version']} " in PINNED


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=PATIENCE) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_there_is_no_torch_in_it(image: Image):
    python = str(image.at("/opt/muster/bin/python"))
    assert "No module named 'torch'" in run(image, python, "-c", "import torch").stderr
    assert run(image, python, "-c", "import muster.service.app").returncode == 0


def test_watcher_has_the_client_of_kubernetes(image: Image):
    found = run(image, str(image.at("/opt/muster/bin/python")), "-c", WATCH)
    assert found.returncode == 1
    assert "the service account of this pod does not lead to an API server" in found.stderr


def test_image_has_all_requirements_of_the_service(image: Image, tmp_path: Path):
    python = str(image.at("/opt/muster/bin/python"))
    check = [str(image.root.parent / "base/bin/pip"), "--python", python, "check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "No broken requirements found.\n")


def test_the_user_can_write_nothing_but_the_state(image: Image):
    if not dockerfile.unprivileged():
        assert image.user  # who runs the tests owns the folder
        return
    assert run(image, "touch", str(image.at("/opt/muster/x"))).returncode != 0
    assert run(image, "touch", str(image.at("/var/lib/muster/x"))).returncode == 0
