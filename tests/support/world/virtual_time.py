"""An event loop whose time passes only when it has nothing else to do: timers fire at once, and exactly."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

from muster.service.core.vocabulary.model import Instant

START = 1_000.0
WALL = 1_700_000_000.0


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Instead of waiting for its next timer, it moves its clock there. For work without threads."""

    def __init__(self) -> None:
        self.now = START
        super().__init__(_Selector(self))

    def time(self) -> float:
        """The virtual time."""
        return self.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left that could ever happen"
        ready = super().select(0)
        if not ready:
            self._loop.now += timeout
        return ready


class LoopClock:
    """The running loop's time, as the driver's clock."""

    def now(self) -> Instant:
        """This moment."""
        now = asyncio.get_running_loop().time()
        return Instant(now, WALL + now)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorator: run an async test on a loop of virtual time."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*arguments, **named))

    del run.__dict__["__wrapped__"]
    return run
