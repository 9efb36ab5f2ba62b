"""Helm, started once for all tests of what is deployed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.deploy import helm as support


@pytest.fixture(scope="session")
def helm() -> Iterator[support.Helm]:
    with support.running() as process:
        yield process


@pytest.fixture
def umbrella(tmp_path: Path) -> Path:
    """A chart with this one in it twice, each time under a condition."""
    chart = tmp_path / "training"
    shutil.copytree(support.CHART, chart / "charts/muster")
    # What is between two releases counts as well.
    parts = [
        {"name": "muster", "version": ">=0.1.0-0", "condition": "muster.enabled"},
        {"name": "muster", "version": ">=0.1.0-0", "condition": "muster-2.enabled", "alias": "muster-2"},
    ]
    metadata = {"apiVersion": "v2", "name": "training", "version": "1.0.0", "dependencies": parts}
    (chart / "Chart.yaml").write_text(yaml.safe_dump(metadata))
    (chart / "values.yaml").write_text(
        yaml.safe_dump(
            {name: {"enabled": name == "muster", "allowInsecure": True} for name in ("muster", "muster-2")}
        )
    )
    (chart / "templates").mkdir()
    return chart
