"""Which guest's processes speak on which line. A relay decides nothing else, and remembers nothing."""

from collections.abc import Callable, Sequence

from muster.relay.guest import Guest, Sink
from muster.relay.line import Line
from muster.v1 import session_pb2 as pb

Open = Callable[[str, int, Callable[[Line], None]], Line]
"""Makes a line for a run's generation, and begins to connect it; the function is called when it is over."""


class Relay:
    """All lines, and all who speak on them.

    A line speaks for each rank once. Who speaks for a rank that somebody else speaks for, as the process
    does that writes a trainer's checkpoint, takes the next line: so a node has as many streams as its ranks
    have processes.

    Args:
        open_line: makes a line.
        addresses: of the coordinators, for those whose relay dies.
        version: of this relay, for people.
    """

    def __init__(self, open_line: Open, addresses: Callable[[], Sequence[str]], version: str) -> None:
        self.version = version
        self._open_line = open_line
        self._addresses = addresses
        self._lines: dict[tuple[str, int], list[Line]] = {}

    def guest(self, sink: Sink, check_run: Callable[[str], None]) -> Guest:
        """Take a stream from below in; see :class:`Guest`."""
        return Guest(self, sink, check_run)

    def addresses(self) -> Sequence[str]:
        """Of the coordinators."""
        return self._addresses()

    def seat(self, run_id: str, generation: int, process: pb.Process) -> Line:
        """The line on which a process is to speak: its own, if it comes back, or the first that has room."""
        lines = self._lines.get((run_id, generation), [])
        own = next((line for line in lines if line.seats(process)), None)
        free = own or next((line for line in lines if line.has_room(process.rank)), None)
        return free or self._another(run_id, generation)

    def line_of(self, run_id: str, generation: int) -> Line:
        """Any line of a run's generation."""
        lines = self._lines.get((run_id, generation))
        return lines[0] if lines else self._another(run_id, generation)

    def _another(self, run_id: str, generation: int) -> Line:
        line = self._open_line(run_id, generation, self._over)
        self._lines.setdefault((run_id, generation), []).append(line)
        return line

    def _over(self, line: Line) -> None:
        key = line.run_id, line.generation
        self._lines[key].remove(line)
        if not self._lines[key]:
            del self._lines[key]
