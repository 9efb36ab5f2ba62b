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
@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        pytest.param("without-fence", ("slow_etcd", "leader_killed"), id="without the fence"),
        pytest.param("telling-first", ("leader_killed",), id="telling before it is durable"),
        pytest.param("trusting", ("leader_cut_from_etcd",), id="trusting a lease too long"),
    ],
)
def test_a_coordinator_with_a_fault_built_in_is_caught(tmp_path: Path, kind: str, faults: tuple[str, ...]):
    program = (sys.executable, "-m", "tests.support.broken_replica", kind)
    try:
        account = run(Plan(seed=3, faults=12, only=faults, program=program), tmp_path)
    except AssertionError as error:
        print(error)  # A rank was told what nobody may be told, or hangs.
    else:
        print(account)
        assert account.wrong
