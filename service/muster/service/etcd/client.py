"""A client of etcd: it asks one member until that member does not answer, and then the next.

It is synchronous, and threads may share it. It sends a request again if the answer got lost. So the caller
must make requests safe to repeat, or bind them by a comparison.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, cast

import grpc
from google.protobuf.message import Message

from muster.etcd.v3 import etcd_pb2 as pb
from muster.service.etcd.errors import CompactedError, EtcdError, TransientError, UnreachableError, classified
from muster.service.etcd.location import Access

Metadata = tuple[tuple[str, str | bytes], ...]

PAUSE = 0.1
"""Seconds to wait after no member answered."""
KEEPALIVE_MS = 10_000
"""Time without data until a ping. Etcd ends a connection with pings more often than every 5 s."""
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.max_pings_without_data", 0),
]
VERSION, CREATE = 0, 1
"""Etcd's numbers for comparing how often a key was written, and the revision that made it."""
DELETED = 1
"""Etcd's number for the event that a key was deleted."""
PAGE = 1_000
"""Keys of one page of a snapshot."""


@dataclass(frozen=True, slots=True)
class Method:
    """An RPC method of etcd."""

    path: str
    response: type[Message]
    streams: bool = False


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", pb.TxnResponse)
GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse)
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse)
KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse, streams=True)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchResponse, streams=True)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse)
STATUS = Method("/etcdserverpb.Maintenance/Status", pb.StatusResponse)


class CallObserver(Protocol):
    """Is told how long calls of etcd take."""

    def etcd_called(self, method: str, code: str, seconds: float) -> None:
        """Take note that an attempt ended with this status code."""
        ...


class _NoObserver:
    def etcd_called(self, method: str, code: str, seconds: float) -> None:
        pass


class Connection:
    """A connection to one member."""

    def __init__(self, endpoint: str, access: Access) -> None:
        self.endpoint = endpoint
        if access.ca is None:
            self.channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
            return
        cert, key = (_read(path) if path else None for path in (access.cert, access.key))
        tls = grpc.ssl_channel_credentials(_read(access.ca), key, cert)
        self.channel = grpc.secure_channel(endpoint, tls, options=CHANNEL_OPTIONS)


