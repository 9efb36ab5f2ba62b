"""A newcomer can read each folder and each module: neither is too long."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAX_MODULES = 20
"""In one folder, its ``__init__`` included and its packages not."""
MAX_LINES = 500
"""In one module."""

(SOURCES,) = re.findall(r"^SOURCES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
MODULES = [module for source in SOURCES.split() for module in sorted((ROOT / source).rglob("*.py"))]


def test_folders_have_at_most_20_modules():
    counts = Counter(module.parent.relative_to(ROOT).as_posix() for module in MODULES)
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_modules_have_at_most_500_lines():
    lines = {module.relative_to(ROOT).as_posix(): len(module.read_text().splitlines()) for module in MODULES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


LAYERS = {
    contract["name"]: [
        module.strip("( )") for layer in contract["layers"] for module in re.split("[|:]", layer)
    ]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    if contract["type"] == "layers" and contract["name"] != "Layers of the repository"
}
"""The modules of each package with layers, by the contract's name."""


@pytest.mark.parametrize("contract", LAYERS)
def test_each_module_of_a_package_with_layers_has_one(contract: str):
    """Else it may import everything, and nobody notices."""
    listed = {module.strip() for module in LAYERS[contract]}
    (package,) = {module.rpartition(".")[0] for module in listed}
    (folder,) = {one for one in ROOT.glob(f"*/{package.replace('.', '/')}") if (one / "__init__.py").exists()}
    there = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    assert {f"{package}.{name}" for name in there - {"__init__", "__main__"}} == listed


def test_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
