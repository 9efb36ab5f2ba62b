"""Three coordinators and three members of etcd, each fault once: nothing that was told is taken back."""

import sys
from pathlib import Path

import pytest

from tests.support.robustness import Plan, run


@pytest.mark.timeout(900)
def test_whatever_fails_nothing_is_decided_twice_lost_or_given_twice(tmp_path: Path, thorough: bool):
    faults = 55 if thorough else 11
    account = run(Plan(seed=12, faults=faults, quorum_loss=20.0 if thorough else 3.0), tmp_path)
    print(account)
    assert account.wrong == []
    assert account.faults.total() == faults
    assert len(account.faults) == 11
    assert account.epochs >= 5
    assert account.barriers > 0
    assert account.outcomes["ABORTED"] > 0
    assert account.rounds > 0
    assert account.changes > 0


@pytest.mark.timeout(900)
def test_a_coordinator_that_trusts_its_lease_too_long_is_caught(tmp_path: Path):
    """The harness can fail; ``python -m tests.support.broken_replica`` has more faults to build in."""
    program = (sys.executable, "-m", "tests.support.broken_replica", "trusting")
    account = run(Plan(seed=3, faults=2, only=("leader_cut_from_etcd",), program=program), tmp_path)
    print(account)
    assert any("a deposed leader told [b'before']" in one for one in account.wrong)
