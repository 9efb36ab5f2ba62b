"""How a save fails, in words that every rank gets."""

import signal
import traceback

from muster.worker.decision import Decision
from muster.worker.errors import AsyncSaveError

MOST_TEXT = 12_000
"""Bytes of a child's report; the coordinator keeps 16 KiB of a vote's reason."""


def failure_text(error: BaseException) -> str:
    """An exception for the vote: what it is, then where it was raised."""
    lines = traceback.format_exception(error)
    headline = "".join(traceback.format_exception_only(error)).strip()
    return cut(f"{headline}\n{''.join(lines)}")


def ending_text(status: int) -> str | None:
    """A child's exit status for the vote; None if it ended well.

    Args:
        status: as ``os.waitstatus_to_exitcode`` gives it: negative for a signal.
    """
    if status == 0:
        return None
    if status > 0:
        return f"the writing process ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = "; the kernel may have killed it for want of memory (see dmesg)" if name == "SIGKILL" else ""
    return f"the writing process was killed by {name}{hint}"


def save_error(name: str, call_idx: int, decision: Decision, *, written: bool = False) -> AsyncSaveError:
    """The error that every rank raises for a save that was not committed.

    Args:
        name: what people call the save.
        call_idx: the save's number.
        decision: what the ranks were told.
        written: whether every rank had written, and making it a checkpoint failed.
    """
    what = "was not committed, on any rank"
    if written:
        what = "was written by every rank, but its commit failed or is not confirmed, and none finalizes it"
    return AsyncSaveError(f"{name} {what}: {decision.message}", call_idx, decision)


def cut(text: str) -> str:
    """The end of a text that is too long for a vote: a traceback's end says most."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= MOST_TEXT:
        return text
    return f"… {data[-MOST_TEXT:].decode('utf-8', 'ignore')}"
