"""Calls a function at a line of a module, as a signal handler would that interrupts the thread there."""

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


class Handler:
    """Interrupts the thread that runs code, once.

    Args:
        module: the module whose lines are counted.
        line: the number of lines that are run before.
        handle: is called then.
    """

    def __init__(self, module: ModuleType, line: int, handle: Callable[[], object]) -> None:
        self._file = module.__file__
        self._left = line
        self._handle = handle

    @property
    def called(self) -> bool:
        """Whether so many lines were run."""
        return self._left < 0

    def interrupt(self, run: Callable[[], object]) -> None:
        """Run a function on this thread."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            run()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != self._file or self._left < 0:
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0:
                self._handle()
        return self._trace
