"""The run's key-value store as a ``torch.distributed.Store``, so that no rank needs to host one."""

import os
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from torch.distributed import Store

from muster.client.calls import ELSEWHERE, explain, reason_of, search_on
from muster.client.credentials import TokenPatience
from muster.client.errors import EnvironmentValueError
from muster.client.replicas import Search, Target, replicas_of
from muster.v1 import store_pb2 as pb
from muster.worker import environment
from muster.worker.errors import ConnectError, MusterError, RefusedError, StoreTimeoutError
from muster.worker.store_stream import StoreConnection, Waiting
from muster.worker.transport.channel import shared_channel
from muster.worker.transport.fork_guard import forked
from muster.worker.transport.outage_log import OutageLog

DEFAULT_TIMEOUT = timedelta(seconds=300)
"""The default of torch's stores."""
ANSWER_GRACE = 5.0
"""Seconds beyond the timeout that an answer may take: it is the coordinator's clock that ends a wait."""
NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
"""How a call ends when the connection breaks, the coordinator stops, or it says nothing in time."""

Response = TypeVar("Response", bound=Message)
Change = TypeVar(
    "Change", pb.SetRequest, pb.AddRequest, pb.CompareSetRequest, pb.AppendRequest, pb.DeleteRequest
)

_alive: list["CoordinatorStore"] = []
"""Every store of this process. A process group or a PrefixStore holds the C++ half of a store only, which
is of no use when the Python half is gone."""


