"""The sources of the settings of ``muster serve``: flag, environment, file, default, in this order.

The options of the command are the settings; there is no second list. The file is read before any other
option, and becomes the context's default map.
"""

import os
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

CONTEXT_SETTINGS = {"auto_envvar_prefix": "MUSTER_SERVE"}
"""For a command whose options are the settings: ``--max-runs`` is also ``MUSTER_SERVE_MAX_RUNS``."""
FILE = "config"
"""The name of the option that names the file."""


def _read(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take a file's values as defaults, each checked like a flag."""
    if path is None or ctx.resilient_parsing:
        return path
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not TOML: {error}.") from None
    options = {option.name: option for option in settings(ctx)}
    for key, value in values.items():
        if key not in options:
            raise typer.BadParameter(f"{path}: {key} is no setting.{_meant(key, options)}")
        _check(ctx, options[key], path, value)
    ctx.default_map = values
    return path


File = Annotated[
    Path | None,
    typer.Option(
        f"--{FILE}",
        envvar="MUSTER_CONFIG",
        is_eager=True,
        callback=_read,
        metavar="FILE",
        help="A TOML file of settings, named as the flags with underscores. Flags and environment win.",
    ),
]


def settings(ctx: typer.Context) -> list[Any]:
    """Return the options that a file may set.

    Args:
        ctx: the context of a command whose options are the settings.
    """
    # `help` and similar options are eager, and not settings.
    return [option for option in ctx.command.params if not option.is_eager and option.expose_value]


def source(ctx: typer.Context, option: Any) -> str:  # noqa: ANN401  # typer has no public type for it
    """Return the source of a value in force, as text."""
    found = ctx.get_parameter_source(option.name)
    match found.name if found is not None else "DEFAULT":
        case "COMMANDLINE":
            return f"flag {option.opts[0]}"
        case "ENVIRONMENT":
            return f"environment {_variable(ctx, option)}"
        case "DEFAULT_MAP":
            return f"file {ctx.params[FILE]}"
        case _:
            return "default"


def _variable(ctx: typer.Context, option: Any) -> str:  # noqa: ANN401
    own = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    names = [*own, f"{ctx.auto_envvar_prefix}_{option.name.upper()}"]
    return next(name for name in names if os.environ.get(name))


def _check(ctx: typer.Context, option: Any, path: Path, value: object) -> None:  # noqa: ANN401
    """Check that a file's value fits the option. The error names file and key."""
    where = f"{path}: {option.name} = {_shown(value)}"
    # Otherwise 1 would count as a flag that is set, and true as the number 1.
    if isinstance(value, bool) is not bool(option.is_flag) or isinstance(value, dict | list):
        wanted = "true or false" if option.is_flag else "a number or a text, as the flag takes it"
        raise typer.BadParameter(f"{where}: it must be {wanted}.")
    try:
        option.process_value(ctx, value)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{where}: {error.message}") from None


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _meant(key: str, known: dict[str, Any]) -> str:
    matches = get_close_matches(key.replace("-", "_"), known, n=3)
    if not matches:
        return " See: muster config"
    return f" Did you mean {' or '.join(matches)}?"
