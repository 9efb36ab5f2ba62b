"""pyproject.toml has the version, and all else that carries one has the same."""

import re
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from tests.support.releases import LAST

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "dev/set-version.py"
CURRENT: str = runpy.run_path(str(SCRIPT))["current"]()


def run(root: Path, argument: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "dev/set-version.py"), argument]
    return subprocess.run(command, capture_output=True, text=True)


def test_all_that_carries_the_version_has_that_of_the_project():
    done = run(ROOT, "--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_installed_package_has_the_current_version():
    assert version("muster-coordinator") == CURRENT, "Run: make venv"


def test_no_module_has_a_version_of_its_own():
    for folder in ("service", "relay", "watcher", "keeper", "preload", "client", "checkpoint", "worker_sdk"):
        for module in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"""(?i)version[_\w]* = ["']\d""", module.read_text()), module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that carry the version, and what writes it."""
    for name in ("pyproject.toml", "Dockerfile", "README.md", "dev", "docs", "deploy"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def test_it_is_written_everywhere_at_once(copy: Path):
    assert run(copy, "7.8.9.dev3").returncode == 0
    chart = (copy / "deploy/helm/muster/Chart.yaml").read_text()
    assert "\nversion: 7.8.9-dev.3\n" in chart
    assert '\nappVersion: "7.8.9.dev3"\n' in chart
    assert '\nversion = "7.8.9.dev3"\n' in (copy / "pyproject.toml").read_text()
    for name in ("README.md", "docs/kubernetes.md", "deploy/examples/restore-pod.yaml"):
        assert "muster-coordinator:7.8.9.dev3" in (copy / name).read_text()
    assert "both sides are 7.8.9.dev3\n" in (copy / "docs/operations.md").read_text()
    assert run(copy, "--check").returncode == 0
    assert run(copy, "7.8.9").returncode == 0
    assert "\nversion: 7.8.9\n" in (copy / "deploy/helm/muster/Chart.yaml").read_text()


def test_another_version_somewhere_is_named(copy: Path):
    page = copy / "docs/kubernetes.md"
    page.write_text(page.read_text() + "REGISTRY/muster-coordinator:0.0.1\n")
    done = run(copy, "--check")
    assert done.returncode == 1
    assert f"not of version {CURRENT}, which pyproject.toml has: docs/kubernetes.md." in done.stderr


def test_invalid_version_is_refused():
    done = run(ROOT, "v1")
    assert done.returncode == 1
    assert "v1 is no version: give it as 1.2.3" in done.stderr


def test_the_changelog_tells_of_the_last_release_and_of_what_is_new():
    titles = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text())
    assert titles[0] == "Unreleased"
    newest, _, date = titles[1].partition(" – ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert newest == (LAST if Version(CURRENT).is_devrelease else CURRENT)


def test_the_tree_is_of_a_later_version_than_the_last_release():
    assert Version(CURRENT) > Version(LAST)
