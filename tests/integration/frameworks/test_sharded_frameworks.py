"""Jobs of Accelerate and Transformers whose state FSDP or DeepSpeed shards, while a rank is killed."""

from pathlib import Path

import pytest

from lab.processes.coordinator import Coordinator
from tests.support.jobs.generations import RANKS, JobGeneration

FAULTY, SAVES = 3, 5
"""As the ranks have them, whose module imports all three frameworks."""
SHARDED = [
    ("accelerate", "fsdp"),
    ("transformers", "deepspeed"),
    pytest.param("accelerate", "deepspeed", marks=pytest.mark.thorough_only),
    pytest.param("transformers", "fsdp", marks=pytest.mark.thorough_only),
]


@pytest.mark.parametrize(("kind", "sharding"), SHARDED)
def test_a_rank_that_is_killed_tears_no_shards_apart(
    tmp_path: Path, kind: str, sharding: str, thorough: bool
):
    for when in ("writing", "after") if thorough else ("writing",):
        (folder := tmp_path / when).mkdir()
        with Coordinator(folder, session_ttl=2.0) as coordinator:
            generations = []
            for number, fault in enumerate((("1", "kill", when), ())):
                arguments = (str(folder / "out"), "committed", kind, sharding, *fault)
                generations.append(JobGeneration(coordinator, "sharded_job", folder, number, *arguments))
                generations[-1].end()
            first, second = generations
            for rank in range(RANKS):
                saved = [line for line in first.said(rank) if line.startswith("saved")]
                assert saved == [f"saved {step}" for step in range(1, FAULTY)], first.logged(rank)
                said = [line for line in second.said(rank) if line.startswith(("resumed", "saved"))]
                steps = range(FAULTY, FAULTY + SAVES)
                assert said == [f"resumed {FAULTY - 1}", *(f"saved {step}" for step in steps)], second.logged(
                    rank
                )
            assert f"pid {first.ranks[1].pid}" in first.logged(0)
