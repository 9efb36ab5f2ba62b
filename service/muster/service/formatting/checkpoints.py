"""The save history of a run, as text."""

from muster.service.core.vocabulary import report
from muster.service.formatting.cells import NOTHING, duration, size
from muster.v1 import run_pb2


def checkpoints_text(checkpoints: run_pb2.Checkpoints) -> str:
    """Describe the newest checkpoint and the usual interval in one line.

    For example ``step 1200, committed 4m12s ago; 96.0 GiB; slowest write 12.4s: rank 3 (node-0); 12 so far,
    usually one every 10m0s``.
    """
    if not checkpoints.HasField("newest"):
        return f"none was committed; {_count(len(checkpoints.failures), 'save')} failed"
    newest = checkpoints.newest
    step = f"step {newest.step}, " if newest.HasField("step") else ""
    parts = [f"{step}committed {duration(checkpoints.age_ms)} ago"]
    if newest.HasField("bytes"):
        parts.append(size(newest.bytes))
    if newest.HasField("slowest"):
        parts.append(f"slowest write {duration(newest.slowest.write_ms)}: {slowest_text(newest.slowest)}")
    often = (
        f", usually one every {duration(checkpoints.interval_ms)}"
        if checkpoints.HasField("interval_ms")
        else ""
    )
    return "; ".join([*parts, f"{checkpoints.committed:,} so far{often}"])


def slowest_text(slowest: run_pb2.SlowestWrite) -> str:
    """Name the rank that wrote longest, with its host."""
    return f"rank {slowest.rank} ({report.shown(slowest.host)})"


def step_text(saved: run_pb2.Checkpoint | run_pb2.FailedSave) -> str:
    """Return the step of a save for a cell; a save may have none."""
    return str(saved.step) if saved.HasField("step") else NOTHING


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
