"""What ``make compat`` runs is what is promised."""

import re
import tomllib
from pathlib import Path

from dev import compat

FRAMEWORK = re.compile(
    r"^(from|import) .*\b(accelerate|deepspeed|jax|lightning|orbax|torchtitan|transformers)\b", re.MULTILINE
)
"""The import of a framework, or of what tests its adapter."""

PROJECT = tomllib.loads((compat.ROOT / "pyproject.toml").read_text())["project"]
PAGE = (compat.ROOT / "docs/compatibility.md").read_text()


def test_matrix_covers_the_range_of_torch_that_is_promised():
    (wanted,) = PROJECT["optional-dependencies"]["worker"]
    oldest = next(iter(compat.TORCH.values()))
    assert wanted == f"torch>={oldest.rpartition('.')[0]}"


def test_matrix_covers_the_pythons_of_the_classifiers_beside_the_oldest():
    classified = [
        one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: Python :: 3\.\d+$", one)
    ]
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert classified == [oldest, *(name.removeprefix("python-") for name in compat.PYTHON)]


def test_page_tells_of_every_version_of_the_matrix():
    versions = [*compat.TORCH.values(), *(name.removeprefix("python-") for name in compat.PYTHON)]
    assert [version for version in versions if f"| {version}" not in PAGE] == []


def test_matrix_names_tests_that_are_there():
    arguments = (*compat.SDK_TESTS, *compat.SERVICE_TESTS)
    named = [one.rpartition("=")[2].partition("::")[0] for one in arguments]
    assert [one for one in named if not Path(compat.ROOT, one).exists()] == []


def test_matrix_leaves_out_no_test_of_an_adapter_that_needs_torch_alone():
    tests = sorted((compat.ROOT / "tests/unit/worker/integrations").rglob("test_*.py"))
    left_out = [
        one for one in tests if any(one.is_relative_to(compat.ROOT / it) for it in compat.FRAMEWORK_TESTS)
    ]
    assert left_out == [one for one in tests if FRAMEWORK.search(one.read_text())]
