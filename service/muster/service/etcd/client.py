"""A client of etcd: several members, one of which is asked until it does not answer.

It is synchronous and may be used by several threads. What it sends again after a lost answer must be safe to
be carried out twice, or be bound by a comparison: that is the caller's part.
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
"""Seconds after a turn around all members that nobody answered."""
KEEPALIVE_MS = 10_000
"""Without data, so long until a ping. Etcd ends the connection of who pings more often than every 5 s."""
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
"""Keys of one answer, when many are read."""


@dataclass(frozen=True, slots=True)
class Method:
    """One of etcd's calls."""

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
    """Who is told how long etcd takes."""

    def etcd_called(self, method: str, code: str, seconds: float) -> None:
        """An attempt ended, with this status code."""
        ...


class _Nobody:
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
    """A client.

    Args:
        endpoints: ``HOST:PORT`` of the cluster's members.
        access: what to show them.
        attempt_timeout: seconds that one member has to answer, before another is asked.
        observer: who is told of the calls.
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
        self._observer = observer or _Nobody()
        self._lock = threading.Lock()
        self._turn = 0
        self._connection: Connection | None = None
        self._token: str | None = None
        self._failed = 0
        """Attempts without an answer, in a row."""
        self._last: dict[str, str] = {}
        """What each member said last, of those that did not answer."""
        self._closed = threading.Event()

    # ------------------------------------------------------------------ calls

    def snapshot(self, key: bytes, end: bytes, *, timeout: float) -> tuple[list[pb.KeyValue], int]:
        """Every key from one to another, as they all are at one moment: as the cluster has decided.

        Args:
            key: the first one.
            end: the one after the last.
            timeout: seconds for each thousand.

        Returns:
            The keys, ascending, and the revision that they are of.

        Raises:
            CompactedError: it took so long that the revision is gone.
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
        """Carry out a transaction; it is sent again while no answer comes, so a comparison must bind it.

        Raises:
            UnreachableError: no answer came in time; it may have been carried out.
            EtcdError: etcd refused.
        """
        return cast(pb.TxnResponse, self.call(TXN, request, timeout))

    def grant(self, ttl: int, *, timeout: float) -> pb.LeaseGrantResponse:
        """Ask for a lease; one that was granted in an answer that got lost ends by itself."""
        return cast(pb.LeaseGrantResponse, self.call(GRANT, pb.LeaseGrantRequest(ttl=ttl), timeout))

    def revoke(self, lease: int, *, timeout: float) -> None:
        """End a lease, and the keys that hang on it."""
        self.call(REVOKE, pb.LeaseRevokeRequest(id=lease), timeout)

    def keep_alive(self, lease: int) -> int:
        """Renew a lease, in one attempt at one member.

        Returns:
            For how many seconds, from when the call was made; 0: it is over.

        Raises:
            TransientError: no answer came.
            EtcdError: etcd refused.
        """
        answer = self._attempt(KEEP_ALIVE, pb.LeaseKeepAliveRequest(id=lease), self._attempt_timeout)
        return int(cast(pb.LeaseKeepAliveResponse, answer).ttl)

    def call(self, method: Method, request: Message, timeout: float) -> Message:
        """Call until a member answers.

        Args:
            method: what to call.
            request: with what.
            timeout: seconds for all attempts.

        Raises:
            UnreachableError: none did in time.
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
            # Who had less time than others get is not at fault.
            hurried = timeout < self._attempt_timeout and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if isinstance(fault, TransientError) and not hurried:
                self._give_up(connection, fault)
            raise fault from None
        except ValueError as error:  # Another thread has found the connection dead, and closed it.
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
        # A member without a leader ends a stream then, instead of leaving it without news.
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
        """What happens to keys, from a revision on, until the connection breaks.

        Raises:
            CompactedError: the revision is gone.
            TransientError: the connection broke; watch again, from what was heard last.
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
        except ValueError as error:  # The channel was closed by another thread, that found it dead.
            raise TransientError(f"{connection.endpoint}: {error}") from None
        finally:
            requests.put(None)
            if begun is not None:
                begun.cancel()
                call.cancel()

    def _watch_ended(self, connection: Connection, why: str = "") -> TransientError:
        """Etcd ends a watch by a word of its own, and also so if it does not take our token any more."""
        known = bool(self._access.user)
        fault = TransientError(
            f"{connection.endpoint} ended a watch{why}", try_other=not known, token_refused=known
        )
        self._give_up(connection, fault)
        return fault

    # ------------------------------------------------------------------ members

    def statuses(self, timeout: float) -> dict[str, pb.StatusResponse | EtcdError | TransientError]:
        """Ask every member how it is.

        Returns:
            By endpoint: its answer, or why there is none.
        """
        return {endpoint: self.status(endpoint, timeout) for endpoint in self.endpoints}

    def status(self, endpoint: str, timeout: float) -> pb.StatusResponse | EtcdError | TransientError:
        """Ask one member how it is.

        Returns:
            Its answer, or why there is none.
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
        """End all connections; calls that wait fail."""
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
        """Ask another member from now on, unless someone did so already."""
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
        # Everything on it ends: what waits on a member that does not answer asks another one.
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
