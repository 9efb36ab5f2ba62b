"""Examples of jobs in frameworks, under torchrun: a rank is killed, and all go on from what they saved."""

import os
import signal
from pathlib import Path

import pytest

from lab.patience import until
from lab.processes import agents
from lab.processes.coordinator import Coordinator
from lab.processes.fork_server import LONGEST_NAME
from muster.checkpoint.committed import MARKER
from tests.support.jobs.generations import FRAMEWORKS
from tests.support.saves.child_processes import children_of

EXAMPLES = Path(__file__).parents[3] / "examples"
RANKS = 2

JOBS = {
    "dcp_job": ("--steps", "400"),
    "transformers_job": ("--steps", "150", "--save-every", "25"),
    "accelerate_job": ("--epochs", "8"),
}


@pytest.fixture(autouse=True)
def _on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.mark.parametrize("example", JOBS)
def test_job_resumes_from_its_last_checkpoint_after_a_rank_is_killed(tmp_path: Path, example: str):
    folder = tmp_path / "checkpoints"
    command = (str(EXAMPLES / f"{example}.py"), str(folder), *JOBS[example])
    with (
        Coordinator(tmp_path, session_ttl=2.0) as coordinator,
        agents.Job(
            tmp_path, coordinator.endpoint, command=command, imports=FRAMEWORKS[example], ranks=RANKS
        ) as job,
    ):
        agent = job.agent("1")
        # Unlike glob(), it does not mind that the job renames a folder meanwhile.
        until(lambda: any(MARKER in files for _, _, files in os.walk(folder)), agent.said)
        ranks = sorted(
            pid for pid in children_of(agent.process.pid) if name_of(pid) == example[:LONGEST_NAME]
        )
        assert len(ranks) == RANKS
        os.kill(ranks[-1], signal.SIGKILL)
        assert agent.wait() == 0, agent.said()
        assert agent.said().count(" goes on from ") == RANKS, agent.said()


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().rstrip()
