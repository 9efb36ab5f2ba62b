"""The payload bytes that all groups hold together."""

from collections.abc import Callable

from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.limits import ByteTotal
from muster.service.core.vocabulary.model import Instant


class PayloadTotal(ByteTotal):
    """Payload bytes of the open barriers and kept decisions of all runs.

    Args:
        drop: drops at least so many bytes of payloads that nobody uses, or none.
    """

    def __init__(self, drop: Callable[[int, Instant, Effects], None]) -> None:
        super().__init__()
        self._drop = drop

    def reduce(self, limit: int, now: Instant, effects: Effects) -> None:
        """Have payloads dropped that nobody uses, if that brings the total down to a limit."""
        if self.bytes > limit:
            self._drop(self.bytes - limit, now, effects)
