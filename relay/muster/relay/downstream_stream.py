"""The stream of a worker, or of another relay.

To a worker, it looks like the coordinator's: one Hello, then a Welcome. Another relay adds and removes
processes one by one. Each process speaks on an upstream stream of its run. Pure, as the upstream stream is.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from muster.client.protocol import MAX_ENTRIES, MESSAGE_HEADROOM, PROTOCOL_VERSION
from muster.relay import refusals
from muster.relay.router import StreamRouter
from muster.relay.upstream_stream import UpstreamStream
from muster.v1 import session_pb2 as pb

MAX_EARLY_BYTES = 4 << 20
"""Bytes that a stream may send before its Welcome: the relay keeps them in memory."""
MAX_NAME = 1024
"""Characters of an incarnation, a host or a node's name; the coordinator accepts a quarter of it."""
MAX_REASON = 65_536
"""Characters of a goodbye's reason."""


class Sink(Protocol):
    """Takes the messages to a downstream stream."""

    def send(self, data: bytes, own: bytes = b"") -> None:
        """Send one message; must not block.

        Args:
            data: the part that other streams may share.
            own: the part that follows on this stream alone.
        """
        ...

    def end(self, refusal: pb.Refusal | None) -> None:
        """End the stream after all messages; with the status of the refusal, if there is one."""
        ...


@dataclass(slots=True)
class _PendingRequest:
    """A request whose answer is not complete; answers keep the order of the requests."""

    answer: Callable[[], None]
    missing: int
    """Parts of the answer that are still to come."""


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    """The upstream stream of a process, and what the coordinator answered for it."""

    upstream: UpstreamStream
    entry: pb.Entry


