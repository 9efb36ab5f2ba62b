"""Helm, started once for all tests of what is deployed."""

import re
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


@pytest.fixture(scope="session")
def releases(helm: support.Helm) -> dict[str, support.Release]:
    """The chart with each of its ci/ values files."""
    return {name: helm.release(support.values_of(name)) for name in support.CI}


@pytest.fixture
def other_chart(tmp_path: Path) -> Path:
    """The chart in its next version, with a dashboard and a rules file more."""
    chart = tmp_path / "muster"
    shutil.copytree(support.CHART, chart)
    text = (chart / "Chart.yaml").read_text()
    text = re.sub(r"(?m)^version: .*", "version: 9.9.9", text)
    (chart / "Chart.yaml").write_text(re.sub(r"(?m)^appVersion: .*", 'appVersion: "9.9"', text))
    for folder in ("dashboards", "rules"):
        (chart / folder).mkdir(exist_ok=True)
    (chart / "dashboards/sample.json").write_text('{"title": "{{run}}"}\n')
    (chart / "rules/sample.rules.yaml").write_text(
        "# A comment.\ngroups:\n  - name: sample\n    rules:\n      - alert: Sample\n"
        "        expr: vector(1) > 0\n"
        '        annotations: {summary: "{{ $value }}", runbook: docs/operations.md#sample}\n'
    )
    return chart
