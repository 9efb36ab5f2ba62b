"""Three coordinators and three members of etcd, each fault once: nothing that was told is taken back."""

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
