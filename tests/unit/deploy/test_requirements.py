"""What the image is made of is what the tests ran on."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RENEW = "Run: dev/pin-image.sh"
HASHED = sorted({path.name for path in (ROOT / "requirements").glob("*.txt")} - {"torch.txt"})
"""All files but that of torch, which says why it has none."""


def pins(name: str) -> dict[str, str]:
    """The pinned packages of a requirements file, and their versions."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if match := re.match(r"([\w.-]+)==(\S+)", line):
            found[canonicalize_name(match[1])] = match[2]
    return found


WANTED = {
    "service.txt": PROJECT["project"]["dependencies"]
    + PROJECT["project"]["optional-dependencies"]["service"]
    + PROJECT["project"]["optional-dependencies"]["watch"],
    "build.txt": PROJECT["build-system"]["requires"],
}


@pytest.mark.parametrize("name", WANTED)
def test_all_that_the_project_asks_for_is_pinned(name: str):
    pinned = pins(name)
    for requirement in map(Requirement, WANTED[name]):
        version = pinned.get(canonicalize_name(requirement.name), "")
        assert version, f"{requirement} is not in requirements/{name}. {RENEW}"
        assert requirement.specifier.contains(version), f"{requirement}, and {version} is pinned. {RENEW}"


@pytest.mark.parametrize("name", WANTED)
def test_the_versions_are_those_that_are_tested(name: str):
    tested = pins("dev.txt")
    for package, version in pins(name).items():
        assert tested.get(package) == version, f"{package} in requirements/dev.txt and {name}. {RENEW}"


@pytest.mark.parametrize("name", HASHED)
def test_every_pin_has_hashes_and_no_address(name: str):
    text = (ROOT / "requirements" / name).read_text()
    blocks = re.split(r"\n(?=\w)", re.sub(r"(?m)^#.*\n", "", text))
    assert len(blocks) == len(pins(name))
    assert all("--hash=sha256:" in block for block in blocks)
    assert "://" not in text
    assert "index" not in text


def test_there_is_no_torch_in_the_image():
    assert "torch" not in pins("service.txt")


def test_everything_is_installed_with_its_hashes():
    """pip asks for hashes by itself where a file has some. A pin that is changed by hand must keep them."""
    named: set[str] = set()
    for place in ("Makefile", "dev/generate-stubs.sh", "Dockerfile"):
        text = (ROOT / place).read_text().replace("\\\n", "")
        named |= set(re.findall(r"(?:--require-hashes.*-r|\(HASHED\)) requirements/([\w-]+\.txt)", text))
    assert named == set(HASHED)


def test_base_image_is_pinned_by_its_digest():
    (base,) = re.findall(r"(?m)^ARG PYTHON=(\S+)$", (ROOT / "Dockerfile").read_text())
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)


def test_coordinator_needs_a_grpcio_that_refuses_a_message_by_its_header():
    """docs/security.md names the version: an older one reads a message that is too large."""
    service = map(Requirement, PROJECT["project"]["optional-dependencies"]["service"])
    (grpcio,) = (one for one in service if one.name == "grpcio")
    assert "1.84.0" in grpcio.specifier
    assert "1.83.9" not in grpcio.specifier
