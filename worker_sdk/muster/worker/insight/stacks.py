"""The stacks of this process's threads: names of functions and files, never values."""

import sys
import threading
from types import FrameType

import muster
from muster.v1 import insight_pb2 as pb

MAX_FRAMES = 64
"""Limit for the reported frames of a thread; the innermost ones count."""
MAX_THREADS = 64
"""Limit for the reported threads."""
MAX_NAME = 200
"""Limit for a name in bytes of UTF-8. With the two limits above, a report fits into a message."""
CUT = "…"
"""Replaces what is cut from a name."""
KEPT = MAX_NAME - len(CUT.encode())
"""Bytes that a cut name keeps."""
LIBRARIES = (
    "<frozen ",
    threading.__file__.removesuffix("threading.py"),
    *(f"{folder}/" for folder in muster.__path__),
)
"""The prefixes of the files of the interpreter, of Python's own modules and of Muster."""
INSTALLED = ("/site-packages/", "/dist-packages/")
"""The folders of installed packages."""


def threads(limit: int = MAX_THREADS) -> tuple[list[pb.Thread], int]:
    """Return the stacks of the Python threads, the main thread first, the others in order of their start.

    It takes no lock, and keeps no frame when it returns, so no object lives longer because of it. The calling
    thread is left out, so do not call it from the main thread. A main thread that has ended has no frames.

    Args:
        limit: the number of threads to return at most.

    Returns:
        The threads, and the number of those left out.
    """
    main = threading.main_thread()
    # Not threading.enumerate(): it takes a lock.
    started = threading._active.copy().items()  # type: ignore[attr-defined]
    names = {main.ident: main.name} | {ident: thread.name for ident, thread in started}
    frames = sys._current_frames()
    # A reference cycle through this frame would keep all frames until the next garbage collection.
    frames.pop(threading.get_ident(), None)
    idents = [ident for ident in dict.fromkeys((*names, *frames)) if ident in frames or ident == main.ident]
    listed = [
        # faulthandler and debuggers name a thread that Python did not start in the same way.
        _thread(names.get(ident, f"{ident:#x}"), ident == main.ident, frames.get(ident))
        for ident in idents[:limit]
    ]
    return listed, len(idents) - len(listed)


def _thread(name: str, main: bool, frame: FrameType | None) -> pb.Thread:
    frames: list[pb.Frame] = []
    left_out, ended = 0, False
    while frame is not None:
        if len(frames) < MAX_FRAMES:
            frames.append(_frame(frame))
        else:
            left_out += 1
        ended = _is_shutdown(frame)
        frame = frame.f_back
    if ended:
        frames, left_out = [], 0
    return pb.Thread(name=_beginning(name), main=main, frames=frames, frames_left_out=left_out)


def _is_shutdown(frame: FrameType) -> bool:
    """Return whether the interpreter waits here for the other threads, after the end of the program."""
    code = frame.f_code
    return code.co_name == "_shutdown" and code.co_filename == threading.__file__


def _frame(frame: FrameType) -> pb.Frame:
    code = frame.f_code
    return pb.Frame(
        function=_beginning(code.co_qualname),
        file=_end(code.co_filename),
        line=frame.f_lineno or 0,  # Some instructions belong to no line.
        library=is_library(code.co_filename),
    )


def is_library(file: str) -> bool:
    """Return whether a file belongs to Python, an installed package or Muster, not to the program.

    Args:
        file: as a code object names it.
    """
    return file.startswith(LIBRARIES) or any(folder in file for folder in INSTALLED)


def _beginning(name: str) -> str:
    encoded = name[: MAX_NAME + 1].encode("utf-8", "backslashreplace")
    if len(encoded) > MAX_NAME:
        return encoded[:KEPT].decode("utf-8", "ignore") + CUT
    return encoded.decode()


def _end(path: str) -> str:
    """Cut a path to its end, which says more than its start."""
    encoded = path[-MAX_NAME - 1 :].encode("utf-8", "backslashreplace")
    if len(encoded) > MAX_NAME:
        return CUT + encoded[-KEPT:].decode("utf-8", "ignore")
    return encoded.decode()
