"""A job under torchrun whose state is on a GPU, with its children, ranks and coordinator killed at random."""

from pathlib import Path

import pytest

from tests.support.chaos.save_chaos import Plan, run

pytestmark = pytest.mark.gpu_only


def test_checkpoints_of_a_gpu_are_whole_and_training_resumes_after_any_kill(tmp_path: Path, thorough: bool):
    saves = 300 if thorough else 80
    plan = Plan(seed=8, saves=saves, device="cuda", rank_every=(25, 35), coordinator_every=60)
    account = run(plan, tmp_path)
    print(account)
    assert account.wrong == []
    assert len(account.committed) >= saves / 3
    assert account.killed["ranks"] >= 2
    assert account.killed["children"] >= 3
    assert account.killed["coordinators"] >= 1
