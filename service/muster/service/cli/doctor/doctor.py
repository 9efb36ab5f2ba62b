"""``muster doctor``: shows why a job cannot use a coordinator, or that it can."""

from collections.abc import Iterator
from itertools import chain
from typing import Annotated

import typer

from muster.service.address import Address
from muster.service.cli import options
from muster.service.cli.client.coordinator_client import connect
from muster.service.cli.client.credentials import connecting, given
from muster.service.cli.doctor.checks import Certificates, Check, Result, examine
from muster.service.cli.doctor.etcd_checks import members
from muster.service.cli.doctor.identity_checks import identity
from muster.service.cli.doctor.keeper_checks import keepers
from muster.service.cli.options import Output
from muster.service.cli.serving import etcd
from muster.service.cli.views.table import colorful, document, emit
from muster.service.core.vocabulary import report

COLORS = {Result.OK: "green", Result.WARNING: "yellow", Result.FAILED: "red"}
NAME_CELLS = len("authorisation")
RESULT_CELLS = max(map(len, Result))


Run = Annotated[
    str,
    typer.Argument(
        callback=options.text,
        envvar="MUSTER_RUN_ID",
        metavar="RUN",
        help="Also check the keepers of this run, and that the token is for it.",
        show_default=False,
    ),
]
State = Annotated[
    str,
    typer.Option(
        metavar="etcd://HOST:PORT/PREFIX", help="Also check etcd: the state, as muster serve takes it."
    ),
]


@connecting
def doctor(
    run: Run = "",
    state: State = "",
    etcd_ca: etcd.Ca = None,
    etcd_cert: etcd.Cert = None,
    etcd_key: etcd.Key = None,
    etcd_user: etcd.User = "",
    etcd_password_file: etcd.PasswordFile = None,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Check a coordinator from here: token, TLS, authorisation, version, replicas, storage, clock.

    Prints a line for each check. With RUN, the token must be for that run, and its keepers of local
    checkpoints are checked: connections, space and failure domains. With --state etcd://… it also checks
    every member of etcd. Exit code 3 if the coordinator cannot be
    reached, and 1 if another check failed. A warning is not a failure.
    """
    checks: list[Check] = []
    with connect(endpoint, timeout) as client:
        addresses = [Address.parse(one) for one in client.endpoint.split(",")]
        tls = None
        mine = given()
        if mine.ca is not None:
            tls = Certificates(mine.ca, mine.cert, mine.key, mine.server_name)
        shown = identity(mine.authorization())

        def of_run() -> Iterator[Check]:
            if run and not any(check.result is Result.FAILED for check in checks):
                yield from keepers(client, run)

        of_coordinator = examine(addresses, tls, client, timeout, run)
        for check in chain([shown] if shown is not None else [], of_coordinator, of_run()):
            checks.append(check)
            if output is not Output.JSON:
                emit(line(check, color=colorful()))
    if state:
        access = (etcd_ca, etcd_cert, etcd_key, etcd_user, etcd_password_file)
        with etcd.client(state, *access) as (client_of_etcd, _):
            for check in members(client_of_etcd, timeout):
                checks.append(check)
                if output is not Output.JSON:
                    emit(line(check, color=colorful()))
    if output is Output.JSON:
        emit(document({"endpoint": client.endpoint, "checks": [as_json(check) for check in checks]}))
    failed = [check for check in checks if check.result is Result.FAILED]
    if failed:
        raise typer.Exit(failed[0].exit)


def line(check: Check, *, color: bool) -> str:
    """Format a check for people. Further lines of the message, and the next step, are indented."""
    result = f"{check.result:<{RESULT_CELLS}}"
    if color:
        result = typer.style(result, fg=COLORS[check.result])
    lines = report.printable(check.message).splitlines()
    if check.next:
        lines.append(f"next: {report.printable(check.next)}")
    indented = f"\n{'':{RESULT_CELLS}}   {'':{NAME_CELLS}}   ".join(lines)
    return f"{result}   {check.name:<{NAME_CELLS}}   {indented}"


def as_json(check: Check) -> dict[str, str]:
    """Return a check as JSON."""
    return {"name": check.name, "result": check.result, "message": check.message, "next": check.next}
