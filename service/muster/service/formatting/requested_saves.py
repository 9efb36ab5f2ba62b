"""A requested save, as text."""

from muster.service.core.vocabulary import report
from muster.v1 import run_pb2

_STATES = {
    run_pb2.SAVE_STATE_ASKED: "asked for; the ranks have not agreed on a step",
    run_pb2.SAVE_STATE_AGREED: "agreed on; not all ranks are done",
    run_pb2.SAVE_STATE_DONE: "done by all ranks",
    run_pb2.SAVE_STATE_WITHDRAWN: "withdrawn",
    run_pb2.SAVE_STATE_LAPSED: "lapsed, because the job restarted first",
}

_DROPPED = (run_pb2.SAVE_STATE_WITHDRAWN, run_pb2.SAVE_STATE_LAPSED)
"""States of requests that no rank carries out."""


def save_text(save: run_pb2.Save) -> str:
    """Describe a save in one line: ``save 3 at step 412: done by all ranks, 14 s after it was asked for``."""
    step = f" at step {save.step}" if save.HasField("step") else ""
    took = ""
    if save.HasField("ended_at"):
        seconds = save.ended_at.ToMilliseconds() - save.asked_at.ToMilliseconds()
        took = f", {report.seconds(max(0, seconds) / 1000)} after it was asked for"
    ending = "was to end" if save.state in _DROPPED else "ends"
    stop = f"; training {ending} after it" if save.stop else ""
    if save.HasField("deadline") and save.HasField("ended_at"):
        after = (save.ended_at.ToMilliseconds() - save.deadline.ToMilliseconds()) / 1000
        if save.state == run_pb2.SAVE_STATE_DONE and after > 0:
            took += f", {report.seconds(after)} after its deadline"
    return f"save {save.number}{step}: {_STATES.get(save.state, 'unknown')}{took}{stop}"


def time_left(save: run_pb2.Save, now: float) -> str:
    """Return the time until the deadline of a pending save: ``87 s left``; empty if it has no deadline.

    Args:
        save: the save.
        now: seconds since 1970.
    """
    if not save.HasField("deadline") or save.HasField("ended_at"):
        return ""
    left = save.deadline.ToMilliseconds() / 1000 - now
    if left <= 0:
        return f"its deadline passed {report.seconds(-left)} ago"
    return f"{report.seconds(left)} left"


def asked_text(save: run_pb2.Save) -> str:
    """Name the caller that asked for a save, and the reason."""
    reason = f": {report.shown(save.reason)}" if save.reason else ""
    return f"{report.shown(save.by)}{reason}"
