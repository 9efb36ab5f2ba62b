"""The command's options for its token and for TLS."""

import functools
import inspect
import os
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer

from muster.client.addresses import checked
from muster.client.credentials import ENVIRONMENT, Credentials, Names
from muster.client.errors import EnvironmentValueError
from muster.service.cli.failure import Exit, fail

TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="MUSTER_TOKEN_FILE", metavar="FILE", help="The file of the token to show."),
]
TokenCommand = Annotated[
    str,
    typer.Option(
        envvar="MUSTER_TOKEN_COMMAND",
        metavar="COMMAND",
        help="A command that writes the token to show to stdout.",
        show_default=False,
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="MUSTER_TLS_CA",
        metavar="FILE",
        help="Use TLS; one of these authorities must have signed the coordinator's certificate.",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="MUSTER_TLS_CERT", metavar="FILE", help="The client certificate to show."),
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="MUSTER_TLS_KEY", metavar="FILE", help="The client certificate's key.")
]
TlsServerName = Annotated[
    str,
    typer.Option(
        envvar="MUSTER_TLS_SERVER_NAME",
        metavar="NAME",
        help="The name that the coordinator's certificate must have.  [default: the endpoint's host]",
        show_default=False,
    ),
]
OPTIONS: dict[str, tuple[Any, Any]] = {
    "token_file": (TokenFile, None),
    "token_command": (TokenCommand, ""),
    "tls_ca": (TlsCa, None),
    "tls_cert": (TlsCert, None),
    "tls_key": (TlsKey, None),
    "tls_server_name": (TlsServerName, ""),
}
"""The options of :func:`connecting`, with their types and defaults."""

NAMES = Names(
    token=ENVIRONMENT.token,
    token_file="--token-file",
    token_command="--token-command",
    ca="--tls-ca",
    cert="--tls-cert",
    key="--tls-key",
    server_name="--tls-server-name",
)
"""There is no option for the token itself: every user that lists processes could see it."""

_given: ContextVar[Credentials | None] = ContextVar("credentials", default=None)


def given() -> Credentials:
    """Return the credentials of the running command; outside of one, those of ``MUSTER_TOKEN``."""
    return _given.get() or _credentials()


def _credentials(**options: Any) -> Credentials:  # noqa: ANN401
    return Credentials(token=os.environ.get(ENVIRONMENT.token, ""), names=NAMES, **options)


def connecting(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options for a token and for TLS; :func:`given` returns their values.

    All commands have the same ones, and none uses them itself, so no command has them as parameters. An
    unusable value ends the command when it is first used.
    """

    @functools.wraps(command)
    def run(**arguments: Any) -> None:  # noqa: ANN401
        mine = {name.removeprefix("tls_"): arguments.pop(name) for name in OPTIONS}
        token = _given.set(_credentials(**mine))
        try:
            command(**arguments)
        except EnvironmentValueError as error:
            fail(str(error), Exit.USAGE)
        finally:
            _given.reset(token)

    signature = inspect.signature(command)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in OPTIONS.items()
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = command.__annotations__ | {name: kind for name, (kind, _) in OPTIONS.items()}
    return run


def usable_endpoint(value: str) -> str:
    """Return the addresses of an endpoint, each once; refuse one that cannot be used."""
    try:
        return checked(value)
    except EnvironmentValueError as error:
        raise typer.BadParameter(str(error)) from error
