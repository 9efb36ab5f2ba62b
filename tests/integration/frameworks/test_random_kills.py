"""The job of every adapter, whose ranks are killed at random moments: nothing torn is ever resumed from."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos.adapter_chaos import AdapterChaos

SAVES = 50
"""That each job commits, where there is time, and there are four of each adapter then: 200 saves."""
FEW = 3

JOBS: dict[str, dict[str, Any]] = {
    "deepspeed": dict(program="deepspeed_job", arguments=("endless", "2", "default", "last")),
    "deepspeed-decoupled": dict(
        program="deepspeed_job", arguments=("endless", "3", "decoupled", "steps"), early=1
    ),
    "transformers": dict(program="transformers_job", arguments=("endless",)),
    "accelerate": dict(program="accelerate_job", arguments=("endless",)),
    "lightning-ddp": dict(program="lightning_job", arguments=("endless", "ddp")),
    "lightning-fsdp": dict(program="lightning_job", arguments=("endless", "model_parallel")),
    "dcp": dict(program="dcp_job", arguments=("endless",)),
    "torchtitan": dict(program="torchtitan_job", arguments=("endless",)),
    "orbax": dict(program="orbax_job", arguments=("endless",)),
}


@pytest.fixture(autouse=True)
def _on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.mark.parametrize(
    "seed", [15, *(pytest.param(seed, marks=pytest.mark.thorough_only) for seed in (16, 17, 18))]
)
@pytest.mark.parametrize("adapter", JOBS)
def test_whenever_a_rank_is_killed_all_resume_from_a_whole_step(
    tmp_path: Path, adapter: str, seed: int, thorough: bool
):
    chaos = AdapterChaos(seed=seed, saves=SAVES if thorough else FEW, **JOBS[adapter]).run(tmp_path)
    print(chaos.account())
    assert chaos.wrong == []