class CoordinatorStore(Store):
    """The keys of a run, held by the Muster coordinator and safe from its restart.

    It takes the place of a ``TCPStore``: keys are ``str``, values ``str`` or ``bytes``, and ``bytes`` come
    back. A change that is sent again after a lost connection is carried out once. An operation that meets
    no coordinator tries again until the store's timeout is over. The keys are those of the whole run: lay a
    ``PrefixStore`` over it for a part of your own.

    Args:
        endpoint: the coordinator's ``host:port``, a relay's ``unix:///path``, or several addresses with
            commas between; default: ``MUSTER_ENDPOINT``.
        run_id: the training job; default: ``MUSTER_RUN_ID``, ``TORCHELASTIC_RUN_ID``, else ``default``.
        timeout: how long to wait for keys, and for the coordinator; 0 is for ever.

    Raises:
        ValueError: an argument is not usable.
        MusterError: this process was forked from one that speaks gRPC, for a store or anything else.
    """

    timeout: timedelta  # torch's, and left out of its stubs

    def __init__(
        self,
        endpoint: str | None = None,
        run_id: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        self.endpoint = environment.endpoint(endpoint)
        self.run_id = environment.run_id(run_id)
        _seconds(timeout)
        # The timeout lives in the C++ half, where PrefixStore and process groups read and set it.
        self.set_timeout(timeout)
        self._owner = os.getpid()
        self._replicas = replicas_of(self.endpoint)
        self._line: StoreConnection | None = None
        self._connect(Search(self._replicas).target)
        self._client = uuid.uuid4().hex
        self._number = 0
        self._welcome = False
        """Whether the coordinator has ever carried out an operation."""
        self._turn = threading.Lock()
        """Held by the thread that sends a change: the coordinator remembers one for each client."""
        _alive.append(self)

    # ------------------------------------------------------------------ reading and waiting

    def get(self, key: str) -> bytes:
        """Wait for a key, and read it.

        Raises:
            StoreTimeoutError: it was not there within the store's timeout.
            ConnectError: the coordinator could not be reached.
            RefusedError: the coordinator refused.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys, and read them.

        Returns:
            The values, in the order of the keys.

        Raises:
            StoreTimeoutError: not all were there within the store's timeout.
            ConnectError: the coordinator could not be reached.
            RefusedError: the coordinator refused.
        """
        request = pb.StoreServiceGetRequest(run_id=self.run_id, keys=map(_key, keys))
        return list(self._send(request, pb.StoreServiceGetResponse, self._timeout()).values)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Args:
            keys: the keys.
            timeout: how long; 0 is for ever. Default: the store's.

        Raises:
            StoreTimeoutError: not all were there in time.
            ConnectError: the coordinator could not be reached.
            RefusedError: the coordinator refused.
        """
        request = pb.WaitRequest(run_id=self.run_id, keys=map(_key, keys))
        self._send(request, pb.WaitResponse, self._timeout() if timeout is None else _seconds(timeout))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there now."""
        request = pb.CheckRequest(run_id=self.run_id, keys=map(_key, keys))
        return self._send(request, pb.CheckResponse, self._timeout()).present

    def list_keys(self) -> list[str]:
        """All keys of the run, in ascending order."""
        request = pb.ListKeysRequest(run_id=self.run_id)
        return list(self._send(request, pb.ListKeysResponse, self._timeout()).keys)

    def num_keys(self) -> int:
        """How many keys the run has."""
        request = pb.NumKeysRequest(run_id=self.run_id)
        return self._send(request, pb.NumKeysResponse, self._timeout()).count

    # ------------------------------------------------------------------ changing

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key.

        Raises:
            ConnectError: the coordinator could not be reached; the key may be written or not.
            RefusedError: the coordinator refused, for example since the value is too large.
        """
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several keys, all or none.

        Raises:
            ConnectError: the coordinator could not be reached; the keys may be written or not.
            RefusedError: the coordinator refused, for example since a value is too large.
            ValueError: there are not as many values as keys.
        """
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys and {len(values)} values: each key needs a value.")
        entries = [
            pb.KeyValue(key=_key(key), value=_bytes(value)) for key, value in zip(keys, values, strict=True)
        ]
        self._change(pb.SetRequest(run_id=self.run_id, entries=entries), pb.SetResponse)

    def add(self, key: str, value: int) -> int:
        """Add to a number, which is 0 while the key is not there.

        Returns:
            The sum.

        Raises:
            ConnectError: the coordinator could not be reached; it may be added or not.
            RefusedError: the coordinator refused, for example since the key holds no number.
            ValueError: the value has more than 64 bits.
        """
        request = pb.AddRequest(run_id=self.run_id, key=_key(key), amount=value)
        return self._change(request, pb.AddResponse).value

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write a key if it has the expected value; an empty one also stands for a key that is not there.

        Returns:
            The desired value if it was written; else the present one, or the expected one if there is no key.

        Raises:
            ConnectError: the coordinator could not be reached; the key may be written or not.
            RefusedError: the coordinator refused, for example since the value is too large.
        """
        request = pb.CompareSetRequest(
            run_id=self.run_id,
            key=_key(key),
            expected=_bytes(expected_value),
            desired=_bytes(desired_value),
        )
        return self._change(request, pb.CompareSetResponse).value

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value, which is empty while the key is not there.

        Raises:
            ConnectError: the coordinator could not be reached; it may be appended or not.
            RefusedError: the coordinator refused, for example since the value is too large.
        """
        request = pb.AppendRequest(run_id=self.run_id, key=_key(key), value=_bytes(value))
        self._change(request, pb.AppendResponse)

    def delete_key(self, key: str) -> bool:
        """Remove a key.

        Returns:
            Whether it was there.

        Raises:
            ConnectError: the coordinator could not be reached; the key may be removed or not.
            RefusedError: the coordinator refused.
        """
        request = pb.DeleteRequest(run_id=self.run_id, key=_key(key))
        return self._change(request, pb.DeleteResponse).existed

    def delete_prefix(self, prefix: str) -> int:
        """Remove every key that begins so.

        Args:
            prefix: must not be empty.

        Returns:
            How many keys there were.

        Raises:
            ConnectError: the coordinator could not be reached; the keys may be removed or not.
            RefusedError: the coordinator refused.
        """
        request = pb.DeletePrefixRequest(run_id=self.run_id, prefix=_key(prefix))
        return self._send(request, pb.DeletePrefixResponse, self._timeout()).count

    # ------------------------------------------------------------------ ending

    def close(self) -> None:
        """Give the connection up, so that a child that is forked from now on may have its own.

        The keys stay; the next operation connects again. Waits for nothing, so a finalizer may call it.
        """
        if os.getpid() == self._owner:
            self._line = None

    # ------------------------------------------------------------------ for torch

    def has_extended_api(self) -> bool:
        """Whether there are ``append``, ``multi_get`` and ``multi_set``: yes."""
        return True

    def clone(self) -> "CoordinatorStore":
        """A store of the same keys that may change them at the same time as this one."""
        clone = CoordinatorStore(self.endpoint, self.run_id, timedelta(seconds=self._timeout()))
        clone._welcome = self._welcome
        return clone

    # Called from C++, torch looks some methods up under their C++ names.
    deleteKey = delete_key  # noqa: N815
    """:meth:`delete_key`, as C++ calls it."""
    getNumKeys = num_keys  # noqa: N815
    """:meth:`num_keys`, as C++ calls it."""
    listKeys = list_keys  # noqa: N815
    """:meth:`list_keys`, as C++ calls it."""

    # ------------------------------------------------------------------ sending

    def _timeout(self) -> float:
        return _seconds(self.timeout)

    def _change(self, request: Change, kind: type[Response]) -> Response:
        # Before the lock: in a forked child it may be held for ever, by a thread that only the parent has.
        self._check_owner()
        with self._turn:
            self._number += 1
            request.operation.CopyFrom(pb.OperationId(client=self._client, number=self._number))
            return self._send(request, kind, self._timeout())

    def _send(self, request: Message, kind: type[Response], timeout: float) -> Response:
        """Send a request, and again while no coordinator answers, until the timeout is over."""
        self._check_owner()
        deadline = time.monotonic() + (timeout or float("inf"))
        outage, patience = OutageLog(self.endpoint), TokenPatience(self.endpoint, time.monotonic)
        search = Search(self._replicas)
        left = timeout
        while True:
            if timeout and isinstance(request, Waiting):
                request.timeout_ms = max(1, round(left * 1000))
            try:
                line = self._connect(search.begin())
                # A stream is for operations of the usual time; what is sent again may have less.
                send = line.ask if left == self._timeout() else line.call
                response = send(request, left + ANSWER_GRACE if timeout else None, search.metadata)
                self._welcome = True
                search.answered()
                assert isinstance(response, kind)
                return response
            except grpc.RpcError as error:
                if not self._passes(error, patience):
                    raise self._refused(error, request) from None
                pause = search_on(search, error)
            except EnvironmentValueError as error:
                if not self._welcome:
                    raise
                # Files that are being replaced may be unusable for a moment.
                pause = search.denied(str(error))
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._unreachable(timeout, search.said)
            outage.failed(search.said)
            with suppress(EnvironmentValueError):  # The next attempt meets it again, if it lasts.
                self._connect(search.target, renew=True)
            pause = min(left, pause)
            time.sleep(pause)
            left -= pause

    def _connect(self, target: Target, *, renew: bool = False) -> StoreConnection:
        line = self._line
        if line is None or renew or line.target != target:
            channel = shared_channel(target, renew=renew)
            if line is None or line.channel is not channel:
                line = self._line = StoreConnection(target, channel)
        return line

    def _passes(self, error: grpc.RpcError, patience: TokenPatience) -> bool:
        """Whether to send an operation again that has failed."""
        reason = reason_of(error)
        if error.code() in NO_ANSWER:
            return not reason or reason in ELSEWHERE
        return self._welcome and patience.lasts(reason)

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise forked("this store", self._owner)

    def _refused(self, error: grpc.RpcError, request: Message) -> MusterError:
        reason, sentence = reason_of(error), str(error.details())
        if reason == "STORE_TIMED_OUT" and isinstance(request, Waiting):
            return StoreTimeoutError(sentence, request.keys)
        if reason:
            return RefusedError(sentence, reason)
        return RefusedError(
            f"the coordinator at {self.endpoint} did not carry out an operation on the store of run "
            f"{self.run_id}: {explain(error)}. Check that it is a Muster coordinator of this version, and "
            "that the values of one call fit into a message."
        )

    def _unreachable(self, timeout: float, why: str) -> ConnectError:
        return ConnectError(
            f"the coordinator at {self.endpoint} did not answer an operation on the store of run "
            f"{self.run_id} within the timeout of {timeout:g} s; last error: {why}. A change may have "
            "been carried out or not. Check the address (MUSTER_ENDPOINT) and that it runs: muster get runs."
        )


def _key(key: str) -> str:
    return environment.text("key", key)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _seconds(timeout: timedelta) -> float:
    seconds = timeout.total_seconds()
    if seconds < 0:
        raise ValueError(f"timeout = {seconds:g} s: it must not be negative; 0 is for ever.")
    return seconds
