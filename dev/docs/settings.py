"""The tables of docs/settings.md that follow from the commands' options.

``python -m dev.docs.settings`` writes them into the page; a test compares.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from muster.service.cli.main import app

PAGE = Path(__file__).resolve().parents[2] / "docs/settings.md"
COMMANDS = {"serve": "MUSTER_SERVE", "relay": "MUSTER_RELAY", "watch": "MUSTER_WATCH", "keep": "MUSTER_KEEP"}
"""The commands whose options are settings, with the prefix of their variables."""


def options(command: str) -> list[Any]:
    """Return the options of a command, without ``--help``."""
    group: Any = typer.main.get_command(app)
    return [one for one in group.commands[command].params if one.param_type_name == "option"]


def variables(command: str, option: Any) -> list[str]:  # noqa: ANN401  # typer has no public type for it
    """Return the environment variables of an option; the first that is set counts."""
    own = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    every = f"{COMMANDS[command]}_{option.name.upper()}"
    return own if every in own or option.name == "config" else [*own, every]


def table(command: str) -> str:
    """Return the table of a command's settings."""
    rows = "\n".join(_rows(command))
    return f"| Flag | Variable | Meaning | Default |\n|-|-|-|-|\n{rows}\n"


def _rows(command: str) -> Iterator[str]:
    for option in options(command):
        names = ", ".join(f"`{name}`" for name in variables(command, option))
        yield f"| `{option.opts[0]}` | {names} | {meaning(option)} | {default_of(option)} |"


def meaning(parameter: Any) -> str:  # noqa: ANN401
    """Return the help of an option or argument, for a cell of a table."""
    return " ".join((parameter.help or "").split()).replace("|", "\\|").rstrip(".") + "."


def default_of(parameter: Any) -> str:  # noqa: ANN401
    """Return the default of an option or argument, for a cell of a table."""
    if parameter.required:
        return "must be given"
    default = parameter.default
    if parameter.param_type_name == "option" and parameter.is_flag:
        return "on" if default else "off"
    return "–" if default in (None, "") else f"`{getattr(default, 'value', default)}`"


def filled(page: str) -> str:
    """Return a page with the tables between its marks replaced."""
    return re.sub(
        r"(?s)(<!-- (serve|relay|watch|keep) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}",
        page,
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
