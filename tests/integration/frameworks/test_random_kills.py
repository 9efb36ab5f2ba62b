"""The job of every adapter, whose ranks are killed at random moments: nothing torn is ever resumed from."""

from pathlib import Path

import pytest

from lab.processes.coordinator import Coordinator
from tests.support.jobs.random_kills import Job, through_random_kills

SAVES = 50
"""That each job commits, where there is time, and there are four of each adapter then: 200 saves."""
FEW = 3

JOBS = {
    "deepspeed": Job(program="deepspeed_job", arguments=("endless", "2", "default", "last")),
    "deepspeed-decoupled": Job(
        program="deepspeed_job", arguments=("endless", "3", "decoupled", "steps"), early=1
    ),
    "transformers": Job(program="transformers_job", arguments=("endless",)),
    "accelerate": Job(program="accelerate_job", arguments=("endless",)),
    "lightning-ddp": Job(program="lightning_job", arguments=("ddp", "endless")),
    "lightning-fsdp": Job(program="lightning_job", arguments=("model_parallel", "endless")),
    "dcp": Job(program="dcp_job", arguments=("endless",)),
    "torchtitan": Job(program="torchtitan_job", arguments=("endless",)),
    "orbax": Job(program="orbax_job", arguments=("endless",)),
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
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        tally = through_random_kills(
            coordinator, tmp_path, JOBS[adapter], saves=SAVES if thorough else FEW, seed=seed
        )
    print(f"{adapter}, {seed}: {tally}")
