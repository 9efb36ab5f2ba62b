"""The course of a recovery, without I/O."""

import pytest

from muster.checkpoint.damage import CorruptCheckpointError, Damage
from muster.worker.saves.local.recovery import MAX_DECISIONS, Next, Recovery

LOST = Damage("a.distcp", "it is missing")


def follows(recovery: Recovery) -> Next:
    return recovery.next


def test_local_checkpoint_is_loaded():
    recovery = Recovery(overwrites=True)
    assert follows(recovery) is Next.ASK
    recovery.decided(local=True)
    assert follows(recovery) is Next.LOAD
    recovery.loaded("0-1", None, filled=True)
    assert follows(recovery) is Next.DONE


def test_decision_without_a_local_checkpoint_leads_to_shared_storage():
    recovery = Recovery(overwrites=True)
    recovery.decided(local=False)
    assert follows(recovery) is Next.SHARED


def test_decision_follows_if_what_may_be_in_shared_storage_is_not_there():
    recovery = Recovery(overwrites=True)
    recovery.decided(local=False, absent=True)
    assert follows(recovery) is Next.ASK


def test_coordinator_is_asked_for_no_local_checkpoint_after_a_bound():
    recovery = Recovery(overwrites=True)
    for _ in range(MAX_DECISIONS):
        assert follows(recovery) is Next.ASK
        assert not recovery.without_local
        recovery.decided(local=True)
        recovery.loaded("0-1", LOST, filled=True)
    assert follows(recovery) is Next.ASK
    assert recovery.without_local
    recovery.decided(local=False)
    assert follows(recovery) is Next.SHARED
    assert recovery.damages == [LOST] * MAX_DECISIONS


def test_partly_filled_state_is_not_filled_from_another_checkpoint():
    recovery = Recovery(overwrites=False)
    recovery.decided(local=True)
    recovery.loaded("0-1", LOST, filled=False)
    recovery.decided(local=True)
    with pytest.raises(CorruptCheckpointError, match="partly filled") as raised:
        recovery.loaded("0-1", LOST, filled=True)
    assert raised.value.damages == (LOST, LOST)
