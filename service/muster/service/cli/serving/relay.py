"""``muster relay``: one stream to the coordinator for all the workers of a node."""

import asyncio
import re
from pathlib import Path
from typing import Annotated

import typer

from muster.service.address import Address
from muster.service.cli.client.credentials import usable_endpoint
from muster.service.cli.failure import Exit, fail
from muster.service.security.config import (
    Security,
    TrafficLimits,
    tls_files,
)

CONTEXT_SETTINGS = {"auto_envvar_prefix": "MUSTER_RELAY"}
"""``--fold-window-ms`` is also ``MUSTER_RELAY_FOLD_WINDOW_MS``."""


def _mode(value: str) -> str:
    if re.fullmatch("0?[0-7]{3}", value) is None:
        raise typer.BadParameter(f"{value} is not a file mode, such as 600 or 660.")
    return value


def relay(
    listen: Annotated[
        str,
        typer.Option(help="Where workers connect: unix:///PATH, for those of this node alone, or HOST:PORT."),
    ],
    upstream: Annotated[
        str,
        typer.Option(
            callback=usable_endpoint,
            envvar=["MUSTER_RELAY_UPSTREAM", "MUSTER_ENDPOINT"],
            metavar="HOST:PORT[,HOST:PORT…]",
            help="The coordinator, all of its replicas, or another relay.",
        ),
    ],
    http: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where to show /metrics, /healthz, /readyz; empty: nowhere."),
    ] = "",
    fold_window_ms: Annotated[
        float,
        typer.Option(
            min=0.0, max=1000.0, help="For how long the first of a node's arrivals waits for the others."
        ),
    ] = 10.0,
    socket_mode: Annotated[
        str, typer.Option(callback=_mode, metavar="OCTAL", help="Permissions of a unix:// socket.")
    ] = "600",
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Serve HOST:PORT over TLS, with this certificate.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Ask workers for a certificate that one of these authorities signed."
        ),
    ] = None,
    tokens_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask workers for one of the tokens in this TOML file.")
    ] = None,
    max_connections_per_peer: Annotated[
        int,
        typer.Option(
            min=0, help="Connections of one IP address; beyond it the newest are closed. 0: no bound."
        ),
    ] = 0,
    max_sessions_per_peer: Annotated[
        int,
        typer.Option(
            min=0, help="Streams open at once from one IP address, sessions and stores each; 0: no bound."
        ),
    ] = 0,
    max_messages_per_second_per_peer: Annotated[
        int,
        typer.Option(
            min=0, help="Messages and calls of one IP address; beyond it they are read later. 0: no bound."
        ),
    ] = 0,
    max_messages_per_second: Annotated[
        int, typer.Option(min=0, help="The same for all together. 0: no bound.")
    ] = 0,
    max_message_bytes: Annotated[
        int | None,
        typer.Option(
            min=1_000_000,
            help="Bytes of one message. Raise it with the coordinator's bounds of payloads and values. "
            "Default: what a coordinator with default bounds accepts.",
        ),
    ] = None,
    audit_log: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Append a line of JSON for every call that is refused here, and for every forwarded call "
            "that changes something. -: to the log.",
        ),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Listen to other machines without TLS, or without tokens and client certificates.",
        ),
    ] = False,
) -> None:
    """Run a relay until SIGTERM or SIGINT.

    To the coordinator it presents the credentials of MUSTER_TOKEN_FILE and MUSTER_TLS_…, like a worker.
    """
    # Imported here, so that the other sub-commands start without waiting for the server's libraries.
    import uvloop

    from muster.relay.listen_address import ListenError, parse_listen_address
    from muster.service.app import StartError
    from muster.service.app.relay import RelaySettings, run_relay
    from muster.service.core.vocabulary.limits import Limits
    from muster.service.rpc.server import max_message_bytes as most_of_default
    from muster.service.telemetry import logs
    from muster.serving.heap import return_freed_memory

    try:
        settings = RelaySettings(
            listen=parse_listen_address(listen),
            upstream=upstream,
            http=Address.parse(http) if http else None,
            fold_window=fold_window_ms / 1000,
            socket_mode=int(socket_mode, 8),
            insecure=insecure,
            max_message_bytes=max_message_bytes or most_of_default(Limits()),
            security=Security(
                tls=tls_files(tls_cert, tls_key, tls_client_ca),
                tokens_file=tokens_file,
                audit_log=audit_log,
                max_connections_per_peer=max_connections_per_peer,
                traffic=TrafficLimits(
                    max_sessions_per_peer=max_sessions_per_peer,
                    max_messages_per_second_per_peer=max_messages_per_second_per_peer,
                    max_messages_per_second=max_messages_per_second,
                ),
            ),
        )
    except (ListenError, ValueError) as error:
        fail(str(error), Exit.USAGE)
    if settings.listen.path is not None and (settings.security.tls or tokens_file):
        fail(
            "a unix:// socket is guarded by its file's permissions (--socket-mode), and not by tokens or "
            "certificates. Leave those out, or listen on HOST:PORT.",
            Exit.USAGE,
        )
    return_freed_memory()
    logs.configure("console")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_relay(settings))
    except StartError as error:
        fail(str(error), Exit.FAILED)
