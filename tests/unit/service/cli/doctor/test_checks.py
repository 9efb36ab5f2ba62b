"""What the doctor finds, and what it advises."""

import datetime
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lab.patience import PATIENCE
from muster.service.address import Address
from muster.service.cli.client.coordinator_client import CallError, Client
from muster.service.cli.doctor.checks import (
    Certificates,
    Check,
    Result,
    answers,
    certificate,
    clock,
    plaintext,
    reach,
    storage,
    token,
    version,
)
from muster.service.cli.doctor.doctor import as_json, line
from muster.service.cli.failure import Exit
from muster.service.version import VERSION
from muster.v1 import coordinator_pb2 as pb

# ---------------------------------------------------------------------- the network


@contextmanager
def listening(context: ssl.SSLContext | None = None) -> Iterator[Address]:
    """A server that takes one connection, with TLS if a context is given."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                if context is None:
                    connection.recv(1)
                    connection.sendall(b"this is not TLS at all\n" * 4)
                    return
                try:
                    with context.wrap_socket(connection, server_side=True) as secured:
                        secured.recv(1)
                except OSError:
                    pass  # The client did not like the certificate.

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Address("127.0.0.1", server.getsockname()[1])
        finally:
            thread.join(PATIENCE)


def certified(folder: Path, days: float, name: str = "127.0.0.1") -> tuple[ssl.SSLContext, Path]:
    """A server's context with a certificate of its own making, and the file of it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coordinator")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address(name))
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=100))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert, secret = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, secret)
    return context, cert


def test_a_port_that_answers_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        checks = list(reach(Address("127.0.0.1", server.getsockname()[1]), PATIENCE))
    assert [(one.name, one.result, one.next) for one in checks] == [
        ("resolve", Result.OK, ""),
        ("connect", Result.OK, ""),
    ]


def test_a_port_that_nobody_listens_on_is_a_failure_with_a_next_step():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    *_, last = reach(Address("127.0.0.1", port), PATIENCE)
    assert (last.name, last.result, last.exit) == ("connect", Result.FAILED, Exit.UNREACHABLE)
    assert "Connection refused" in last.message
    assert "muster serve" in last.next


def test_a_name_that_nobody_knows_is_a_failure():
    (check,) = reach(Address("no-such-host.invalid", 7550), PATIENCE)
    assert (check.name, check.result, check.exit) == ("resolve", Result.FAILED, Exit.UNREACHABLE)
    assert "no-such-host.invalid has no address" in check.message


@pytest.mark.parametrize(
    ("host", "result"),
    [
        ("127.0.0.1", Result.OK),
        ("::1", Result.OK),
        ("localhost", Result.OK),
        ("10.0.0.1", Result.WARNING),
        ("coordinator.example", Result.WARNING),
    ],
)
def test_to_do_without_tls_is_well_on_one_machine_only(host: str, result: Result):
    assert plaintext(Address(host, 7550)).result is result


@pytest.mark.parametrize(
    ("days", "result", "words"),
    [
        (90.5, Result.OK, "the certificate is for 127.0.0.1, and valid until "),
        (13.5, Result.WARNING, "(13d1"),
        (-1.0, Result.FAILED, "certificate has expired"),
    ],
)
def test_the_end_of_a_certificate_is_foreseen(tmp_path: Path, days: float, result: Result, words: str):
    context, cert = certified(tmp_path, days)
    with listening(context) as address:
        check = certificate(address, Certificates(cert), PATIENCE)
    assert check.result is result, check
    assert words in check.message
    assert bool(check.next) is (result is not Result.OK)


def test_a_certificate_for_another_name_is_refused(tmp_path: Path):
    context, cert = certified(tmp_path, 90)
    with listening(context) as address:
        check = certificate(address, Certificates(cert, server_name="coordinator.example"), PATIENCE)
    assert check.result is Result.FAILED
    assert "coordinator.example" in check.message
    assert "--tls-server-name" in check.next


def test_one_signed_by_someone_else_is_refused(tmp_path: Path):
    (tmp_path / "other").mkdir()
    context, _ = certified(tmp_path, 90)
    _, other = certified(tmp_path / "other", 90)
    with listening(context) as address:
        check = certificate(address, Certificates(other), PATIENCE)
    assert (check.result, check.exit) == (Result.FAILED, Exit.UNREACHABLE)
    assert "self-signed certificate" in check.message


