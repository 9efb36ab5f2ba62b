"""Three coordinators and three members of etcd, each fault once: nothing that was told is taken back."""

from pathlib import Path

import pytest

from tests.support.chaos.replica_chaos import ReplicaChaos

PAUSE = 0.04
"""Seconds: the faults take their time, and all the while others have the processor."""


@pytest.mark.timeout(900)
def test_whatever_fails_nothing_is_decided_twice_lost_or_given_twice(tmp_path: Path, thorough: bool):
    faults = 65 if thorough else 13
    quorum_loss, pause = (20.0, 0.0) if thorough else (3.0, PAUSE)
    chaos = ReplicaChaos(seed=12, faults=faults, quorum_loss=quorum_loss, pause=pause).run(tmp_path)
    print(chaos.account())
    assert chaos.wrong == []
    assert chaos.injected.total() == faults
    assert len(chaos.injected) == 13
    assert chaos.counts["leaders in turn"] >= 5
    for what in ("barriers", "ABORTED", "rounds", "changes of the store"):
        assert chaos.counts[what] > 0


# ---------------------------------------------------------------------- the harness can fail


TAKEN_BACK = ("their sums are not 1 to that", "that is not what is there", "whose next barrier is")
"""How it shows that something was taken back: a key is as it was, or a group is where it was."""
TOLD_LATE = ("a deposed leader told",)
"""How it shows that one has told what another has changed."""


FAULTS = 9
"""How many are tried, at the most, until one shows."""


def is_caught(
    kind: str, fault: str, signs: tuple[str, ...], folder: Path, faults: int, pause: float = PAUSE
) -> bool:
    """Whether a fault that is built into the coordinators is found; what they do wrong may need some luck."""
    for seed in range(FAULTS // faults):
        (folder / str(seed)).mkdir()
        chaos = ReplicaChaos(seed=seed, faults=faults, only=(fault,), pause=pause, broken=kind)
        chaos.run(folder / str(seed))
        print(chaos.account())
        if any(sign in one for sign in signs for one in chaos.wrong):
            return True
    return False


@pytest.mark.timeout(900)
def test_a_coordinator_that_trusts_its_lease_too_long_is_caught(tmp_path: Path):
    # The fault itself reads what is told wrongly: little traffic is enough.
    assert is_caught("trusting", "idle_leader_cut_from_etcd", TOLD_LATE, tmp_path, faults=3, pause=5 * PAUSE)


@pytest.mark.timeout(900)
def test_a_coordinator_without_a_fence_is_caught(tmp_path: Path):
    assert is_caught("without-fence", "commit_comes_late", TAKEN_BACK, tmp_path, faults=3)


@pytest.mark.timeout(900)
def test_a_coordinator_that_tells_before_it_commits_is_caught(tmp_path: Path):
    assert is_caught("telling-first", "commit_comes_late", TAKEN_BACK, tmp_path, faults=1)
