"""The options for etcd, and a client made from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from muster.service.cli.failure import Exit, fail
from muster.service.etcd.client import Etcd
from muster.service.etcd.location import Access, Location

ATTEMPT_TIMEOUT = 3.0
"""Seconds for one member to answer before the client asks another."""

Ca = Annotated[
    Path | None,
    typer.Option(
        "--etcd-ca",
        envvar="MUSTER_SERVE_ETCD_CA",
        metavar="FILE",
        help="Use TLS to etcd; one of these authorities must have signed its certificates.",
    ),
]
Cert = Annotated[
    Path | None,
    typer.Option(
        "--etcd-cert", envvar="MUSTER_SERVE_ETCD_CERT", metavar="FILE", help="The certificate to show etcd."
    ),
]
Key = Annotated[
    Path | None,
    typer.Option("--etcd-key", envvar="MUSTER_SERVE_ETCD_KEY", metavar="FILE", help="The certificate's key."),
]
User = Annotated[
    str,
    typer.Option("--etcd-user", envvar="MUSTER_SERVE_ETCD_USER", metavar="NAME", help="The user of etcd."),
]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--etcd-password-file",
        envvar="MUSTER_SERVE_ETCD_PASSWORD_FILE",
        metavar="FILE",
        help="Holds the user's password.",
    ),
]


@contextmanager
def client(
    state: str, ca: Path | None, cert: Path | None, key: Path | None, user: str, password_file: Path | None
) -> Iterator[tuple[Etcd, Location]]:
    """Yield a client for one command. Invalid options end the command."""
    try:
        location = Location.parse(state)
        access = Access(ca=ca, cert=cert, key=key, user=user, password_file=password_file)
    except ValueError as error:
        fail(str(error), Exit.USAGE)
    etcd = Etcd(location.endpoints, access, attempt_timeout=ATTEMPT_TIMEOUT)
    try:
        yield etcd, location
    finally:
        etcd.close()
