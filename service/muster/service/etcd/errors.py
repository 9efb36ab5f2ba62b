"""The errors of etcd, in sentences that say what to do next."""

import grpc


class EtcdError(Exception):
    """Etcd refused a call, and would refuse it again. The message says what, why, and what to do next."""


class UnreachableError(EtcdError):
    """No member answered in time. A requested change may have been carried out."""


class CompactedError(EtcdError):
    """The requested revision was compacted: read everything again."""


class LeaseGoneError(EtcdError):
    """The lease for a new key is over."""


class TransientError(Exception):
    """One attempt failed; the next one may succeed.

    Args:
        message: why.
        try_other: whether another member should be asked.
        token_refused: whether a new token must be asked for.
    """

    def __init__(self, message: str, *, try_other: bool = True, token_refused: bool = False) -> None:
        super().__init__(message)
        self.try_other = try_other
        self.token_refused = token_refused


TRANSIENT_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
"""Status codes after which another member, or the same one a little later, may answer."""

_SENTENCES = (
    (
        "database space exceeded",
        "etcd has no space left, and takes no writes. Compact and defragment it (etcdctl compact, etcdctl "
        "defrag), raise --quota-backend-bytes if need be, and disarm the alarm: etcdctl alarm disarm",
    ),
    (
        "user name is empty",
        "etcd asks for a user. Give --etcd-user and --etcd-password-file",
    ),
    (
        "authentication failed",
        "etcd does not know the user of --etcd-user, or the password in --etcd-password-file is another one",
    ),
    (
        "authentication is not enabled",
        "etcd asks nobody for a password, and --etcd-user is given. Enable it (etcdctl auth enable), or "
        "leave --etcd-user out",
    ),
    (
        "permission denied",
        "the user of etcd may not read and write there. Grant it: etcdctl role grant-permission ROLE "
        "readwrite --prefix=true PREFIX",
    ),
    (
        "request is too large",
        "etcd takes no request of that size. Raise --max-request-bytes to its default of 1.5 MiB or above",
    ),
    (
        "too many operations",
        "etcd takes no transaction of so many operations. Raise --max-txn-ops to its default of 128 or above",
    ),
    (
        "corrupt",
        "etcd has found its data damaged (alarm CORRUPT). Follow its guide to data corruption before "
        "anything else",
    ),
)
TLS_FAULTS = (
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not of an authority in --etcd-ca, has expired, or is for another name",
    ),
    ("Hostname Verification", "its certificate is for another name; reach it by a name that is in it"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS; leave --etcd-ca out"),
    (
        "Handshake read failed",
        "the connection is closed in the TLS handshake: it may not speak TLS (leave --etcd-ca out), or ask "
        "for a certificate (give --etcd-cert and --etcd-key)",
    ),
    ("Ssl handshake failed", "the TLS handshake failed; look at --etcd-ca, --etcd-cert and --etcd-key"),
)
"""Errors in gRPC's words that do not go away by waiting."""


def classified(error: grpc.RpcError, endpoint: str) -> EtcdError | TransientError:
    """Return the error that a failed call means.

    Args:
        error: the failed call, with its status.
        endpoint: the member that was asked.
    """
    code, details = error.code(), str(error.details() or "")
    said = f"{endpoint} said {code.name}: {details.removeprefix('etcdserver: ')}"
    if code is grpc.StatusCode.UNAUTHENTICATED or "auth store is old" in details:
        return TransientError(said, try_other=False, token_refused=True)
    if "too many requests" in details:
        return TransientError(said, try_other=False)
    if "required revision has been compacted" in details:
        return CompactedError(said)
    if "requested lease not found" in details:
        return LeaseGoneError(said)
    for sign, sentence in _SENTENCES:
        if sign in details:
            return EtcdError(f"{sentence}; {said}")
    if code is grpc.StatusCode.CANCELLED:
        return TransientError(f"{endpoint} was given up: it did not answer another call")
    if code in TRANSIENT_CODES:
        fault = tls_fault(details)
        return TransientError(f"{endpoint}: {fault}" if fault else said)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return EtcdError(f"{said}. Is that etcd, from 3.4 on?")
    return EtcdError(said)


def tls_fault(details: str) -> str:
    """Explain a TLS error in gRPC's message about a connection; empty: it has no TLS error."""
    return next((sentence for sign, sentence in TLS_FAULTS if sign in details), "")
