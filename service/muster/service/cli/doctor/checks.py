"""The checks of ``muster doctor``: each is one line, with the next step unless all is well."""

import enum
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc

from muster.service.address import Address
from muster.service.cli.client.coordinator_client import CallError, Client
from muster.service.cli.failure import Exit
from muster.service.core.vocabulary import report
from muster.service.formatting.cells import duration
from muster.service.security.patterns import matches
from muster.service.version import VERSION
from muster.v1 import coordinator_pb2

EXPIRY_WARNING_DAYS = 14
"""A certificate that expires earlier causes a warning."""
SLOW_COMMIT = 0.1
"""Median seconds of a commit above which storage counts as slow: every decision waits for a commit."""
CLOCK_WARNING = 1.0
"""Seconds that two clocks may differ, beyond the uncertainty of the call itself."""
TOO_LOW_FOR_JOBS = {
    coordinator_pb2.ROLE_VIEWER: "this token is read-only",
    coordinator_pb2.ROLE_WATCHER: "this token is for muster watch",
}
"""What the roles are for that a job cannot use."""


class Result(enum.StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One check that was made."""

    name: str
    result: Result
    message: str
    next: str = ""
    """The next step; empty if all is well."""
    exit: Exit = Exit.FAILED
    """The exit code of the command if this failed."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files and the name that TLS needs."""

    ca: Path
    """The authorities that may have signed the coordinator's certificate."""
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    """The name that the certificate must have; empty: the endpoint's host."""


def examine(
    addresses: Sequence[Address], tls: Certificates | None, client: Client, timeout: float, run_id: str
) -> Iterator[Check]:
    """Make all checks in order. A failed check omits those that depend on it.

    Args:
        addresses: the address of the coordinator, or those of its replicas.
        tls: the files for TLS; None: no TLS.
        client: calls the coordinator.
        timeout: seconds that each check may take.
        run_id: the run of a job that will start here; empty if it is not known.
    """
    reached = False
    for address in addresses:
        for check in reach(address, timeout):
            yield check
            if check.result is Result.FAILED:
                break
        else:
            reached = True
            yield plaintext(address) if tls is None else certificate(address, tls, timeout)
    if reached:
        yield from answers(client, run_id)


# ---------------------------------------------------------------------- the network


def reach(address: Address, timeout: float) -> Iterator[Check]:
    """Check that the name has an address, and that a server listens there."""
    begin = time.monotonic()
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield Check(
            "resolve",
            Result.FAILED,
            f"{address.host} has no address: {error.strerror or error}",
            "correct the name in --endpoint or MUSTER_ENDPOINT, or the DNS that this machine uses",
            Exit.UNREACHABLE,
        )
        return
    hosts = list(dict.fromkeys(str(one[4][0]) for one in found))
    yield Check("resolve", Result.OK, f"{address.host} is {', '.join(hosts)} (found in {_since(begin)})")
    begin = time.monotonic()
    try:
        socket.create_connection((address.host, address.port), timeout).close()
    except OSError as error:
        yield Check(
            "connect",
            Result.FAILED,
            f"no connection to {address}: {error.strerror or error}",
            "check that muster serve runs there and listens on that address (--listen), and that no firewall "
            "or NetworkPolicy is in between",
            Exit.UNREACHABLE,
        )
        return
    yield Check("connect", Result.OK, f"{address} accepts connections (in {_since(begin)})")


def plaintext(address: Address) -> Check:
    """Check an endpoint without TLS: anyone on the network path can read and change everything."""
    if address.is_loopback:
        return Check("tls", Result.OK, "not used, and the connection stays on this machine")
    return Check(
        "tls",
        Result.WARNING,
        "not used: anyone on the network path can read and change everything",
        "start the coordinator with --tls-cert and --tls-key, and give --tls-ca (MUSTER_TLS_CA) here",
    )


def certificate(address: Address, tls: Certificates, timeout: float) -> Check:
    """Check that the coordinator's certificate is valid for its name, and for how long."""
    name = tls.server_name or address.host
    try:
        context = ssl.create_default_context(cafile=str(tls.ca))
        context.set_alpn_protocols(["h2"])
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
        with (
            socket.create_connection((address.host, address.port), timeout) as connection,
            context.wrap_socket(connection, server_hostname=name) as secured,
        ):
            shown = secured.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        return Check(
            "tls",
            Result.FAILED,
            f"the certificate is refused: {error.verify_message}",
            "renew it on the coordinator if it has expired; else compare --tls-ca with its issuer, and "
            "--tls-server-name with the names in it",
            Exit.UNREACHABLE,
        )
    except OSError as error:
        return Check(
            "tls",
            Result.FAILED,
            f"no TLS handshake: {error.strerror or error}",
            "check that the coordinator was started with --tls-cert, and that the files given here are PEM",
            Exit.UNREACHABLE,
        )
    expires = ssl.cert_time_to_seconds(str(shown["notAfter"]))
    left = expires - time.time()
    day = datetime.fromtimestamp(expires, UTC).date().isoformat()
    message = (
        f"the certificate is for {name}, and valid until {day} ({duration(round(left * 1000))} from now)"
    )
    if left < EXPIRY_WARNING_DAYS * 86_400:
        return Check("tls", Result.WARNING, message, "renew it; the coordinator reads new files by itself")
    return Check("tls", Result.OK, message)


# ---------------------------------------------------------------------- the answers


def answers(client: Client, run_id: str) -> Iterator[Check]:
    """Check that the coordinator accepts our calls, and what it reports of itself."""
    begin, began_at = time.monotonic(), time.time()
    try:
        status = client.status()
    except CallError as error:
        yield from _refused(error)
        return
    took = time.monotonic() - begin
    yield Check("authorisation", Result.OK, f"it accepts our calls, and answers in {report.seconds(took)}")
    if status.relay:
        yield relay(status.relay)
    if status.HasField("caller"):
        yield token(status.caller, run_id)
    yield version(status.version)
    yield from replicas(client)
    yield storage(status.commits)
    yield clock(status.now.ToMicroseconds() / 1e6, began_at + took / 2, took / 2)


def _refused(error: CallError) -> Iterator[Check]:
    if error.status is grpc.StatusCode.UNIMPLEMENTED:
        yield Check(
            "version",
            Result.WARNING,
            f"the coordinator is older than this command ({VERSION}), and does not report its state",
            "use the same version on both sides",
        )
        return
    # An error of the command has its next step on its own line.
    message, _, step = str(error).partition("\n  next: ")
    if error.code in (Exit.UNREACHABLE, Exit.TIMED_OUT):
        yield Check("answer", Result.FAILED, message, step, Exit.UNREACHABLE)
    else:
        # A refusal of the coordinator says what to do.
        yield Check("authorisation", Result.FAILED, message, step)


def relay(name: str) -> Check:
    """Report that a relay forwards our calls."""
    message = f"{report.shown(name)} forwards our calls: the coordinator sees the relay's token, not ours"
    return Check("relay", Result.OK, message)


def token(caller: coordinator_pb2.Caller, run_id: str) -> Check:
    """Check that the token that the coordinator sees admits a worker, and for its run."""
    roles = {number: name.removeprefix("ROLE_").lower() for name, number in coordinator_pb2.Role.items()}
    message = f'"{caller.token_name}" has the role {roles.get(caller.role, caller.role)}'
    message += f" for the runs {', '.join(caller.run_patterns)}"
    if caller.node_patterns:
        message += f" on the nodes {', '.join(caller.node_patterns)}"
    steps = []
    if caller.role in TOO_LOW_FOR_JOBS:
        steps.append(f"{TOO_LOW_FOR_JOBS[caller.role]}; jobs need a token of role worker")
    if run_id and not matches(run_id, caller.run_patterns):
        message += f", and the run is {report.shown(run_id)}"
        steps.append("use a token for that run, or another run id")
    return Check("token", Result.WARNING if steps else Result.OK, message, "; ".join(steps))


def version(theirs: str) -> Check:
    """Check that both sides have the same version."""
    if theirs == VERSION:
        return Check("version", Result.OK, f"both sides are {VERSION}")
    return Check(
        "version",
        Result.WARNING,
        f"the coordinator is {theirs}, and this command {VERSION}",
        "use the same version on both sides",
    )


def replicas(client: Client) -> Iterator[Check]:
    """Check that other replicas of the same version could take over."""
    try:
        found = client.replicas().replicas
    except CallError as error:
        if error.status is not grpc.StatusCode.UNIMPLEMENTED:  # As an older coordinator answers.
            yield from _refused(error)
        return
    if not found:
        return
    leader = next((one for one in found if one.leads), None)
    others = {one.version for one in found if leader is not None and one.version != leader.version}
    names = ", ".join(one.address for one in found)
    message = f"{len(found)}: {names}; {leader.address if leader is not None else 'nobody'} leads"
    if len(found) == 1:
        yield Check("replicas", Result.WARNING, message, "start the others: nobody could take over")
    elif others:
        versions = ", ".join(sorted(others))
        yield Check(
            "replicas", Result.WARNING, f"{message}; some are {versions}", "use the same version everywhere"
        )
    else:
        yield Check("replicas", Result.OK, message)


def storage(commits: coordinator_pb2.CommitTimes) -> Check:
    """Check how long a commit takes: every decision waits for one."""
    median, longest = commits.median_us / 1e6, commits.longest_us / 1e6
    message = (
        f"a commit takes {_short(median)} (median of the last {commits.count}; longest {_short(longest)})"
    )
    if median <= SLOW_COMMIT:
        return Check("storage", Result.OK, message)
    return Check(
        "storage",
        Result.WARNING,
        message,
        "put the state on a local or block disk that syncs fast, and see which other programs write there",
    )


def clock(theirs: float, ours: float, unsure: float) -> Check:
    """Check how far the two clocks are apart.

    Args:
        theirs: the coordinator's time, in seconds since 1970.
        ours: our time at that moment.
        unsure: seconds by which that moment is uncertain.
    """
    apart = theirs - ours
    side = "ahead of" if apart > 0 else "behind"
    if abs(apart) <= unsure:
        message = f"both clocks are the same, as far as can be told (± {_short(unsure)})"
    else:
        message = f"the coordinator's is {_short(abs(apart))} {side} ours (± {_short(unsure)})"
    if abs(apart) - unsure <= CLOCK_WARNING:
        return Check("clock", Result.OK, message)
    return Check(
        "clock",
        Result.WARNING,
        message,
        "synchronise both clocks (NTP). No decision depends on them, but dates in logs and certificates do",
    )


def _short(seconds: float) -> str:
    """Format a duration that may be far below a millisecond."""
    return report.seconds(seconds) if seconds >= 0.01 else f"{seconds * 1000:.2g} ms"


def _since(begin: float) -> str:
    return _short(time.monotonic() - begin)
