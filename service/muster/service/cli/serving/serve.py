"""``muster serve``: run a coordinator."""

import asyncio
import enum
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from muster.service.address import Address
from muster.service.cli.failure import Exit, fail
from muster.service.cli.serving import etcd, settings
from muster.service.config import Config
from muster.service.core.retention.retention import Retention
from muster.service.core.vocabulary.limits import Limits
from muster.service.etcd.location import Access
from muster.service.security.config import (
    Security,
    TrafficLimits,
    tls_files,
)

DEFAULTS = Limits()
KEEP = Retention()


class LogFormat(enum.StrEnum):
    """How the log is written."""

    CONSOLE = "console"
    JSON = "json"


def _address(value: str) -> str:
    try:
        Address.parse(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return value


def _address_if_any(value: str) -> str:
    return _address(value) if value else value


def _seconds(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a number of seconds. Give a finite one.")
    return value


def _state(value: str) -> str:
    # Imported here, so that the other sub-commands start without waiting for SQLite.
    from muster.service.storage.engine import StorageError
    from muster.service.storage.location import check_location

    try:
        check_location(value)
    except StorageError as error:
        raise typer.BadParameter(str(error)) from None
    return value


def configured(ctx: typer.Context) -> Config:
    """Return the configuration that the options of ``muster serve`` give. Contradictions end the command.

    Args:
        ctx: the context of a command with these options.
    """
    given = ctx.params
    try:
        return Config(
            listen=Address.parse(given["listen"]),
            http=Address.parse(given["http"]),
            state=given["state"],
            session_ttl=given["session_ttl"],
            reset_grace=given["reset_grace"],
            drain_grace=given["drain_grace"],
            limits=Limits(**_fields(Limits, given)),
            security=Security(
                tls=tls_files(given["tls_cert"], given["tls_key"], given["tls_client_ca"]),
                tokens_file=given["tokens_file"],
                http_tls=given["http_tls"],
                http_tokens=given["http_tokens"],
                audit_log=given["audit_log"],
                http_hosts=tuple(name.strip() for name in given["http_hosts"].split(",") if name.strip()),
                traffic=TrafficLimits(**_fields(TrafficLimits, given)),
                max_connections_per_peer=given["max_connections_per_peer"],
            ),
            insecure=given["insecure"],
            retention=Retention(closed=given["keep_closed_runs"], idle=given["keep_idle_runs"]),
            advertise=Address.parse(given["advertise"]) if given["advertise"] else None,
            lease_ttl=given["lease_ttl"],
            etcd=Access(
                ca=given["etcd_ca"],
                cert=given["etcd_cert"],
                key=given["etcd_key"],
                user=given["etcd_user"],
                password_file=given["etcd_password_file"],
            ),
        )
    except ValueError as error:
        fail(str(error), Exit.USAGE)


def _fields(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are named like the fields of a dataclass."""
    return {name: given[name] for name in (field.name for field in fields(kind)) if name in given}


def serve(
    ctx: typer.Context,
    listen: Annotated[
        str, typer.Option(callback=_address, envvar="MUSTER_LISTEN", help="HOST:PORT for gRPC.")
    ] = "127.0.0.1:7550",
    http: Annotated[
        str,
        typer.Option(
            callback=_address,
            envvar="MUSTER_HTTP",
            help="HOST:PORT for the status page, /metrics, /healthz, /readyz.",
        ),
    ] = "127.0.0.1:7551",
    state: Annotated[
        str,
        typer.Option(
            callback=_state,
            envvar="MUSTER_STATE",
            help="Where the state lives: sqlite:///path, memory: (lost at the end), or, for several "
            "replicas, etcd://HOST:PORT[,HOST:PORT…]/PREFIX.",
        ),
    ] = "sqlite:///muster.db",
    advertise: Annotated[
        str,
        typer.Option(
            callback=_address_if_any,
            envvar="MUSTER_SERVE_ADVERTISE",
            metavar="HOST:PORT",
            help="Where workers reach this replica, with a state in etcd; default: where it listens.",
        ),
    ] = "",
    lease_ttl: Annotated[
        float,
        typer.Option(
            min=2.0,
            callback=_seconds,
            envvar="MUSTER_SERVE_LEASE_TTL",
            help="Seconds without news from the leader after which another replica leads.",
        ),
    ] = 5.0,
    etcd_ca: etcd.Ca = None,
    etcd_cert: etcd.Cert = None,
    etcd_key: etcd.Key = None,
    etcd_user: etcd.User = "",
    etcd_password_file: etcd.PasswordFile = None,
    session_ttl: Annotated[
        float,
        typer.Option(
            min=1.0,
            callback=_seconds,
            envvar="MUSTER_SESSION_TTL",
            help="Seconds of silence after which a process counts as lost.",
        ),
    ] = 10.0,
    reset_grace: Annotated[
        float,
        typer.Option(
            min=0.5,
            callback=_seconds,
            envvar="MUSTER_RESET_GRACE",
            help="Seconds that a process or a node may take to reconnect after its connection ended.",
        ),
    ] = 3.0,
    drain_grace: Annotated[
        float, typer.Option(min=0.0, callback=_seconds, help="Seconds that calls in flight get on SIGTERM.")
    ] = 5.0,
    keep_closed_runs: Annotated[
        float,
        typer.Option(
            min=0.0,
            callback=_seconds,
            metavar="SECONDS",
            help="How long to keep a closed run without connections; 0: for ever.",
        ),
    ] = KEEP.closed,
    keep_idle_runs: Annotated[
        float,
        typer.Option(
            min=0.0,
            callback=_seconds,
            metavar="SECONDS",
            help="How long to keep any other run without connections; 0: for ever.",
        ),
    ] = KEEP.idle,
    max_runs: Annotated[int, typer.Option(min=1, help="Runs known at once.")] = DEFAULTS.max_runs,
    max_groups_per_run: Annotated[
        int, typer.Option(min=1, help="Groups (prefixes) of one run.")
    ] = DEFAULTS.max_groups_per_run,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions open at once.")] = DEFAULTS.max_sessions,
    max_relayed_processes: Annotated[
        int, typer.Option(min=1, help="Processes that speak through relays at once.")
    ] = DEFAULTS.max_relayed_processes,
    max_processes_per_rank: Annotated[
        int, typer.Option(min=1, help="Living processes that speak for one rank.")
    ] = DEFAULTS.max_processes_per_rank,
    max_payload_bytes: Annotated[
        int, typer.Option(min=0, help="Bytes that one rank may hand to a barrier.")
    ] = DEFAULTS.max_payload_bytes,
    max_gather_bytes: Annotated[
        int, typer.Option(min=0, help="Bytes that all ranks of a barrier may hand in.")
    ] = DEFAULTS.max_gather_bytes,
    max_total_gather_bytes: Annotated[
        int, typer.Option(min=0, help="Bytes of the payloads that all runs hold in memory.")
    ] = DEFAULTS.max_total_gather_bytes,
    max_unheard_decisions: Annotated[
        int, typer.Option(min=1, help="Decisions of a group in a row without a release.")
    ] = DEFAULTS.max_unheard_decisions,
    max_store_keys: Annotated[
        int, typer.Option(min=1, help="Keys in one run's key-value store.")
    ] = DEFAULTS.max_store_keys,
    max_store_bytes: Annotated[
        int, typer.Option(min=0, help="Bytes of all keys and values in one run's key-value store.")
    ] = DEFAULTS.max_store_bytes,
    max_total_store_bytes: Annotated[
        int, typer.Option(min=0, help="Bytes that the key-value stores of all runs take in memory.")
    ] = DEFAULTS.max_total_store_bytes,
    max_store_value_bytes: Annotated[
        int, typer.Option(min=0, help="Bytes of one value in a key-value store.")
    ] = DEFAULTS.max_store_value_bytes,
    max_store_key_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of one key in a key-value store.")
    ] = DEFAULTS.max_store_key_bytes,
    max_store_clients: Annotated[
        int, typer.Option(min=1, help="Clients of one run's key-value store whose last change is remembered.")
    ] = DEFAULTS.max_store_clients,
    max_store_waits: Annotated[
        int, typer.Option(min=1, help="Calls that wait for keys in one run's key-value store.")
    ] = DEFAULTS.max_store_waits,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="MUSTER_SERVE_TLS_CERT", metavar="FILE", help="Serve gRPC over TLS, with this certificate."
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(envvar="MUSTER_SERVE_TLS_KEY", metavar="FILE", help="The certificate's key."),
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="MUSTER_SERVE_TLS_CLIENT_CA",
            metavar="FILE",
            help="Ask clients for a certificate that one of these authorities has signed (mTLS).",
        ),
    ] = None,
    tokens_file: Annotated[
        Path | None,
        typer.Option(
            envvar="MUSTER_SERVE_TOKENS_FILE",
            metavar="FILE",
            help="Ask callers for one of the tokens in this TOML file.",
        ),
    ] = None,
    http_tls: Annotated[
        bool,
        typer.Option(envvar="MUSTER_SERVE_HTTP_TLS", help="Use the certificate on the HTTP port as well."),
    ] = False,
    http_tokens: Annotated[
        bool,
        typer.Option(
            envvar="MUSTER_SERVE_HTTP_TOKENS", help="Ask for a viewer's token on the HTTP port as well."
        ),
    ] = False,
    http_hosts: Annotated[
        str,
        typer.Option(
            envvar="MUSTER_SERVE_HTTP_HOSTS",
            metavar="NAMES",
            help="Host names that the HTTP port accepts, with commas, besides IP addresses and localhost. "
            "Others are refused. Empty: any name; on loopback no other name.",
        ),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option(
            envvar="MUSTER_SERVE_INSECURE",
            help="Listen to other machines without TLS, or without tokens and client certificates.",
        ),
    ] = False,
    audit_log: Annotated[
        str,
        typer.Option(
            envvar="MUSTER_SERVE_AUDIT_LOG",
            metavar="FILE",
            help="Append a line of JSON for every call that is refused or changes something. -: to the log.",
        ),
    ] = "",
    max_connections_per_peer: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="MUSTER_SERVE_MAX_CONNECTIONS_PER_PEER",
            help="gRPC connections of one IP address; beyond it the newest are closed. 0: no bound.",
        ),
    ] = 0,
    max_sessions_per_peer: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="MUSTER_SERVE_MAX_SESSIONS_PER_PEER",
            help="Streams open at once from one IP address, sessions and stores each; 0: no bound.",
        ),
    ] = 0,
    max_messages_per_second_per_peer: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="MUSTER_SERVE_MAX_MESSAGES_PER_SECOND_PER_PEER",
            help="Messages and calls of one IP address; beyond it they are read later. 0: no bound.",
        ),
    ] = 0,
    max_messages_per_second: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="MUSTER_SERVE_MAX_MESSAGES_PER_SECOND",
            help="The same for all together. 0: no bound.",
        ),
    ] = 0,
    log_format: Annotated[
        LogFormat, typer.Option(envvar="MUSTER_LOG_FORMAT", help="How to write the log.")
    ] = LogFormat.CONSOLE,
    config: settings.File = None,
) -> None:
    """Run a coordinator until SIGTERM or SIGINT."""
    # Imported here, so that the other sub-commands start without waiting for the server's libraries.
    import uvloop

    from muster.service.app import StartError
    from muster.service.app import serve as run_coordinator
    from muster.service.storage.engine import StorageError
    from muster.service.telemetry import logs
    from muster.serving.heap import return_freed_memory

    settings = configured(ctx)
    return_freed_memory()
    logs.configure(log_format.value)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_coordinator(settings))
    except (StartError, StorageError) as error:
        if log_format is LogFormat.JSON:
            logs.failed(str(error))
            raise typer.Exit(Exit.FAILED) from None
        fail(str(error), Exit.FAILED)