def test_a_port_without_tls_is_told_so(tmp_path: Path):
    _, cert = certified(tmp_path, 90)
    with listening() as address:
        check = certificate(address, Certificates(cert), PATIENCE)
    assert check.result is Result.FAILED
    assert "no TLS handshake" in check.message


def test_a_file_that_is_not_there_is_a_failure(tmp_path: Path):
    check = certificate(Address("127.0.0.1", 1), Certificates(tmp_path / "none.pem"), PATIENCE)
    assert check.message == "no TLS handshake: No such file or directory"


# ---------------------------------------------------------------------- what it answers


class Answering(Client):
    """A client whose coordinator says what the test says."""

    def __init__(self, answer: pb.StatusResponse | CallError, *replicas: pb.Replica) -> None:
        self._answer = answer
        self._replicas_there = replicas

    def replicas(self) -> pb.ReplicasResponse:
        return pb.ReplicasResponse(replicas=self._replicas_there)

    def status(self) -> pb.StatusResponse:
        if isinstance(self._answer, CallError):
            raise self._answer
        return self._answer


def replica(address: str, version: str = VERSION, *, leads: bool = False) -> pb.Replica:
    return pb.Replica(address=address, version=version, leads=leads)


@pytest.mark.parametrize(
    ("there", "result", "said"),
    [
        ([replica("a:1", leads=True), replica("b:1")], Result.OK, "2: a:1, b:1; a:1 leads"),
        ([replica("a:1", leads=True)], Result.WARNING, "1: a:1; a:1 leads"),
        ([replica("a:1", leads=True), replica("b:1", "0.0.1")], Result.WARNING, "some are 0.0.1"),
        ([replica("a:1"), replica("b:1")], Result.OK, "nobody leads"),
    ],
)
def test_replicas_are_counted_and_compared(there: list[pb.Replica], result: Result, said: str):
    status = pb.StatusResponse(version=VERSION)
    (check,) = (one for one in answers(Answering(status, *there), "") if one.name == "replicas")
    assert check.result is result
    assert said in check.message


def test_a_coordinator_that_is_well_is_told_so():
    status = pb.StatusResponse(version=VERSION, epoch=3)
    status.now.FromNanoseconds(time.time_ns())
    status.commits.count = 5
    checks = list(answers(Answering(status), "job1"))
    assert [one.name for one in checks] == ["authorisation", "version", "storage", "clock"]
    assert {one.result for one in checks} == {Result.OK}
    status.caller.token_name = "ci"
    names = [one.name for one in answers(Answering(status), "job1")]
    assert names == ["authorisation", "token", "version", "storage", "clock"]


def test_doctor_names_the_relay_that_forwards_calls():
    status = pb.StatusResponse(version=VERSION, relay="node-0:41\x1b[2J")
    status.caller.token_name = "node-0"
    relay, token = (one for one in answers(Answering(status), "job1") if one.name in ("relay", "token"))
    assert relay.result is Result.OK
    assert relay.message == (
        "node-0:41\\x1b[2J forwards our calls: the coordinator sees the relay's token, not ours"
    )
    assert token.message.startswith('"node-0" ')


@pytest.mark.parametrize(
    ("role", "run_id", "result", "message", "steps"),
    [
        (pb.ROLE_WORKER, "", Result.OK, "has the role worker for the runs a-*, b", []),
        (pb.ROLE_OPERATOR, "a-1", Result.OK, "has the role operator for the runs a-*, b", []),
        (
            pb.ROLE_WORKER,
            "A-1",
            Result.WARNING,
            "a-*, b, and the run is A-1",
            ["use a token for that run"],
        ),
        (pb.ROLE_VIEWER, "", Result.WARNING, "has the role viewer for", ["a token of role worker"]),
        (pb.ROLE_VIEWER, "c", Result.WARNING, "the run is c", ["of role worker", "for that run"]),
        (pb.ROLE_WATCHER, "", Result.WARNING, "has the role watcher for", ["for muster watch; jobs need"]),
        (pb.Role.ValueType(9), "b", Result.OK, "has the role 9 for", []),
    ],
)
def test_a_token_with_which_a_job_is_refused_is_a_warning(
    role: pb.Role.ValueType, run_id: str, result: Result, message: str, steps: list[str]
):
    check = token(pb.Caller(token_name="ci", role=role, run_patterns=["a-*", "b"]), run_id)
    assert (check.name, check.result) == ("token", result)
    assert check.message.startswith('"ci" ')
    assert message in check.message
    assert bool(check.next) is bool(steps)
    for step in steps:
        assert step in check.next


