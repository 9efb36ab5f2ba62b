"""The files for hosts and editors call the project's own tools, and fetch nothing by themselves."""

import json
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def test_hooks_are_local_and_installed():
    assert [repo["repo"] for repo in HOOKS["repos"]] == ["local"]
    assert {hook["language"] for hook in HOOKS["repos"][0]["hooks"]} == {"system"}


def test_hooks_call_tools_that_make_calls():
    for hook in HOOKS["repos"][0]["hooks"]:
        entry = hook["entry"]
        tools = re.findall(r"\.venv/bin/([\w-]+)", entry)
        targets = re.findall(r"^make ([\w-]+)", entry)
        assert tools or targets, entry
        assert all(f"$(BIN)/{tool}" in MAKEFILE for tool in tools), entry
        assert all(f"\n{target}:" in MAKEFILE for target in targets), entry


def test_ci_runs_what_everyone_runs_and_nothing_else():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step] == ["actions/checkout"]


def test_containers_have_the_oldest_python_that_is_supported():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())["image"]
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert container == job["container"]
    assert container.startswith(f"python:{oldest.removeprefix('>=')}-")
