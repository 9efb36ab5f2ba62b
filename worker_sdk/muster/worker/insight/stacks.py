"""Where the threads of this process stand: names of functions and files, never values."""

import sys
import threading
from types import FrameType

import muster
from muster.v1 import insight_pb2 as pb

MOST_FRAMES = 64
"""Frames that are told of a thread, the innermost ones."""
MOST_THREADS = 64
"""Threads that are told, if no less are asked for."""
MOST_NAME = 200
"""Bytes of a name, in UTF-8: with the two above, all of it fits well into a message."""
CUT = "…"
"""Stands for what a name has lost."""
KEPT = MOST_NAME - len(CUT.encode())
"""Bytes that are left of a name that is cut."""
LIBRARIES = (
    "<frozen ",
    threading.__file__.removesuffix("threading.py"),
    *(f"{folder}/" for folder in muster.__path__),
)
"""How the files of the interpreter, of Python's own modules and of Muster begin, for their frames."""
INSTALLED = ("/site-packages/", "/dist-packages/")
"""The folders of what was installed."""


def threads(most: int = MOST_THREADS) -> tuple[list[pb.Thread], int]:
    """Where the Python threads stand, the main one first and the others as they were started.

    It waits for nobody, and holds no frame when it returns: what a frame holds lives no longer for it. The
    thread that asks is left out, so the main thread is not the one to ask. A main thread that has ended has
    no frames.

    Args:
        most: how many are told; the main one is the first.

    Returns:
        The threads, and how many are left out.
    """
    main = threading.main_thread()
    # Not threading.enumerate(), for it takes a lock.
    started = threading._active.copy().items()  # type: ignore[attr-defined]
    names = {main.ident: main.name} | {ident: thread.name for ident, thread in started}
    frames = sys._current_frames()
    # This frame would hold itself, and with it all the others, until the next garbage collection.
    frames.pop(threading.get_ident(), None)
    idents = [ident for ident in dict.fromkeys((*names, *frames)) if ident in frames or ident == main.ident]
    told = [
        # A thread that Python did not start is called as faulthandler and debuggers call it.
        _thread(names.get(ident, f"{ident:#x}"), ident == main.ident, frames.get(ident))
        for ident in idents[:most]
    ]
    return told, len(idents) - len(told)


def _thread(name: str, main: bool, frame: FrameType | None) -> pb.Thread:
    frames: list[pb.Frame] = []
    left_out, ended = 0, False
    while frame is not None:
        if len(frames) < MOST_FRAMES:
            frames.append(_frame(frame))
        else:
            left_out += 1
        ended = _is_shutdown(frame)
        frame = frame.f_back
    if ended:
        frames, left_out = [], 0
    return pb.Thread(name=_beginning(name), main=main, frames=frames, frames_left_out=left_out)


def _is_shutdown(frame: FrameType) -> bool:
    """Whether it is what waits for the other threads: called by no frame, when the program has ended."""
    code = frame.f_code
    return code.co_name == "_shutdown" and code.co_filename == threading.__file__


def _frame(frame: FrameType) -> pb.Frame:
    code = frame.f_code
    return pb.Frame(
        function=_beginning(code.co_qualname),
        file=_end(code.co_filename),
        line=frame.f_lineno or 0,  # There are instructions that belong to no line.
        library=is_library(code.co_filename),
    )


def is_library(file: str) -> bool:
    """Whether a file belongs to Python, to what was installed or to Muster, and not to the program.

    Args:
        file: as a code object names it.
    """
    return file.startswith(LIBRARIES) or any(folder in file for folder in INSTALLED)


def _beginning(name: str) -> str:
    encoded = name[: MOST_NAME + 1].encode("utf-8", "backslashreplace")
    if len(encoded) > MOST_NAME:
        return encoded[:KEPT].decode("utf-8", "ignore") + CUT
    return encoded.decode()


def _end(path: str) -> str:
    """The end of a path says more than its beginning."""
    encoded = path[-MOST_NAME - 1 :].encode("utf-8", "backslashreplace")
    if len(encoded) > MOST_NAME:
        return CUT + encoded[-KEPT:].decode("utf-8", "ignore")
    return encoded.decode()