def test_nodes_of_a_watcher_are_shown():
    caller = pb.Caller(
        token_name="w", role=pb.ROLE_WATCHER, run_patterns=["*"], node_patterns=["node-1", "spot-*"]
    )
    assert token(caller, "").message == '"w" has the role watcher for the runs * on the nodes node-1, spot-*'


def test_coordinator_that_refuses_the_command_says_why():
    refused = CallError("the token is not known. Ask for another.", Exit.FAILED)
    (check,) = answers(Answering(refused), "")
    assert (check.name, check.result, check.exit) == ("authorisation", Result.FAILED, Exit.FAILED)
    assert check.message == "the token is not known. Ask for another."


@pytest.mark.parametrize("code", [Exit.UNREACHABLE, Exit.TIMED_OUT])
def test_coordinator_that_does_not_answer_is_unreachable(code: Exit):
    (check,) = answers(Answering(CallError("it did not answer\n  next: wait longer", code)), "")
    assert (check.name, check.exit) == ("answer", Exit.UNREACHABLE)
    assert (check.message, check.next) == ("it did not answer", "wait longer")


def test_coordinator_too_old_to_be_asked_is_a_warning():
    old = CallError("UNIMPLEMENTED", Exit.FAILED, grpc.StatusCode.UNIMPLEMENTED)
    (check,) = answers(Answering(old), "")
    assert (check.name, check.result) == ("version", Result.WARNING)


def test_another_version_is_a_warning_that_names_both():
    assert version(VERSION).result is Result.OK
    other = version("9.9.9")
    assert other.result is Result.WARNING
    assert "9.9.9" in other.message
    assert VERSION in other.message


def test_storage_is_slow_by_the_median_and_not_by_the_longest():
    times = pb.CommitTimes(count=128, median_us=1_200, longest_us=900_000)
    assert storage(times) == Check(
        "storage",
        Result.OK,
        "a commit takes 1.2 ms (median of the last 128; longest 900 ms)",
    )
    times.median_us = 200_000
    assert storage(times).result is Result.WARNING
    assert "disk" in storage(times).next


@pytest.mark.parametrize(
    ("apart", "unsure", "result", "words"),
    [
        (0.0, 0.01, Result.OK, "the same, as far as can be told (± 10 ms)"),
        (0.5, 0.01, Result.OK, "500 ms ahead of ours"),
        (-2.0, 0.01, Result.WARNING, "2 s behind ours"),
        (1.5, 0.8, Result.OK, "1.5 s ahead of ours (± 800 ms)"),
    ],
)
def test_clocks_may_differ_a_little(apart: float, unsure: float, result: Result, words: str):
    check = clock(1_700_000_000.0 + apart, 1_700_000_000.0, unsure)
    assert check.result is result
    assert words in check.message


# ---------------------------------------------------------------------- printing


def test_a_check_is_one_line_and_its_next_step_another():
    well = Check("version", Result.OK, "both sides are 1.0")
    assert line(well, color=False) == "ok        version         both sides are 1.0"
    ill = Check("connect", Result.FAILED, "no\x1b[2J", "look")
    first, second = line(ill, color=False).splitlines()
    assert first == "failed    connect         no\\x1b[2J"
    assert second == " " * 26 + "next: look"
    assert as_json(ill) == {"name": "connect", "result": "failed", "message": "no\x1b[2J", "next": "look"}


def test_further_lines_of_a_message_and_the_next_step_are_indented():
    text = line(Check("answer", Result.FAILED, "no answer\n  tried: a", "look there."), color=False)
    head, *rest = text.splitlines()
    column = head.index("no answer")
    assert [one[column:] for one in rest] == ["  tried: a", "next: look there."]
    assert all(one[:column].isspace() for one in rest)
