#!/usr/bin/env python3
"""Writes the version into all that carry it: pyproject.toml, the chart, the image's tag in docs and examples.

pyproject.toml has the one that counts, and the packages read it from their metadata. The chart is released
with the coordinator: its ``appVersion`` is the same, and so is its ``version``, as semantic versioning
spells it.

Usage: dev/set-version.py VERSION, such as 0.2.0, or 0.3.0.dev0 between releases. With ``--check`` it writes
nothing, and fails if something carries another version than pyproject.toml.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+(\.dev\d+)?")
PROJECT = re.compile(r'(?m)(?<=^version = ").*(?="$)')
CHART = re.compile(r"(?m)(?<=^version: ).*$")
CHART_APP = re.compile(r'(?m)(?<=^appVersion: ").*(?="$)')
IMAGE = re.compile(r"(?<=muster-coordinator:)\d[\w.+-]*")
DOCTOR = re.compile(r"(?<=both sides are )\d[\w.+-]*")


def main() -> None:
    """Write, or compare."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    (wanted,) = sys.argv[1:]
    check = wanted == "--check"
    version = current() if check else wanted
    if not VERSION.fullmatch(version):
        sys.exit(f"{version} is no version: give it as 1.2.3, or as 1.2.3.dev0 between releases")
    changes = dict(changed(version))
    if check and changes:
        names = ", ".join(str(path.relative_to(ROOT)) for path in changes)
        sys.exit(
            f"not of version {version}, which pyproject.toml has: {names}. Run: dev/set-version.py {version}"
        )
    for path, text in changes.items():
        path.write_text(text)
        print(path.relative_to(ROOT))


def current() -> str:
    """The version of the tree."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return version


def semantic(version: str) -> str:
    """As Helm spells it: a development version comes before its release in its order, too."""
    return version.replace(".dev", "-dev.")


def changed(version: str, root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """The files that carry another version, and what they should be."""
    for path, patterns in _places(root):
        before = text = path.read_text()
        for pattern, spelled in patterns.items():
            text = pattern.sub(spelled(version), text)
        if text != before:
            yield path, text


def _places(root: Path) -> Iterator[tuple[Path, dict[re.Pattern[str], Callable[[str], str]]]]:
    """Where the version stands: the files, what finds it there, and how it is spelled."""
    yield root / "pyproject.toml", {PROJECT: str}
    yield root / "deploy/helm/muster/Chart.yaml", {CHART: semantic, CHART_APP: str}
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    objects = [*(root / "deploy").rglob("*.md"), *(root / "deploy").rglob("*.yaml")]
    for path in [root / "Dockerfile", *pages, *objects]:
        yield path, {IMAGE: str, DOCTOR: str}


if __name__ == "__main__":
    main()