class DownstreamStream:
    """One stream of a worker or of another relay.

    Args:
        router: finds upstream streams.
        sink: takes the messages.
        check_run: raises ``Refused`` for a run that the stream has no access to.
    """

    def __init__(self, router: StreamRouter, sink: Sink, check_run: Callable[[str], None]) -> None:
        self._router = router
        self._sink = sink
        self._check_run = check_run
        self._hello: pb.Hello | None = None
        self._welcome_stream: UpstreamStream | None = None
        """The upstream stream whose Welcome another relay gets."""
        self._routes: dict[int, _Route] = {}
        """By rank, of its newest process."""
        self._pending_requests: deque[_PendingRequest] = deque()
        self._ended = False
        self._early_bytes = 0
        """Bytes that it sent before its Welcome."""
        self._welcomed = False
        self._max_message_bytes = MAX_EARLY_BYTES
        """After the Welcome: what the coordinator accepts from one rank."""

    @property
    def is_relay(self) -> bool:
        """Whether it is the stream of another relay."""
        return self._hello is not None and bool(self._hello.relay)

    @property
    def upstreams(self) -> set[UpstreamStream]:
        """The upstream streams that it uses."""
        welcome_streams = {self._welcome_stream} if self._welcome_stream is not None else set()
        return welcome_streams | {route.upstream for route in self._routes.values()}

    # ------------------------------------------------------------------ from below

    def receive(self, data: bytes) -> None:
        """Handle a message of the stream.

        Raises:
            Refused: the stream must end with this refusal.
        """
        if self._ended:
            return
        if len(data) > self._max_message_bytes:
            raise refusals.too_large(len(data), self._max_message_bytes)
        if not self._welcomed:
            self._early_bytes += len(data)
            if self._early_bytes > MAX_EARLY_BYTES:
                raise refusals.invalid(
                    "message", f"{self._early_bytes:,} bytes", "wait for the Welcome before so many"
                )
        try:
            request = pb.ConnectRequest.FromString(data)
        except DecodeError as error:
            raise refusals.not_a_message(data, error) from None
        kind = request.WhichOneof("message")
        if kind == "arrive":
            self._arrive(request.arrive)
        elif kind == "join_group":
            self._join(request.join_group)
        elif kind == "hello":
            self._handle_hello(request.hello)
        elif kind == "add_processes":
            self._add_processes(request.add_processes)
        elif kind == "remove_processes":
            self._remove_processes(request.remove_processes)
        elif kind == "goodbye":
            self._goodbye(request.goodbye)
        elif kind == "inspected":
            self._inspected(request)
        elif kind == "steps":
            self._steps(request.steps)
        else:
            raise refusals.not_a_message(data, "it has no message, or one of a newer version")

    def connection_lost(self) -> None:
        """Release its processes, unless the stream has already ended."""
        if not self._ended:
            self._disconnect()

    def _handle_hello(self, hello: pb.Hello) -> None:
        if self._hello is not None:
            raise refusals.hello_repeated()
        if hello.protocol_version != PROTOCOL_VERSION:
            raise refusals.other_protocol(hello.protocol_version, self._router.version, PROTOCOL_VERSION)
        self._check_run(hello.run_id)
        if hello.relay and hello.processes:
            raise refusals.invalid(
                "processes",
                f"{len(hello.processes)} of them",
                "a relay's Hello names none; AddProcesses names them",
            )
        _check_processes(hello.processes)
        if not hello.relay:
            _check_ranks(hello.processes)
        self._hello = hello
        if hello.relay:
            self._welcome_stream = self._router.any_stream(hello.run_id, hello.generation)
            self._welcome_stream.await_welcome(self, self._send_welcome)
        else:
            self._add(hello.processes, self._answer_hello)

    def _add_processes(self, request: pb.AddProcesses) -> None:
        self._check_relay("AddProcesses")
        _check_processes(request.processes)
        self._add(request.processes, self._answer_added)

    def _add(self, processes: Sequence[pb.Process], answer: Callable[[list[pb.Entry]], None]) -> None:
        """Add each process to an upstream stream, and answer when the coordinator has answered for all."""
        assert self._hello is not None
        entries = [pb.Entry() for _ in processes]
        pending = _PendingRequest(lambda: answer(entries), len(entries))
        self._pending_requests.append(pending)
        for process, entry in zip(processes, entries, strict=True):

            def on_entry(given: pb.Entry, rank: int = process.rank, entry: pb.Entry = entry) -> None:
                entry.CopyFrom(given)
                pending.missing -= 1
                route = self._routes.get(rank)
                if not given.ordinal and route is not None and route.entry is entry:
                    del self._routes[rank]
                self._send_complete_answers()

            upstream = self._router.stream_for(self._hello.run_id, self._hello.generation, process)
            previous = self._routes.get(process.rank)
            if previous is not None and previous.upstream is not upstream:
                previous.upstream.remove_processes(self, [process.rank], None)
            self._routes[process.rank] = _Route(upstream, entry)
            upstream.add_process(self, process, on_entry)
        self._send_complete_answers()

    def _join(self, group: pb.JoinGroup) -> None:
        self._check_hello("JoinGroup")
        _check_prefix(group.prefix)
        _check_length("participants", group.participants)
        _check_length("ranks", group.ranks)
        for upstream, ranks in self._by_upstream(group.ranks or list(self._routes), group.prefix).items():
            upstream.join(ranks, group)

    def _arrive(self, arrive: pb.Arrive) -> None:
        self._check_hello("Arrive")
        _check_prefix(arrive.prefix)
        arrivals = arrive.arrivals
        _check_length("arrivals", arrivals)
        if len({one.rank for one in arrivals}) < len(arrivals):
            raise refusals.invalid("arrivals", f"{len(arrivals):,} ranks", "a rank may be named only once")
        upstreams = self._by_upstream([one.rank for one in arrivals], arrive.prefix, arrive.sequence)
        for upstream, ranks in upstreams.items():
            all_of_them = len(ranks) == len(arrivals)
            upstream.arrive(
                arrive, arrivals if all_of_them else [one for one in arrivals if one.rank in ranks]
            )

    def _inspected(self, answer: pb.ConnectRequest) -> None:
        self._check_hello("Inspected")
        # If the rank has left this stream, its newer process answers for it.
        if (route := self._routes.get(answer.inspected.rank)) is not None:
            route.upstream.send_inspected(answer)

    def _steps(self, steps: pb.Steps) -> None:
        self._check_hello("Steps")
        _check_length("steps", steps.steps)
        for one in steps.steps:
            if (route := self._routes.get(one.rank)) is not None:
                route.upstream.report_step(one)

    def _by_upstream(
        self, ranks: Iterable[int], prefix: str, sequence: int | None = None
    ) -> dict[UpstreamStream, list[int]]:
        """Group ranks by upstream stream; refuse those that do not belong to this stream."""
        by_upstream: dict[UpstreamStream, list[int]] = {}
        for rank in ranks:
            route = self._routes.get(rank)
            if route is not None:
                by_upstream.setdefault(route.upstream, []).append(rank)
            else:
                self._send(pb.ConnectResponse(refusal=refusals.not_in_session(rank, prefix, sequence)))
        return by_upstream

    def _remove_processes(self, request: pb.RemoveProcesses) -> None:
        self._check_relay("RemoveProcesses")
        _check_length("ranks", request.ranks)
        removed = pb.ConnectResponse(processes_removed=pb.ProcessesRemoved(ranks=request.ranks))
        goodbye = request.goodbye if request.HasField("goodbye") else None
        _check_reason(request.goodbye)
        self._remove(list(request.ranks), goodbye, lambda: self._send(removed))

    def _goodbye(self, goodbye: pb.Goodbye) -> None:
        self._check_hello("Goodbye")
        _check_reason(goodbye)
        self._remove(list(self._routes), goodbye, self._end_after_goodbye)

    def _remove(self, ranks: list[int], goodbye: pb.Goodbye | None, answer: Callable[[], None]) -> None:
        """Remove ranks, and answer when the coordinator has answered for all."""
        by_upstream = self._take_routes(ranks)
        pending = _PendingRequest(answer, len(by_upstream))
        self._pending_requests.append(pending)

        def on_removed() -> None:
            pending.missing -= 1
            self._send_complete_answers()

        for upstream, removed in by_upstream.items():
            upstream.remove_processes(self, removed, goodbye, on_removed)
        self._send_complete_answers()

    def _disconnect(self) -> None:
        """Send and receive nothing more; to the upstream streams, all processes are lost."""
        self._ended = True
        for upstream, ranks in self._take_routes(list(self._routes)).items():
            upstream.remove_processes(self, ranks, None)
        if self._welcome_stream is not None:
            self._welcome_stream.stop_waiting(self)

    def _take_routes(self, ranks: Iterable[int]) -> dict[UpstreamStream, list[int]]:
        by_upstream: dict[UpstreamStream, list[int]] = {}
        for rank in ranks:
            route = self._routes.pop(rank, None)
            if route is not None:
                by_upstream.setdefault(route.upstream, []).append(rank)
        return by_upstream

    def _check_hello(self, what: str) -> None:
        if self._hello is None:
            raise refusals.hello_required(f"the first message of this session was not a Hello: {what}")

    def _check_relay(self, what: str) -> None:
        self._check_hello(what)
        if not self.is_relay:
            raise refusals.invalid(
                "message", what, "only a relay's stream says it; name your processes in the Hello"
            )

    # ------------------------------------------------------------------ from above

    def deliver(self, data: bytes, own: bytes = b"") -> None:
        """See ``upstream_stream.Downstream``."""
        if not self._ended:
            self._sink.send(data, own)

    def remove_rank(self, rank: int, refusal: pb.Refusal) -> None:
        """End the session of one rank. The stream of a worker without other ranks ends as well."""
        if self._routes.pop(rank, None) is None or self._ended:
            return
        answer = pb.Refusal()
        answer.CopyFrom(refusal)
        if self.is_relay or self._routes:
            answer.rank = rank
            self._send(pb.ConnectResponse(refusal=answer))
        else:
            answer.ClearField("rank")
            self.end(answer, announce=True)

    def end(self, refusal: pb.Refusal, *, announce: bool = False) -> None:
        """End the stream: its upstream stream was lost, or the coordinator ended what it is about.

        Args:
            refusal: why.
            announce: also send the refusal as a message, because it is the coordinator's.
        """
        if self._ended:
            return
        if announce:
            self._send(pb.ConnectResponse(refusal=refusal))
        self._disconnect()
        self._sink.end(refusal)

    def _end_after_goodbye(self) -> None:
        if not self._ended:
            self._disconnect()
            self._sink.end(None)

    # ------------------------------------------------------------------ answers

    def _send_complete_answers(self) -> None:
        """Send the answers that are complete, in the order of the requests."""
        while self._pending_requests and not self._pending_requests[0].missing:
            self._pending_requests.popleft().answer()

    def _answer_hello(self, entries: list[pb.Entry]) -> None:
        refused = next((entry for entry in entries if not entry.ordinal), None)
        if refused is not None:
            refusal = pb.Refusal()
            refusal.CopyFrom(refused.refusal)
            refusal.ClearField("rank")
            self.end(refusal, announce=True)
            return
        welcome = next(iter(self._routes.values())).upstream.welcome if self._routes else None
        if welcome is not None:
            self._send_welcome(welcome, [entry.ordinal for entry in entries])

    def _answer_added(self, entries: list[pb.Entry]) -> None:
        self._send(pb.ConnectResponse(processes_added=pb.ProcessesAdded(entries=entries)))

    def _send_welcome(self, given: pb.Welcome, ordinals: Sequence[int] = ()) -> None:
        self._welcomed, self._early_bytes = True, 0
        self._max_message_bytes = given.max_payload_bytes + MESSAGE_HEADROOM
        welcome = pb.Welcome()
        welcome.CopyFrom(given)
        welcome.ordinals[:] = ordinals
        if not welcome.replicas:
            welcome.replicas.extend(self._router.addresses())
        self._send(pb.ConnectResponse(welcome=welcome))

    def _send(self, response: pb.ConnectResponse) -> None:
        if not self._ended:
            self._sink.send(response.SerializeToString())


