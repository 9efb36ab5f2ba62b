"""A finished span, and what sends spans: no OpenTelemetry is needed to make one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

Attribute: TypeAlias = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """A finished span."""

    trace: int
    span: int
    parent: int | None
    name: str
    start: float
    """Seconds since 1970."""
    end: float
    """Seconds since 1970."""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    events: tuple[tuple[str, float], ...] = ()
    """Names and times of moments within it, in seconds since 1970."""
    failure: str = ""
    """Why it failed; empty if it succeeded."""


class Exporter(Protocol):
    """Sends spans to a receiver."""

    def export(self, spans: Sequence[Span]) -> None:
        """Send the spans. It may wait for the receiver."""
        ...

    def shutdown(self) -> None:
        """Cancel the call that is under way."""
        ...
