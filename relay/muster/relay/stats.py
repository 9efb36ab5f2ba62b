"""What a relay has done so far, for its metrics."""

from dataclasses import dataclass


@dataclass(slots=True)
class RelayStats:
    """Counters, which only rise, and gauges."""

    arrivals: int = 0
    """Arrivals of ranks that were forwarded."""
    messages: int = 0
    """Messages in which they were forwarded."""
    reconnects: int = 0
    """Streams to the coordinator that were lost."""
    workers: int = 0
    """Streams of workers, or of other relays, that are open now."""
    processes: int = 0
    """Processes that the relay speaks for now."""
    upstream_streams: int = 0
    """Streams to the coordinator that are open now."""
    calls: int = 0
    """Calls that were forwarded."""
    connected: bool = False
    """Whether the coordinator answered the latest request."""
    cut_offs: int = 0
    """How often a caller needed the coordinator, and the relay did not reach it in time."""

    def folded(self, arrivals: int) -> None:
        """Count one message with the arrivals of so many ranks."""
        self.arrivals += arrivals
        self.messages += 1

    def cut_off(self) -> None:
        """Count a failure to reach the coordinator in time for a caller."""
        self.connected = False
        self.cut_offs += 1
