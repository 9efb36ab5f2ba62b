"""Jobs on a real Slurm that takes their nodes or time: they save at one step, and go on when requeued."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.drain import told
from lab.patience import PATIENCE, until
from lab.processes import fork_client
from lab.processes.coordinator import MUSTER, Coordinator, free_port
from lab.processes.slurm import ROOT, Slurm

SCRIPTS = ROOT / "deploy" / "slurm"
PROGRAM = ROOT / "tests" / "support" / "jobs" / "slurm_job.py"
RANKS = 2
"""Ranks of a job, one on each of its nodes."""
NODES = 5
"""Two for the job that waits for its time limit, two for each other job in turn, and one to spare."""


class Job:
    """A job of two ranks that a script of ``deploy/slurm`` runs.

    Args:
        slurm: where it runs.
        folder: for what its ranks leave.
        script: the script's name.
        options: of ``sbatch``.
        environment: further variables of the job.
    """

    def __init__(self, slurm: Slurm, folder: Path, script: str, *options: str, **environment: str) -> None:
        self.slurm = slurm
        self.folder = folder
        self.id = slurm.submit(
            SCRIPTS / script,
            str(PROGRAM),
            str(folder),
            options=[f"--nodes={RANKS}", *options],
            OMP_NUM_THREADS="1",
            SAVE_SECONDS=f"{PATIENCE:.0f}",
            **environment,
        )

    @property
    def state(self) -> dict[str, str]:
        """What Slurm knows of it."""
        return self.slurm.job(self.id)

    @property
    def nodes(self) -> set[str]:
        """The names of its nodes."""
        return set(self.slurm.call("scontrol", "show", "hostnames", self.state["NodeList"]).split())

    def began(self, life: int) -> list[int]:
        """Wait until all ranks train in a life of the job, counted from 0.

        Returns:
            The step of each rank from which it went on.
        """
        until(lambda: len(told(self.folder, RANKS, "began")) == RANKS * (life + 1), self.story)
        return [steps[life] for steps in (told_by(self.folder, rank, "began") for rank in range(RANKS))]

    def requeued(self, restarts: int = 1) -> None:
        """Wait until Slurm has put it back into the queue."""
        until(lambda: self.state["Restarts"] == str(restarts), self.story)

    def saved(self, life: int = 0) -> int:
        """Return the one step at which all ranks have saved in a life."""
        (step,) = {told_by(self.folder, rank, "saved")[life] for rank in range(RANKS)}
        return step

    def finish(self) -> None:
        """Let it train to its end, and check that Slurm says so."""
        (self.folder / "finish").touch()
        until(lambda: self.state["JobState"] not in {"RUNNING", "COMPLETING"}, self.story)
        assert self.state["JobState"] == "COMPLETED", self.story()
        assert len(told(self.folder, RANKS, "finished")) == RANKS

    def story(self) -> str:
        """Return what is known of it, for a test that fails."""
        return f"{self.state}\n{self.slurm.output(self.id)}"


def told_by(folder: Path, rank: int, what: str) -> list[int]:
    """Return at which steps one rank did something."""
    lines = (folder / f"rank-{rank}").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.split()[0] == what]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A cluster for all tests; its sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="muster-slurm-") as folder, Slurm(Path(folder), NODES) as cluster:
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def limited(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job with a coordinator of its own, whose time limit is near.

    Slurm looks at time limits every 30 s, so the job waits for it while the first test runs.
    """
    own = {"MUSTER_ENDPOINT": "", "COORDINATOR_PORT": str(free_port())}
    job = Job(slurm, tmp_path_factory.mktemp("limited"), "torchrun.sbatch", **own)
    job.began(0)
    # Held, it does not start its next life before its test lets it.
    slurm.call("scontrol", "update", f"JobId={job.id}", "TimeLimit=2", "Priority=0")
    return job


def test_preempted_job_is_requeued_and_goes_on(slurm: Slurm, coordinator: Coordinator, tmp_path: Path):
    job = Job(slurm, tmp_path, "torchrun.sbatch", MUSTER_ENDPOINT=coordinator.endpoint)
    assert job.began(0) == [0, 0]
    place = ["--partition=high", "--exclusive", "--nodes=2", f"--nodelist={','.join(job.nodes)}"]
    urgent = slurm.call("sbatch", "--parsable", *place, "--wrap=true")
    job.requeued()
    assert job.began(1) == [job.saved()] * RANKS
    assert slurm.job(int(urgent))["JobState"] == "COMPLETED"
    job.finish()


def test_job_goes_on_after_its_time_limit_and_not_after_scancel(slurm: Slurm, limited: Job):
    limited.requeued()
    slurm.call("scontrol", "update", f"JobId={limited.id}", "TimeLimit=UNLIMITED")
    slurm.call("scontrol", "release", str(limited.id))
    assert limited.began(1) == [limited.saved(0)] * RANKS
    # scancel signals the coordinator in the job as well, and the ranks save nevertheless.
    slurm.call("scancel", str(limited.id))
    until(lambda: limited.state["JobState"] == "CANCELLED", limited.story)
    assert limited.saved(1) >= limited.saved(0)
    assert limited.state["Restarts"] == "1"


def test_job_of_a_drained_node_goes_on_without_it(slurm: Slurm, coordinator: Coordinator, tmp_path: Path):
    job = Job(slurm, tmp_path, "torchrun.sbatch", MUSTER_ENDPOINT=coordinator.endpoint)
    job.began(0)
    drained = min(job.nodes)
    slurm.call("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=a fan")
    try:
        result = muster(coordinator, "save", str(job.id), "--stop", f"--reason={drained} is drained")
        assert result.returncode == 0, result.stderr
        job.requeued()
        assert job.began(1) == [job.saved()] * RANKS
        assert drained not in job.nodes
        job.finish()
    finally:
        slurm.call("scontrol", "update", f"NodeName={drained}", "State=RESUME")


def test_requeued_task_of_an_array_goes_on_without_torchrun(
    slurm: Slurm, coordinator: Coordinator, tmp_path: Path
):
    job = Job(slurm, tmp_path, "ranks.sbatch", "--array=3", MUSTER_ENDPOINT=coordinator.endpoint)
    job.began(0)
    slurm.call("scontrol", "requeue", str(job.id))
    job.requeued()
    assert job.began(1) == [job.saved()] * RANKS
    job.finish()
    (run,) = json.loads(muster(coordinator, "get", "runs", "--output=json").stdout)["runs"]
    assert run["run_id"] == f"{job.id}_3"
    assert run["generation"] == "1"


def muster(coordinator: Coordinator, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(MUSTER), *arguments, f"--endpoint={coordinator.endpoint}", f"--timeout={PATIENCE}"]
    return fork_client.run(command, timeout=2 * PATIENCE)
