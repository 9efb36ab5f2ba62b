"""How a save fails, in words that every rank gets."""

import signal
from collections.abc import Mapping

from muster.worker.decision import Decision
from muster.worker.errors import AsyncSaveError
from muster.worker.groups.reason import MAX_TEXT as MAX_TEXT
from muster.worker.groups.reason import cut as cut
from muster.worker.groups.reason import failure_text as failure_text
from muster.worker.transport.fork_guard import handlers_hint


def ending_text(status: int | None) -> str:
    """How a writing process ended, for the vote.

    Args:
        status: its exit status, negative for a signal; None if it is not known.
    """
    if status is None:
        return (
            "the writing process ended without a word, and its exit status was taken by another part of this "
            "program, which ignores SIGCHLD or waits for any child"
        )
    if status == 0:
        return "the writing process ended with exit status 0 before its function had returned (os._exit?)"
    if status > 0:
        return f"the writing process ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hints = {
        "SIGKILL": "the kernel may have killed it for want of memory (see dmesg)",
        "SIGABRT": handlers_hint(),
    }
    hint = hints.get(name)
    return f"the writing process was killed by {name}" + (f"; {hint}" if hint else "")


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


def different_saves(numbers: Mapping[int, bytes]) -> str | None:
    """Why a save that every rank has written is none: the ranks took different ones for it.

    Args:
        numbers: by rank, how many saves it has made since it aborted; empty if it does not say.

    Returns:
        None if all who say it say the same.
    """
    said = {rank: number.decode("utf-8", "replace") for rank, number in sorted(numbers.items()) if number}
    if len(set(said.values())) < 2:
        return None
    first, number = next(iter(said.items()))
    other = next(rank for rank in said if said[rank] != number)
    return (
        f"the ranks aborted at different points, and make different saves: since then rank {first} has made "
        f"{number} before this one, rank {other} {said[other]}. Let all ranks abort at the same point, and "
        "restart the job, or give the saves of all ranks a generation or a group of their own"
    )


def early_hint(name: str, rank: int) -> str:
    """What a rank that has written logs when it waits for others that perhaps do not save at all.

    Args:
        name: what people call the save.
        rank: the one that waits.
    """
    return (
        f"{name} is written here (rank {rank}). The missing have not begun it, or write longer: "
        f"every rank must make the same saves. If rank {rank} alone is to save, give the queue a barrier "
        f'of its own: barrier=GrpcBarrier(barrier_prefix="save-{rank}", participants=[{rank}])'
    )


def late_hint(name: str, run_id: str) -> str:
    """Return what a rank that has written logs when a save waits long for the others.

    Args:
        name: what people call the save.
        run_id: the run.
    """
    return (
        f"{name} is written here (the ranks' writes usually end at about the same time). "
        f"muster stack {run_id} shows what the missing ranks and their writers are doing."
    )