def _check_processes(processes: Sequence[pb.Process]) -> None:
    """Refuse processes that, with others, would make a message too large for the coordinator."""
    _check_length("processes", processes)
    for process in processes:
        for name, value in (
            ("incarnation", process.incarnation),
            ("host", process.host),
            ("node_name", process.node_name),
        ):
            if len(value) > MAX_NAME:
                raise refusals.invalid(name, f"{len(value):,} letters", f"it may have {MAX_NAME:,}")


def _check_reason(goodbye: pb.Goodbye) -> None:
    if len(goodbye.reason) > MAX_REASON:
        raise refusals.invalid("reason", f"{len(goodbye.reason):,} letters", f"it may have {MAX_REASON:,}")


def _check_prefix(prefix: str) -> None:
    """Refuse an empty prefix here: the coordinator's refusal would name no rank, and end all streams."""
    if not prefix:
        raise refusals.invalid("prefix", '""', "it must not be empty")


def _check_length(field: str, values: Sequence[object]) -> None:
    """Refuse a field that is too long here: the coordinator would end the stream of all."""
    if len(values) > MAX_ENTRIES:
        raise refusals.invalid(field, f"{len(values):,} entries", f"a message may have {MAX_ENTRIES:,}")


def _check_ranks(processes: Sequence[pb.Process]) -> None:
    if not processes:
        raise refusals.invalid("processes", "empty", "a Hello names at least one process")
    if len({process.rank for process in processes}) < len(processes):
        ranks = ", ".join(str(process.rank) for process in processes[:20])
        raise refusals.invalid("processes", ranks, "a rank may be named only once")
