"""A job under torchrun whose state is on a GPU, with its children, ranks and coordinator killed at random."""

from pathlib import Path

import pytest

from tests.support.chaos.save_chaos import SaveChaos

pytestmark = pytest.mark.gpu_only


def test_checkpoints_of_a_gpu_are_whole_and_training_resumes_after_any_kill(tmp_path: Path, thorough: bool):
    saves = 300 if thorough else 80
    chaos = SaveChaos(seed=8, saves=saves, device="cuda", rank_every=(25, 35), coordinator_every=60)
    chaos.run(tmp_path)
    print(chaos.account())
    assert chaos.wrong == []
    assert len(chaos.committed) >= saves / 3
    assert chaos.injected["rank killed"] >= 2
    assert chaos.injected["child killed"] >= 3
    assert chaos.injected["coordinator killed"] >= 1
