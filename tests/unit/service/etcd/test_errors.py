"""What goes wrong with etcd is told apart: what may pass, and what a person must fix."""

import grpc
import pytest

from muster.service.etcd.errors import CompactedError, EtcdError, TransientError, classified

Code = grpc.StatusCode


class Ended(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


def fault(code: grpc.StatusCode, details: str) -> EtcdError | TransientError:
    return classified(Ended(code, details), "etcd-0:2379")


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (Code.UNAVAILABLE, "etcdserver: request timed out"),
        (Code.UNAVAILABLE, "etcdserver: leader changed"),
        (Code.UNAVAILABLE, "etcdserver: no leader"),
        (Code.UNAVAILABLE, "failed to connect to all addresses"),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded"),
        (Code.CANCELLED, "Channel closed!"),
    ],
)
def test_another_member_is_asked(code: grpc.StatusCode, details: str):
    found = fault(code, details)
    assert isinstance(found, TransientError)
    assert found.try_other
    assert "etcd-0:2379 " in str(found)


def test_overloaded_member_is_asked_again():
    found = fault(Code.RESOURCE_EXHAUSTED, "etcdserver: too many requests")
    assert isinstance(found, TransientError)
    assert not found.try_other


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (Code.UNAUTHENTICATED, "etcdserver: invalid auth token"),
        (Code.INVALID_ARGUMENT, "etcdserver: revision of auth store is old"),
    ],
)
def test_expired_token_of_etcd_is_requested_again(code: grpc.StatusCode, details: str):
    found = fault(code, details)
    assert isinstance(found, TransientError)
    assert found.token_refused
    assert not found.try_other


@pytest.mark.parametrize(
    ("code", "details", "next_step"),
    [
        (Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", "etcdctl alarm disarm"),
        (Code.INVALID_ARGUMENT, "etcdserver: user name is empty", "--etcd-user and --etcd-password-file"),
        (
            Code.INVALID_ARGUMENT,
            "etcdserver: authentication failed, invalid user ID or password",
            "--etcd-password-file",
        ),
        (
            Code.FAILED_PRECONDITION,
            "etcdserver: authentication is not enabled",
            "leave --etcd-user out",
        ),
        (Code.PERMISSION_DENIED, "etcdserver: permission denied", "etcdctl role grant-permission"),
        (Code.INVALID_ARGUMENT, "etcdserver: request is too large", "--max-request-bytes"),
        (Code.INVALID_ARGUMENT, "etcdserver: too many operations in txn request", "--max-txn-ops"),
        (Code.DATA_LOSS, "etcdserver: corrupt cluster", "data corruption"),
        (Code.UNIMPLEMENTED, "unknown service etcdserverpb.KV", "Is that etcd"),
        (Code.NOT_FOUND, "etcdserver: requested lease not found", "lease not found"),
    ],
)
def test_permanent_error_says_what_to_do(code: grpc.StatusCode, details: str, next_step: str):
    found = fault(code, details)
    assert isinstance(found, EtcdError)
    assert next_step in str(found)
    assert "etcd-0:2379" in str(found)


def test_revision_that_is_gone_is_known_as_that():
    found = fault(Code.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")
    assert isinstance(found, CompactedError)


@pytest.mark.parametrize(
    ("details", "why"),
    [
        ("Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: self signed", "not of an authority in --etcd-ca"),
        ("Ssl handshake failed: WRONG_VERSION_NUMBER", "does not speak TLS"),
        ("Hostname Verification Check failed", "for another name"),
    ],
)
def test_tls_errors_are_explained(details: str, why: str):
    found = fault(Code.UNAVAILABLE, details)
    assert isinstance(found, TransientError)
    assert why in str(found)
