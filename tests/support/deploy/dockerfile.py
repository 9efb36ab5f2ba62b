"""Carries out a Dockerfile without Docker: its steps, in a folder that stands for the image's root.

It knows the instructions that ours uses. The base image is a virtual environment with pip; ``--platform``,
build arguments and caches are not there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

USER = "10001"


@dataclass
class Image:
    """What came of it."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    command: dict[str, list[str]] = field(default_factory=dict)
    signal: str = ""

    def at(self, path: str) -> Path:
        """Where a path of the image is, seen from here."""
        return self.root / str(Path("/", self.workdir, path)).lstrip("/")

    def local(self, text: str) -> str:
        """A text whose paths in the image are made those of the folder."""
        return re.sub(r"(?<![\w.])/(?=(opt|var)/)", f"{self.root}/", text)


def build(dockerfile: Path, folder: Path) -> Image:
    """Carry out all stages.

    Args:
        dockerfile: with its ``.dockerignore`` and what it copies beside it.
        folder: an empty one.
    """
    context = _context(dockerfile.parent, folder / "context")
    base = _base(folder / "base")
    stages: dict[str, Image] = {}
    for instruction, rest in _instructions(dockerfile.read_text()):
        if instruction == "ARG":
            continue
        if instruction == "FROM":
            name = rest.partition(" AS ")[2] or "final"
            image = stages[name] = Image(folder / name, {"PATH": f"{base}/bin:{os.environ['PATH']}"})
        elif instruction == "COPY":
            source = (
                stages[rest.split()[0].removeprefix("--from=")].root
                if rest.startswith("--from=")
                else context
            )
            *sources, target = rest.split()[rest.startswith("--from=") :]
            for one in sources:
                _copy(source / one.lstrip("/"), image.at(target), into=target.endswith("/"))
        elif instruction == "RUN":
            _run(image, rest)
        else:
            _note(image, instruction, rest)
    return stages["final"]


def unprivileged() -> list[str]:
    """Before a command: run it as the image's user. Root's folders may be read: Python may lie there."""
    if os.geteuid() != 0:
        return []
    assert shutil.which("setpriv"), "setpriv is not there: install Debian's package util-linux"
    capabilities = [
        f"--{which}=-all,+dac_read_search" for which in ("inh-caps", "ambient-caps", "bounding-set")
    ]
    return [
        "setpriv",
        f"--reuid={USER}",
        f"--regid={USER}",
        "--clear-groups",
        *capabilities,
        "--no-new-privs",
    ]


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined]


def _context(source: Path, target: Path) -> Path:
    """What ``.dockerignore`` lets through: it excludes all, and then names what is wanted."""
    first, *others = [
        line for line in (source / ".dockerignore").read_text().splitlines() if line and line[0] != "#"
    ]
    assert first == "*"
    for line in others:
        if line.startswith("!"):
            _copy(source / line[1:], target / line[1:])
    return target


def _base(folder: Path) -> Path:
    """A virtual environment with this one's pip, which is quicker than one of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = folder / "bin/pip"
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {folder}/bin/python "$@"\n')
    pip.chmod(0o755)
    return folder


def _copy(source: Path, target: Path, *, into: bool = False) -> None:
    assert source.exists(), f"{source} is not there to be copied"
    target = target / source.name if into else target
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=ignore)
    else:
        shutil.copy(source, target)


def _run(image: Image, command: str) -> None:
    mine = {} if os.geteuid() == 0 else {USER: str(os.getuid())}
    for theirs, ours in mine.items():
        command = command.replace(theirs, ours)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | image.environment
    done = subprocess.run(
        ["bash", "-ec", image.local(command)],
        cwd=image.at("."),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"RUN {command}\n{done.stdout}{done.stderr}"


def _note(image: Image, instruction: str, rest: str) -> None:
    if instruction == "WORKDIR":
        image.workdir = rest
        image.at(".").mkdir(parents=True, exist_ok=True)
    elif instruction == "ENV":
        for assignment in rest.split():
            key, _, value = assignment.partition("=")
            image.environment[key] = image.local(value).replace("$PATH", image.environment["PATH"])
    elif instruction == "USER":
        image.user = rest
    elif instruction in ("ENTRYPOINT", "CMD"):
        image.command[instruction] = json.loads(rest)
    elif instruction == "STOPSIGNAL":
        image.signal = rest
    else:
        assert instruction in ("LABEL", "EXPOSE"), f"{instruction} is not known here"
