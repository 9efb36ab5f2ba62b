"""A stream to the coordinator that one thread opens again whenever it breaks.

The user of the stream says what to send on each one, and what follows from each message. The address search,
the pauses, the log of an outage and the limit for the first answer are the same for all users.
"""

import enum
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import grpc

from muster.client.calls import search_on
from muster.client.credentials import TokenPatience
from muster.client.errors import EnvironmentValueError
from muster.client.protocol import TTL_PINGS
from muster.client.replicas import KEEPALIVE_MS, Search, replicas_of
from muster.worker.transport.channel import open_channel
from muster.worker.transport.first_answer import first_answer_expected
from muster.worker.transport.fork_guard import start_thread
from muster.worker.transport.outage_log import OutageLog

logger = logging.getLogger(__name__)

Response = TypeVar("Response", contravariant=True)


class StreamSignal(enum.Enum):
    """What a message says about the stream on which it came."""

    NONE = enum.auto()
    """Nothing."""
    ANSWERED = enum.auto()
    """The peer leads, or is a relay."""
    REPLACE = enum.auto()
    """The peer leads, and another stream is to replace this one immediately."""
    DRAINING = enum.auto()
    """The peer stops: another stream is to be opened, to another address if there are several."""


class StreamUser(Protocol[Response]):
    """What a :class:`ReconnectingStream` asks of its user, from the stream's thread alone."""

    @property
    def done(self) -> bool:
        """Whether no other stream is to be opened. The stream reads it without the lock, too."""

    def open(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> Any:  # noqa: ANN401
        """Start the call, which yields the messages."""

    def handle(self, response: Response) -> StreamSignal:
        """Handle a message. Call :meth:`ReconnectingStream.admit` when the coordinator admits this process.

        Ignore the message if the stream is no longer :attr:`~ReconnectingStream.open`.
        """

    def call_ended(self, error: grpc.RpcError | None) -> None:
        """Handle the end of a call; None: the coordinator ended it without an error."""

    def lost(self) -> None:
        """Handle, under the lock, that there is no stream until the next :meth:`open`."""

    def finished(self) -> None:
        """Handle that the thread ends."""


class ReconnectingStream:
    """The streams of one user, one after the other.

    Args:
        user: sends and receives the messages.
        endpoint: the coordinator's addresses.
        usage: names in errors what this process uses gRPC for.
        changed: the user's lock. Its waiters are notified when contact is lost.
    """

    def __init__(
        self, user: StreamUser[Any], endpoint: str, usage: str, changed: threading.Condition
    ) -> None:
        self._user = user
        self._endpoint = endpoint
        self._usage = usage
        self._changed = changed
        self._replicas = replicas_of(endpoint)
        self._outage = OutageLog(endpoint)
        self._restarted = False
        """Whether another stream is to be opened without a pause."""
        self._last = False
        """Whether the next attempt is the last one."""
        self._running = False
        self._keepalive_ms = KEEPALIVE_MS
        """The fastest that was ever asked for."""
        self.search = Search(self._replicas)
        self.patience = TokenPatience(endpoint)
        self.thread: threading.Thread | None = None
        self.call: grpc.Call | None = None
        self.connected = False
        """Whether the coordinator has admitted this process on the present stream."""
        self._lost_at = time.monotonic()

    # ------------------------------------------------------------------ what the user calls, under the lock

    def start(self, name: str) -> None:
        """Open a stream from a thread with this name; if the thread runs already, replace its stream.

        The address search and the limit for lost contact begin from scratch.

        Raises:
            MusterError: this process was forked from one that uses gRPC.
        """
        self.connected = False
        self._lost_at = time.monotonic()
        self.interrupt()
        if not self._running:
            self._running = True
            try:
                self.thread = start_thread(self._usage, name, self._run)
            except BaseException:
                self._running = False
                raise

    def interrupt(self) -> None:
        """Cancel the present stream, and end the pause before the next one.

        A finalizer may call it without the lock; then a pause ends at its own time.
        """
        self._restarted = True
        call, self.call = self.call, None
        if call is not None:
            call.cancel()

    def finish(self) -> None:
        """Let the present stream, or else the next one, be the last."""
        self._last = True
        self._changed.notify_all()

    def admit(self) -> None:
        """Note that the coordinator has admitted this process."""
        self.connected = True
        self._outage.over()
        self.patience.renew()

    def learn(self, addresses: Iterable[str], keepalive_ms: int, session_ttl_ms: int = 0) -> StreamSignal:
        """Note the coordinator's addresses, and the keepalive that it asks for.

        Args:
            addresses: all that it knows.
            keepalive_ms: 0: it asks for none.
            session_ttl_ms: bounds the keepalive if it asks for none.

        Returns:
            Whether to replace the present stream: with a slower keepalive it would notice its loss too late.
        """
        self._replicas.learn(addresses, keepalive_ms)
        limit = keepalive_ms or session_ttl_ms // TTL_PINGS or KEEPALIVE_MS
        fastest = min(limit, self.search.target.keepalive_ms)
        if fastest >= self._keepalive_ms:
            return StreamSignal.ANSWERED
        self._keepalive_ms = fastest
        return StreamSignal.REPLACE

    def rest(self, seconds: float) -> None:
        """Wait on the stream's thread, until the stream is interrupted or finishes."""
        self._changed.wait_for(lambda: self._restarted or self._last, seconds)

    @property
    def open(self) -> bool:
        """Whether the present stream was not interrupted."""
        return self.call is not None

    def seconds_left(self, limit: float, since: float = 0.0) -> float | None:
        """Return how long contact may stay lost; None while there is contact.

        Args:
            limit: seconds that contact may be lost.
            since: monotonic time before which no loss counts.
        """
        if self.connected:
            return None
        return max(since, self._lost_at) + limit - time.monotonic()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while self._attempt():
            pass
        self._user.finished()

    def _attempt(self) -> bool:
        """Open a stream, read it to its end, and pause. Returns whether to open another."""
        with self._changed:
            last = self._last
            if self._restarted:
                self._restarted = False
                self.search = Search(self._replicas)
        try:
            pause = self._converse(self.search)
        except EnvironmentValueError as error:
            # Files that are being replaced may be unusable for a moment.
            pause = self.search.denied(str(error))
        except Exception as error:
            logger.exception("the stream to %s broke", self._endpoint)
            pause = self.search.again(f"{type(error).__name__}: {error}")
        with self._changed:
            self.call = None
            self._user.lost()
            if self.connected or pause is not None:
                self._lost(self.search.said)
            # The last attempt asks each address that may lead: no pause means that there is another one.
            ends = last and bool(pause)
            if not (ends or self._user.done):
                self.rest(pause or 0.0)
            self._running = not (ends or self._user.done)
            return self._running

    def _converse(self, search: Search) -> float | None:
        """Open a stream and read it to its end.

        Returns:
            Seconds to wait before another one; None: nothing has failed.
        """
        target = search.begin()
        self._keepalive_ms = min(target.keepalive_ms, self._keepalive_ms)
        with open_channel(replace(target, keepalive_ms=self._keepalive_ms)) as channel:
            call = self._user.open(channel, search.metadata)
            try:
                self.call = call
                # Checked after the call is visible: an interrupt sees the call, or is seen here.
                if self._restarted or self._user.done:
                    return None
                with first_answer_expected(call) as answered:
                    for response in call:
                        signal = self._user.handle(response)
                        if signal is StreamSignal.DRAINING:
                            if search.replicas.several:
                                return search.left("the coordinator is stopping")
                            return search.again("the coordinator ended the stream")
                        if signal is not StreamSignal.NONE:
                            answered()
                            search.answered()
                        if signal is StreamSignal.REPLACE:
                            return None
                self._user.call_ended(None)
                return search.ended("the coordinator ended the stream")
            except grpc.RpcError as error:
                # It is the call, which its own traceback would keep alive until the interpreter ends.
                error.with_traceback(None)
                if self._restarted:
                    return None
                self._user.call_ended(error)
                return search_on(search, error)
            finally:
                call.cancel()

    def _lost(self, why: str) -> None:
        done = self._user.done
        if self.connected:
            self.connected = False
            self._lost_at = time.monotonic()
            if not (done or self._last):
                logger.warning("lost the coordinator at %s (%s); connecting again", self._endpoint, why)
        if not done:
            self._outage.failed(why)
        self._changed.notify_all()
