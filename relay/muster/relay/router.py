"""Chooses the upstream stream for each process. A relay decides nothing else, and remembers nothing."""

from collections.abc import Callable, Sequence

from muster.relay.upstream_stream import UpstreamStream
from muster.v1 import session_pb2 as pb

OpenStream = Callable[[str, int, Callable[[UpstreamStream], None]], UpstreamStream]
"""Opens a stream for a generation of a run, and calls the function when the stream accepts no more
processes."""


class StreamRouter:
    """All upstream streams of a relay, by run and generation.

    A stream speaks for each rank once. If a rank has a second process, such as one that writes its
    checkpoint, that process takes the next stream. So a node has as many streams as its ranks have processes.

    Args:
        open_stream: opens a stream.
        addresses: returns the coordinators' addresses; workers call them directly if the relay dies.
        version: the version of this relay, for people.
    """

    def __init__(self, open_stream: OpenStream, addresses: Callable[[], Sequence[str]], version: str) -> None:
        self.version = version
        self.addresses = addresses
        self._open_stream = open_stream
        self._streams: dict[tuple[str, int], list[UpstreamStream]] = {}

    def stream_for(self, run_id: str, generation: int, process: pb.Process) -> UpstreamStream:
        """Return the stream for a process: its own if it reconnects, or the first with a free slot."""
        streams = self._streams.get((run_id, generation), [])
        own = next((stream for stream in streams if stream.has_process(process)), None)
        free = own or next((stream for stream in streams if stream.is_free(process.rank)), None)
        return free or self._open(run_id, generation)

    def any_stream(self, run_id: str, generation: int) -> UpstreamStream:
        """Return any stream of a generation."""
        streams = self._streams.get((run_id, generation))
        return streams[0] if streams else self._open(run_id, generation)

    def _open(self, run_id: str, generation: int) -> UpstreamStream:
        stream = self._open_stream(run_id, generation, self._closed)
        self._streams.setdefault((run_id, generation), []).append(stream)
        return stream

    def _closed(self, stream: UpstreamStream) -> None:
        key = stream.run_id, stream.generation
        self._streams[key].remove(stream)
        if not self._streams[key]:
            del self._streams[key]
