"""Barriers through relays under faults of every kind; and relays with a fault built in, which are caught."""

from pathlib import Path

import pytest

from tests.support.chaos.relay_chaos import RelayChaos

KINDS = 9


def test_whatever_happens_to_relays_barriers_are_right(tmp_path: Path, thorough: bool):
    faults = 300 if thorough else KINDS
    pauses, pause = (1.0, 0.0) if thorough else (0.4, 0.01)
    chaos = RelayChaos(seed=13, faults=faults, pauses=pauses, pause=pause).run(tmp_path)
    print(chaos.account())
    assert chaos.wrong == []
    assert len(chaos.injected) == KINDS
    assert chaos.counts["barriers"] >= 3 * faults
    assert chaos.folded > 1.0


@pytest.mark.parametrize(
    ("kind", "fault", "wrong"),
    [
        ("answering", "worker_stopped_and_woken", "SEQUENCE_AHEAD"),
        ("hiding", "worker_killed", "was not known after"),
        ("eager", "worker_stopped_and_woken", "did not send what all were told"),
    ],
)
def test_a_broken_relay_is_caught(tmp_path: Path, kind: str, fault: str, wrong: str):
    chaos = RelayChaos(seed=13, faults=1, only=(fault,), timeout=5.0, pause=0.01, broken=kind).run(tmp_path)
    print(chaos.account()[:2_000])
    assert any(wrong in one for one in chaos.wrong)
