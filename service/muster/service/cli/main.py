"""The ``muster`` command: its sub-commands, and how it fails."""

import io
import os
import sys

import typer

from muster.service.cli.actions.abort import abort
from muster.service.cli.actions.close import close
from muster.service.cli.actions.drain import drain
from muster.service.cli.actions.evict import evict
from muster.service.cli.actions.forget import forget
from muster.service.cli.actions.replace import replace
from muster.service.cli.actions.save import save
from muster.service.cli.doctor.doctor import doctor
from muster.service.cli.serving.backup import backup, restore
from muster.service.cli.serving.config import config
from muster.service.cli.serving.keep import CONTEXT_SETTINGS as KEEP_SETTINGS
from muster.service.cli.serving.keep import keep
from muster.service.cli.serving.relay import CONTEXT_SETTINGS as RELAY_SETTINGS
from muster.service.cli.serving.relay import relay
from muster.service.cli.serving.serve import serve
from muster.service.cli.serving.settings import CONTEXT_SETTINGS
from muster.service.cli.serving.watch import CONTEXT_SETTINGS as WATCH_SETTINGS
from muster.service.cli.serving.watch import watch
from muster.service.cli.views import checkpoint, describe, get
from muster.service.cli.views.stack import stack
from muster.service.cli.views.top import top
from muster.service.cli.views.trace import trace
from muster.service.version import VERSION

app = typer.Typer(
    name="muster",
    help="The roll call for multi-node PyTorch checkpoints: one decision for every rank.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(context_settings=CONTEXT_SETTINGS)(serve)
app.command(context_settings=CONTEXT_SETTINGS)(config)
app.command(context_settings=RELAY_SETTINGS)(relay)
app.command(context_settings=WATCH_SETTINGS)(watch)
app.command(context_settings=KEEP_SETTINGS)(keep)
app.add_typer(get.app, name="get")
app.add_typer(describe.app, name="describe")
app.add_typer(checkpoint.app, name="checkpoint")
app.command()(abort)
app.command()(close)
app.command()(evict)
app.command()(forget)
app.command()(top)
app.command()(stack)
app.command()(trace)
app.command()(save)
app.command()(drain)
app.command()(replace)
app.command()(doctor)
app.command()(backup)
app.command()(restore)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"muster {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass


def _open_standard_streams() -> None:
    """Give a process whose standard streams were closed somewhere to write.

    Without this the first file or socket that it opens would become its stderr.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, stream in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(stream, "r" if stream == 0 else "w", closefd=False))


def main() -> None:
    """The entry point of the ``muster`` script."""
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding does not have is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    app()
