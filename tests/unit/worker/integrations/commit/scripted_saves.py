"""One rank's saves, with a barrier that answers as the test scripts it."""

from typing import Any

from lab.patience import PATIENCE
from muster.worker.integrations.commit.commitment import Commitment
from muster.worker.integrations.commit.words import BEGINS, DONE, REUSED
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.scripted_barrier import ScriptedBarrier, decided


def begun(rank: int = 0, **arguments: Any) -> tuple[Commitment, ScriptedBarrier]:
    """A save that all ranks have begun."""
    barrier = ScriptedBarrier(rank)
    as_barrier: Any = barrier
    save = Commitment(as_barrier, 60.0, **arguments)
    assert barrier.heard() == BEGINS + REUSED
    barrier.answers.put(decided())
    return save, barrier


def written_by_all(rank: int) -> tuple[Commitment, ScriptedBarrier]:
    save, barrier = begun(rank)
    result = in_thread(save.written)
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    result.result(PATIENCE)
    return save, barrier
