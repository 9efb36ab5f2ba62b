"""What is in wheel and sdist. `make dist` installs them as well."""

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.metadata import Metadata

from lab.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = {
    "muster/v1": "proto",
    "muster/etcd": "proto",
    "muster/service": "service",
    "muster/relay": "relay",
    "muster/watcher": "watcher",
    "muster/keeper": "keeper",
    "muster/preload": "preload",
    "muster/client": "client",
    "muster/serving": "client",
    "muster/checkpoint": "checkpoint",
    "muster/worker": "worker_sdk",
}
"""Each package, and the folder in which it is."""


@dataclass(frozen=True, slots=True)
class Built:
    """A distribution."""

    wheel: Path
    sdist: Path

    @property
    def names(self) -> list[str]:
        """The files in the wheel."""
        with ZipFile(self.wheel) as wheel:
            return wheel.namelist()

    def read(self, name: str) -> str:
        """A file of the wheel's metadata."""
        with ZipFile(self.wheel) as wheel:
            return wheel.read(next(one for one in self.names if one.endswith(f".dist-info/{name}"))).decode()


def build(source: Path, out: Path, *more: str) -> list[Path]:
    command = [str(Path(sys.executable).with_name("hatchling")), "build", "--directory", str(out), *more]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return list(out.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    files = build(ROOT, tmp_path_factory.mktemp("dist"))
    (wheel,) = (one for one in files if one.suffix == ".whl")
    (sdist,) = (one for one in files if one.suffix == ".gz")
    return Built(wheel, sdist)


def test_the_wheel_is_pure_and_small(built: Built):
    assert re.fullmatch(r"muster_coordinator-[\w.]+-py3-none-any\.whl", built.wheel.name)
    assert built.wheel.stat().st_size < 1_200 * 1024, "the last release's is kept in the repository"


@pytest.mark.parametrize("package", SOURCES)
def test_every_file_of_a_package_is_in_the_wheel(built: Built, package: str):
    folder = ROOT / SOURCES[package]
    wanted = {
        path.relative_to(folder).as_posix()
        for path in (folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert f"{package}/py.typed" in wanted
    assert {name for name in built.names if name.startswith(f"{package}/")} == wanted


def test_nothing_else_is_in_the_wheel(built: Built):
    ours = ("_muster_torch_autoload.py", *(f"{one}/" for one in SOURCES))
    assert ours[0] in built.names
    others = [name for name in built.names if not name.startswith(ours)]
    (folder,) = {name.partition("/")[0] for name in others}
    assert folder.endswith(".dist-info")
    assert {name.partition("/")[2] for name in others} == {
        *("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }


def test_every_generated_module_has_its_stub(built: Built):
    generated = [
        name for name in built.names if re.fullmatch(r"muster/(v1|etcd/v3)/\w+_pb2(_grpc)?\.py", name)
    ]
    assert generated
    assert [name for name in generated if f"{name}i" not in built.names] == []


def test_the_metadata_is_sound(built: Built):
    metadata = Metadata.from_email(built.read("METADATA"), validate=True)
    assert metadata.name == PROJECT["name"]
    assert str(metadata.version) == PROJECT["version"]
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert metadata.description_content_type == "text/markdown"
    assert {"service", "worker"} <= set(metadata.provides_extra or ())


def test_the_entry_points_are_there(built: Built):
    assert "muster = muster.service.cli.script:main" in built.read("entry_points.txt")
    assert "muster = _muster_torch_autoload:handler_creator" in built.read("entry_points.txt")
    assert "muster = _muster_torch_autoload:register" in built.read("entry_points.txt")


def test_the_sdist_builds_the_same_wheel(built: Built, tmp_path: Path):
    subprocess.run(["tar", "-xzf", built.sdist, "-C", tmp_path], check=True)
    (source,) = tmp_path.iterdir()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "PKG-INFO"} <= {one.name for one in source.iterdir()}
    (wheel,) = build(source, tmp_path / "dist", "--target", "wheel")
    assert wheel.name == built.wheel.name
    assert wheel.read_bytes() == built.wheel.read_bytes()