class Etcd:
    """A client of one cluster.

    Args:
        endpoints: ``HOST:PORT`` of the cluster's members.
        access: the credentials.
        attempt_timeout: seconds that a member has to answer before another is asked.
        observer: is told of the calls.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        access: Access,
        *,
        attempt_timeout: float,
        observer: CallObserver | None = None,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self._access = access
        self._attempt_timeout = attempt_timeout
        self._observer = observer or _NoObserver()
        self._lock = threading.Lock()
        self._turn = 0
        self._connection: Connection | None = None
        self._token: str | None = None
        self._failed = 0
        """Consecutive attempts without an answer."""
        self._last: dict[str, str] = {}
        """The last error of each member that did not answer."""
        self._closed = threading.Event()

    # ------------------------------------------------------------------ calls

    def snapshot(self, key: bytes, end: bytes, *, timeout: float) -> tuple[list[pb.KeyValue], int]:
        """Read a range of keys as of one revision.

        Args:
            key: the first key.
            end: the key after the last one.
            timeout: seconds for each thousand keys.

        Returns:
            The keys, ascending, and their revision.

        Raises:
            CompactedError: the revision was compacted meanwhile.
            EtcdError: etcd refused, or did not answer.
        """
        kvs: list[pb.KeyValue] = []
        revision = 0
        while True:
            request = pb.RangeRequest(key=key, range_end=end, limit=PAGE, revision=revision)
            page = cast(pb.RangeResponse, self.call(RANGE, request, timeout))
            kvs += page.kvs
            revision = revision or page.header.revision
            if not page.more:
                return kvs, revision
            key = kvs[-1].key + b"\0"

    def txn(self, request: pb.TxnRequest, *, timeout: float) -> pb.TxnResponse:
        """Carry out a transaction. It is sent again while no answer comes, so a comparison must bind it.

        Raises:
            UnreachableError: no answer came in time. The transaction may have been carried out.
            EtcdError: etcd refused.
        """
        return cast(pb.TxnResponse, self.call(TXN, request, timeout))

    def grant(self, ttl: int, *, timeout: float) -> pb.LeaseGrantResponse:
        """Ask for a lease. A lease whose answer got lost expires by itself."""
        return cast(pb.LeaseGrantResponse, self.call(GRANT, pb.LeaseGrantRequest(ttl=ttl), timeout))

    def revoke(self, lease: int, *, timeout: float) -> None:
        """End a lease and delete its keys."""
        self.call(REVOKE, pb.LeaseRevokeRequest(id=lease), timeout)

    def keep_alive(self, lease: int) -> int:
        """Renew a lease, in one attempt at one member.

        Returns:
            The TTL in seconds, from when the call was made; 0: the lease is over.

        Raises:
            TransientError: no answer came.
            EtcdError: etcd refused.
        """
        answer = self._attempt(KEEP_ALIVE, pb.LeaseKeepAliveRequest(id=lease), self._attempt_timeout)
        return int(cast(pb.LeaseKeepAliveResponse, answer).ttl)

    def call(self, method: Method, request: Message, timeout: float) -> Message:
        """Call until a member answers.

        Args:
            method: the method.
            request: the request.
            timeout: seconds for all attempts.

        Raises:
            UnreachableError: no member answered in time.
            EtcdError: etcd refused.
        """
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.001, deadline - time.monotonic())
            try:
                return self._attempt(method, request, min(left, self._attempt_timeout))
            except TransientError as error:
                if time.monotonic() >= deadline or self._closed.is_set():
                    raise UnreachableError(self._unreachable(str(error), timeout)) from None

    def _attempt(self, method: Method, request: Message, timeout: float) -> Message:
        connection = self._current()
        began = time.monotonic()
        try:
            answer = self._called(connection, method, request, self._metadata(connection, timeout), timeout)
        except grpc.RpcError as error:
            self._observer.etcd_called(method.path, error.code().name, time.monotonic() - began)
            fault = classified(error, connection.endpoint)
            # A member that had less time than usual is not at fault.
            hurried = timeout < self._attempt_timeout and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if isinstance(fault, TransientError) and not hurried:
                self._give_up(connection, fault)
            raise fault from None
        except ValueError as error:  # Another thread found the connection dead and closed it.
            raise TransientError(f"{connection.endpoint}: {error}") from None
        self._observer.etcd_called(method.path, "OK", time.monotonic() - began)
        self._failed = 0
        self._last.clear()
        return answer

    def _called(
        self, connection: Connection, method: Method, request: Message, metadata: Metadata, timeout: float
    ) -> Message:
        if not method.streams:
            unary = connection.channel.unary_unary(
                method.path, type(request).SerializeToString, method.response.FromString
            )
            return unary(request, timeout=timeout, metadata=metadata)
        stream = connection.channel.stream_stream(
            method.path, type(request).SerializeToString, method.response.FromString
        )
        call = stream(iter([request]), timeout=timeout, metadata=metadata)
        try:
            for answer in call:
                return answer
        finally:
            call.cancel()
        raise TransientError(f"{connection.endpoint} ended a stream without an answer")

    def _metadata(self, connection: Connection, timeout: float) -> Metadata:
        # With this, a member without a leader ends a stream instead of leaving it silent.
        metadata: Metadata = (("hasleader", "true"),)
        if not self._access.user:
            return metadata
        token = self._token
        if token is None:
            assert self._access.password_file is not None
            password = _read(self._access.password_file).decode("utf-8", "replace").strip()
            request = pb.AuthenticateRequest(name=self._access.user, password=password)
            answer = self._called(connection, AUTHENTICATE, request, (), timeout)
            token = self._token = cast(pb.AuthenticateResponse, answer).token
        return (*metadata, ("token", token))

    # ------------------------------------------------------------------ watching

    def watch(self, key: bytes, end: bytes, revision: int) -> Iterator[pb.WatchResponse]:
        """Yield the changes of keys from a revision on, until the connection breaks.

        Raises:
            CompactedError: the revision was compacted.
            TransientError: the connection broke. Watch again from the last revision received.
            EtcdError: etcd refused.
        """
        connection = self._current()
        requests: SimpleQueue[pb.WatchRequest | None] = SimpleQueue()
        create = pb.WatchCreateRequest(key=key, range_end=end, start_revision=revision, fragment=True)
        requests.put(pb.WatchRequest(create=create))
        begun = None
        try:
            stream = connection.channel.stream_stream(
                WATCH.path, pb.WatchRequest.SerializeToString, pb.WatchResponse.FromString
            )
            call = stream(
                iter(requests.get, None), metadata=self._metadata(connection, self._attempt_timeout)
            )
            begun = threading.Timer(self._attempt_timeout, call.cancel)
            begun.daemon = True
            begun.start()
            for response in call:
                begun.cancel()
                if response.compact_revision:
                    raise CompactedError(
                        f"revision {revision} is gone; the oldest is {response.compact_revision}"
                    )
                if response.canceled:
                    raise self._watch_ended(connection, f": {response.cancel_reason}")
                yield response
            raise self._watch_ended(connection)
        except grpc.RpcError as error:
            fault = classified(error, connection.endpoint)
            if isinstance(fault, TransientError):
                self._give_up(connection, fault)
            raise fault from None
        except ValueError as error:  # Another thread found the connection dead and closed it.
            raise TransientError(f"{connection.endpoint}: {error}") from None
        finally:
            requests.put(None)
            if begun is not None:
                begun.cancel()
                call.cancel()

    def _watch_ended(self, connection: Connection, why: str = "") -> TransientError:
        """Return the error of a watch that etcd ended. It also ends one if it no longer accepts our token."""
        known = bool(self._access.user)
        fault = TransientError(
            f"{connection.endpoint} ended a watch{why}", try_other=not known, token_refused=known
        )
        self._give_up(connection, fault)
        return fault

    # ------------------------------------------------------------------ members

    def statuses(self, timeout: float) -> dict[str, pb.StatusResponse | EtcdError | TransientError]:
        """Ask every member for its status.

        Returns:
            By endpoint: the answer or the error.
        """
        return {endpoint: self.status(endpoint, timeout) for endpoint in self.endpoints}

    def status(self, endpoint: str, timeout: float) -> pb.StatusResponse | EtcdError | TransientError:
        """Ask one member for its status.

        Returns:
            The answer or the error.
        """
        try:
            connection = Connection(endpoint, self._access)
        except EtcdError as error:
            return error
        try:
            metadata = self._metadata(connection, timeout)
            answer = self._called(connection, STATUS, pb.StatusRequest(), metadata, timeout)
            return cast(pb.StatusResponse, answer)
        except EtcdError as error:
            return error
        except grpc.RpcError as error:
            return classified(error, endpoint)
        finally:
            connection.channel.close()

    def close(self) -> None:
        """Close all connections. Waiting calls fail."""
        self._closed.set()
        with self._lock:
            if self._connection is not None:
                self._connection.channel.close()

    def _current(self) -> Connection:
        with self._lock:
            if self._connection is None:
                if self._closed.is_set():
                    raise EtcdError("the client is closed")
                self._connection = Connection(self.endpoints[self._turn % len(self.endpoints)], self._access)
            return self._connection

    def _give_up(self, connection: Connection, fault: TransientError) -> None:
        """Ask another member from now on, unless another thread switched already."""
        if fault.token_refused:
            self._token = None
        if not fault.try_other:
            self._closed.wait(PAUSE)
            return
        with self._lock:
            if self._connection is not connection:
                return
            self._connection = None
            self._turn += 1
            self._failed += 1
            self._last[connection.endpoint] = str(fault)
            turned = self._failed % len(self.endpoints) == 0
        # All calls on the connection end: those that wait for this member then ask another one.
        connection.channel.close()
        if turned:
            self._closed.wait(PAUSE)

    def _unreachable(self, last: str, timeout: float) -> str:
        said = "; ".join(self._last.values()) or last
        return f"no member of etcd answered within {timeout:.3g} s; last errors: {said}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EtcdError(
            f"cannot read {path}: {error.strerror}. Give a file that this user may read"
        ) from error
