"""What a relay has done so far, for metrics and for its own page."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Counters, which only rise, and gauges."""

    arrivals: int = 0
    """Of ranks, that were handed on."""
    messages: int = 0
    """In which they were."""
    reconnects: int = 0
    """How often a stream to the coordinator was lost."""
    workers: int = 0
    """Streams from below that are open now."""
    processes: int = 0
    """For how many processes the relay speaks now."""
    lines: int = 0
    """Streams to the coordinator that are open now."""
    calls: int = 0
    """Calls that were passed on."""
    connected: bool = False
    """Whether the coordinator has answered when it was asked last."""
    cut_offs: int = 0
    """How often somebody wanted the coordinator, and it was not reached in time."""

    def folded(self, arrivals: int) -> None:
        """Arrivals of so many ranks were handed on in one message."""
        self.arrivals += arrivals
        self.messages += 1

    def cut_off(self) -> None:
        """Somebody wanted the coordinator, and it was not reached in time."""
        self.connected = False
        self.cut_offs += 1
