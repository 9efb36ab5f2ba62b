"""Short doses of the soak of hostile clients: ``python -m benchmarks.hostile`` is the long one."""

from pathlib import Path

import pytest

from lab.hostile.soak import Account, Soak, run, run_in_turns
from lab.patience import PATIENCE

MIN_SECONDS = 10.0
"""The hostile clients attack together for at least so long."""
MIN_BARRIERS = 30
MAX_MEMORY = 400
"""MiB of the coordinator, and of the relay, as the benchmark asks."""


def judge(account: Account) -> None:
    """See that each kind was refused and nobody else, and that each rank was released from each barrier."""
    print(account)
    assert account.wrong == []
    assert account.outcomes.keys() == {"RELEASED"}
    assert len(account.decisions) >= MIN_BARRIERS
    assert account.visits > 0
    assert {name: memory.peak for name, memory in account.memory.items() if memory.peak > MAX_MEMORY} == {}


# A kind that is not refused takes as long as the patience of a test.
@pytest.mark.timeout(1_200)
def test_job_notices_nothing_of_hostile_clients(tmp_path: Path):
    judge(run_in_turns(tmp_path))


def enough(soak: Soak) -> bool:
    """Whether each kind of hostile client has been refused, or will not be."""
    refused = all(one.refused for one in soak.answered())
    return soak.seconds >= PATIENCE or (soak.seconds >= MIN_SECONDS and refused)


# With all kinds at once, honest calls take seconds on two busy cores.
@pytest.mark.thorough_only
@pytest.mark.timeout(1_200)
def test_job_notices_nothing_of_hostile_clients_that_attack_together(tmp_path: Path):
    judge(run(tmp_path, enough))
