"""The reference of the commands, docs/cli.md, from their own help.

``python -m dev.docs.cli`` writes the page; a test compares.
"""

import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from dev.docs import settings
from muster.service.cli.main import app

PAGE = Path(__file__).resolve().parents[2] / "docs/cli.md"
CONNECTION = (
    *("endpoint", "timeout", "token_file", "token_command"),
    *("tls_ca", "tls_cert", "tls_key", "tls_server_name"),
)
"""The options of each command that calls a coordinator."""
SETTINGS = {
    "serve": ("serve", "the-coordinator"),
    "config": ("serve", "the-coordinator"),
    "relay": ("relay", "the-relay"),
    "watch": ("watch", "the-watcher"),
    "keep": ("keep", "the-keeper"),
}
"""The commands with settings: the command of these settings, and their section of docs/settings.md."""
BEGIN = "<!-- commands -->"


def commands() -> Iterator[tuple[str, Any]]:
    """Yield the name of each command, such as ``get runs``, and its click command."""
    yield from _below("", typer.main.get_command(app))


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401  # typer's own click has no types
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, inner in command.commands.items():
        yield from _below(f"{name} {word}".strip(), inner)


def filled(page: str) -> str:
    """Return the page with all that follows its mark replaced."""
    known = dict(commands())
    shared = {one.name: one for one in known["get runs"].params}
    connection = "\n".join(_table([shared[name] for name in CONNECTION]))
    parts = [page.partition(BEGIN)[0] + BEGIN, "## Options of the connection", connection]
    parts += [_section(name, command) for name, command in known.items()]
    return "\n\n".join(parts) + "\n"


def _section(name: str, command: Any) -> str:  # noqa: ANN401
    own = [one for one in command.params if one.name not in CONNECTION]
    arguments = [one for one in own if one.param_type_name == "argument"]
    usage = " ".join(["muster", name, "[OPTIONS]", *(_usage(one) for one in arguments)])
    parts = [f"## muster {name}", f"```console\n$ {usage}\n```", _plain(command.help)]
    if name in SETTINGS:
        of, section = SETTINGS[name]
        listed = {one.name for one in settings.options(of)}
        own = [one for one in own if one.name not in listed]
        parts.append(f"Its settings are in [Settings](settings.md#{section}).")
    if own:
        parts.append("\n".join(_table(own)))
    if name not in SETTINGS and any(one.name in CONNECTION for one in command.params):
        parts.append("Further: [options of the connection](#options-of-the-connection).")
    return "\n\n".join(parts)


def _table(parameters: list[Any]) -> Iterator[str]:
    yield "| | Meaning | Default |"
    yield "|-|-|-|"
    for one in parameters:
        variable = f" (`{one.envvar}`)" if isinstance(one.envvar, str) else ""
        yield f"| `{_names(one)}`{variable} | {settings.meaning(one)} | {settings.default_of(one)} |"


def _names(parameter: Any) -> str:  # noqa: ANN401
    metavar = _metavar(parameter).replace("|", "\\|")
    if parameter.param_type_name == "argument":
        return metavar
    flags = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return flags if parameter.is_flag else f"{flags} {metavar}"


def _metavar(parameter: Any) -> str:  # noqa: ANN401
    if parameter.metavar:
        return str(parameter.metavar)
    kind = parameter.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(one.value) for one in kind)
    return str(parameter.name).upper()


def _usage(argument: Any) -> str:  # noqa: ANN401
    name = _metavar(argument)
    return name if argument.required else f"[{name}]"


def _plain(text: str | None) -> str:
    """Return a help text on one line for each paragraph."""
    paragraphs = re.split(r"\n\s*\n", (text or "").replace("\b", "").strip())
    return "\n\n".join(" ".join(one.split()) for one in paragraphs)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
