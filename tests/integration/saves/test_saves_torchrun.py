"""Saves of a job under torchrun on Muster, with its children, ranks and coordinator killed at random."""

import signal
from pathlib import Path

import pytest

from lab.drain import job, reported_steps
from lab.patience import until
from lab.processes.coordinator import Coordinator
from muster.checkpoint.directory import CheckpointDirectory
from tests.support.chaos.save_chaos import SaveChaos
from tests.support.saves.save_history import UNCONFIRMED, Event, verdict


def test_checkpoints_are_whole_and_training_resumes_after_any_kill(tmp_path: Path, thorough: bool):
    saves, every, child_odds = (110, 60, 0.15) if thorough else (40, 30, 0.4)
    chaos = SaveChaos(
        seed=4,
        saves=saves,
        child_odds=child_odds,
        rank_every=(every // 3, every // 2),
        coordinator_every=every,
    )
    chaos.run(tmp_path)
    print(chaos.account())
    assert chaos.wrong == []
    assert len(chaos.saves_with("scheduled")) >= saves
    assert len(chaos.committed) >= saves / 3
    assert len(chaos.saves_with("failed")) >= 3
    assert len(chaos.resumed()) >= chaos.injected["rank killed"] >= 2
    assert chaos.injected["child killed"] >= 3
    assert chaos.injected["coordinator killed"] == 1


def test_a_caller_that_ignores_exit_codes_is_caught(tmp_path: Path):
    """The same checkpointer with a caller that does not is judged well in test_saves.py."""
    chaos = SaveChaos(seed=5, saves=30, kind="blind", ranks=1, child_odds=0.9, rank_every=()).run(tmp_path)
    print(chaos.account())
    assert chaos.injected["child killed"] >= 3
    assert chaos.saves_with("failed") == set()
    assert chaos.wrong
    assert all("does not load" in one for one in chaos.wrong)


def test_slow_save_and_agreed_save_are_committed_when_torchrun_is_terminated(tmp_path: Path):
    """Torchrun sends the signal to the process groups of its ranks, and so to their writers."""
    with Coordinator(tmp_path) as coordinator, job(coordinator.endpoint, tmp_path, 2, "slow") as agents:
        until(lambda: len(reported_steps(tmp_path, 2, "writing")) == 2, (tmp_path / "agents.log").read_text)
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
        coordinator.logged("save.agreed")
        (tmp_path / "gate").touch()
        coordinator.logged("save.done")
    agreed, other = reported_steps(tmp_path, 2, "saved")
    assert agreed == other
    committed = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert [CheckpointDirectory(tmp_path / "checkpoints").read(path).step for path in committed] == [
        0,
        agreed,
    ]


# ---------------------------------------------------------------------- the judge

GOOD = [
    Event(0, "loaded", 0),
    Event(0, "scheduled", 2),
    Event(0, "scheduled", 4),
    Event(0, "finalized", 2),
    Event(0, "latest", 2, "/2"),
    Event(0, "failed", 4),
    # Step 4 is committed in round 1, and only a later round gets to know it.
    Event(0, "loaded", 2, "/2", round=1),
    Event(0, "scheduled", 4, round=1),
    Event(0, "loaded", 4, "/4", round=2),
    Event(1, "loaded", 4, "/4", round=2),
    Event(0, "scheduled", 6, round=2),
    Event(1, "scheduled", 6, round=2),
    Event(0, "failed", 6, round=2, text=f"all had written, but {UNCONFIRMED}"),
    Event(1, "failed", 6, round=2, text=f"all had written, but {UNCONFIRMED}"),
    Event(0, "closed", 7, round=2),
]


def judged(events: list[Event], committed: set[int]) -> list[str]:
    return verdict(events, lambda path, step: "it is torn" if path == "/torn" else None, committed)


def test_the_judge_finds_nothing_wrong_with_a_good_history():
    assert judged(GOOD, {2, 4, 6}) == judged(GOOD, {2, 4}) == []


@pytest.mark.parametrize(
    ("more", "committed", "wrong"),
    [
        ([Event(1, "finalized", 4)], {2, 4, 6}, "step 4: rank 1 finalized it, rank 0 saw it fail"),
        ([Event(1, "latest", 2, "/torn")], {2, 4}, "step 2: latest() returned /torn, but it is torn"),
        ([Event(1, "loaded", 2, "/torn", 3)], {2, 4}, "step 2: latest() returned /torn, but it is torn"),
        ([Event(1, "latest", 2, "/2", 2)], {2, 4}, "rank 1: latest() returned step 2 after step 4"),
        ([Event(1, "loaded", 2, "/2", 3)], {2, 4}, "rank 1: it loaded step 2 after step 4"),
        ([Event(1, "scheduled", 4, round=3)], {2, 4}, "rank 1: it saved step 4 after step 4 was committed"),
        (
            [
                Event(1, "scheduled", 8, round=2),
                Event(1, "failed", 8, round=2),
                Event(1, "closed", 9, round=2),
            ],
            {2, 4},
            None,
        ),
        (
            [Event(1, "scheduled", 8, round=2), Event(1, "closed", 9, round=2)],
            {2, 4},
            "round 2, rank 1: it saved [6, 8], and heard of [6]",
        ),
        ([Event(0, "finalized", 4, round=1)], {2}, "step 4: rank 0 finalized it, and there is no checkpoint"),
        (
            [Event(0, "failed", 4, round=1)],
            {2, 4},
            "step 4: rank 0 heard that it was not written, and it is committed",
        ),
        (
            [Event(0, "loaded", 4, "/4", 3)],
            {2, 4, 6},
            "round 3: its ranks started from [4]; the last committed was 6",
        ),
        (
            [Event(0, "loaded", 6, "/6", 3), Event(1, "loaded", 4, "/4", 3)],
            {2, 4, 6},
            "round 3: its ranks started from [4, 6]; the last committed was 6",
        ),
        ([Event(1, "loaded", 0, "", 1)], {2, 4}, "round 1: its ranks started from [0, 2]"),
    ],
)
def test_the_judge_sees_what_is_wrong(more: list[Event], committed: set[int], wrong: str | None):
    found = judged([*GOOD, *more], committed)
    assert bool(found) is (wrong is not None)
    assert wrong is None or any(wrong in one for one in found), found
