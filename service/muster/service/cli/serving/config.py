"""``muster config``: what ``muster serve`` would run with, and where each value comes from."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from muster.service.cli.failure import Exit, fail
from muster.service.cli.options import Output
from muster.service.cli.serving import settings
from muster.service.cli.serving.serve import configured, serve
from muster.service.cli.views.table import Column, Table, document, emit
from muster.service.config import Config
from muster.service.formatting.cells import NOTHING


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting in force."""

    name: str
    value: Any
    source: str


# Eager, like every option that is not a setting.
Format = Annotated[Output, typer.Option("--output", "-o", is_eager=True, help="How to print it.")]
COLUMNS: list[Column[Setting]] = [
    Column(title="SETTING", cell=lambda setting: setting.name),
    Column(title="VALUE", cell=lambda setting: _shown(setting.value)),
    Column(title="FROM", cell=lambda setting: setting.source),
]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return NOTHING if value is None else str(value)


def _with_options_of(command: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of another one besides its own."""

    def extend(mine: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(mine)
        def run(ctx: typer.Context, output: Output, **_: object) -> None:
            mine(ctx, output)

        own, theirs = inspect.signature(mine).parameters, inspect.signature(command).parameters
        merged = [*own.values(), *(theirs[name] for name in theirs if name not in own)]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in merged]
        )
        run.__annotations__ = {one.name: one.annotation for one in merged}
        return run

    return extend


@_with_options_of(serve)
def config(ctx: typer.Context, output: Format = Output.TABLE) -> None:
    """Show what muster serve would run with, given the same flags, environment and file, and from where.

    A flag wins over the environment, the environment over the file, and the file over the default. It
    refuses all that muster serve would refuse, with the same message. Certificates and tokens are not read.
    """
    _check_exposed(configured(ctx))
    shown = [
        Setting(option.name, _plain(ctx.params[option.name]), settings.source(ctx, option))
        for option in settings.settings(ctx)
    ]
    if output is Output.JSON:
        emit(document({one.name: {"value": one.value, "from": one.source} for one in shown}))
    else:
        emit(Table(COLUMNS).text(shown))


def _plain(value: object) -> object:
    """Return a value as the file would have it."""
    return str(value) if isinstance(value, Path) else value


def _check_exposed(found: Config) -> None:
    """End the command as ``muster serve`` would: a port is open to strangers."""
    # Imported here, so that the other sub-commands start without waiting for the server's libraries.
    from muster.service.app.ports import StartError, check_coordinator_exposed

    if found.insecure:
        return  # The check would only log a warning.
    try:
        check_coordinator_exposed(found)
    except StartError as error:
        fail(str(error), Exit.FAILED)
