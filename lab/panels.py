"""The dashboards' panels, as their committed files describe them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "deploy" / "helm" / "muster" / "dashboards"
DASHBOARDS = ("overview", "run")


@dataclass(frozen=True, slots=True)
class Target:
    """One expression of a panel, with Grafana's variables in it."""

    expr: str
    legend: str
    instant: bool


def board(name: str) -> dict[str, Any]:
    """A dashboard's file."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content


def panels(name: str) -> Iterator[dict[str, Any]]:
    """Its panels that are not headings."""
    yield from (panel for panel in board(name)["panels"] if panel["type"] != "row")


def targets(panel: Mapping[str, Any]) -> list[Target]:
    """The expressions of a panel."""
    return [
        Target(one["expr"], one.get("legendFormat", ""), one.get("instant", False))
        for one in panel.get("targets", ())
    ]


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Put values in place of ``$name``.

    Raises:
        KeyError: a variable has no value.
    """
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], text)
