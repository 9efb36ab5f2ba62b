"""Jobs on a real Slurm that takes their nodes or time: they save at one step, and go on when requeued."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from lab.drain import reported_steps
from lab.patience import PATIENCE, until
from lab.processes import fork_client
from lab.processes.coordinator import MUSTER, Coordinator, free_port
from lab.processes.slurm import ROOT, Slurm
from tests.support.jobs.slurm_job import TRAINS_ON

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
            MUSTER_WATCH_INTERVAL="0.5",
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

    def began(self, generation: int) -> list[int]:
        """Wait until all ranks train in a generation of the job, counted from 0.

        Returns:
            The step of each rank from which it went on.
        """
        until(
            lambda: len(reported_steps(self.folder, RANKS, "began")) == RANKS * (generation + 1), self.story
        )
        return [
            steps[generation]
            for steps in (steps_reported_by(self.folder, rank, "began") for rank in range(RANKS))
        ]

    def requeued(self, restarts: int = 1) -> None:
        """Wait until Slurm has put it back into the queue."""
        until(lambda: self.state["Restarts"] == str(restarts), self.story)

    def saved(self, generation: int = 0) -> int:
        """Return the one step at which all ranks have saved in a generation."""
        (step,) = {steps_reported_by(self.folder, rank, "saved")[generation] for rank in range(RANKS)}
        return step

    def finish(self) -> None:
        """Let it train to its end, and check that Slurm says so."""
        (self.folder / "finish").touch()
        until(lambda: self.state["JobState"] not in {"RUNNING", "COMPLETING"}, self.story)
        assert self.state["JobState"] == "COMPLETED", self.story()
        assert len(reported_steps(self.folder, RANKS, "finished")) == RANKS
        # Each would go on asking the cluster and the coordinator, on a node that others use by then.
        until(lambda: not self.watchers(), lambda: f"watchers are left: {self.watchers()}")

    def watchers(self) -> list[int]:
        """Return the process ids of its watchers."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                ours = process.environ().get("SLURM_JOB_ID") == str(self.id)
                if ours and {"watch", "--source=slurm"} <= set(process.cmdline()):
                    found.append(process.pid)
        return found

    def story(self) -> str:
        """Return what is known of it, for a test that fails."""
        return f"{self.state}\n{self.slurm.output(self.id)}"


def steps_reported_by(folder: Path, rank: int, what: str) -> list[int]:
    """Return at which steps one rank did something."""
    lines = (folder / f"rank-{rank}").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.split()[0] == what]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A cluster for all tests; its sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="muster-slurm-") as folder, Slurm(Path(folder), NODES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """The coordinator of the cluster."""
    with Coordinator(tmp_path_factory.mktemp("coordinator")) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def limited(slurm: Slurm, shared: Coordinator, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A task of an array, without torchrun, shortly before its time limit.

    Slurm looks at time limits every 30 s, so the job waits for it while the first test runs.
    """
    folder = tmp_path_factory.mktemp("limited")
    # No other job preempts one of this partition.
    options = ["--array=3", "--partition=high"]
    job = Job(slurm, folder, "ranks.sbatch", *options, MUSTER_ENDPOINT=shared.endpoint, RUN_PREFIX="team-a.")
    job.began(0)
    # Held, it does not start its next generation before its test lets it.
    slurm.call("scontrol", "update", f"JobId={job.id}", "TimeLimit=2", "Priority=0")
    return job


def test_preempted_job_is_requeued_and_goes_on(slurm: Slurm, shared: Coordinator, tmp_path: Path):
    job = Job(slurm, tmp_path, "torchrun.sbatch", MUSTER_ENDPOINT=shared.endpoint)
    assert job.began(0) == [0, 0]
    place = ["--partition=high", "--exclusive", "--nodes=2", f"--nodelist={','.join(job.nodes)}"]
    urgent = slurm.call("sbatch", "--parsable", *place, "--wrap=true")
    job.requeued()
    assert job.began(1) == [job.saved()] * RANKS
    assert slurm.job(int(urgent))["JobState"] == "COMPLETED"
    job.finish()


def test_job_at_its_time_limit_is_requeued_and_goes_on(slurm: Slurm, shared: Coordinator, limited: Job):
    limited.requeued()
    assert f"the time limit of job {limited.id} is near" in limited.story()
    # Else it would be warned again at once: its script wants to know 180 s before.
    slurm.call("scontrol", "update", f"JobId={limited.id}", "TimeLimit=UNLIMITED")
    slurm.call("scontrol", "release", str(limited.id))
    assert limited.began(1) == [limited.saved()] * RANKS
    limited.finish()
    assert "Error" not in limited.story()  # the relays'
    runs = json.loads(muster(shared.endpoint, "get", "runs", "--output=json").stdout)["runs"]
    (run,) = [run for run in runs if run["run_id"] == f"team-a.{limited.id}_3"]
    # Slurm's restart is the run's next generation.
    assert run["generation"] == "1"
    deadline, asked_at = (datetime.fromisoformat(run["save"][name]) for name in ("deadline", "asked_at"))
    assert (deadline - asked_at).total_seconds() == pytest.approx(PATIENCE, abs=0.1)


def test_requeued_job_saves_and_trains_on_in_its_next_life(slurm: Slurm, shared: Coordinator, tmp_path: Path):
    job = Job(slurm, tmp_path, "torchrun.sbatch", MUSTER_ENDPOINT=shared.endpoint)
    job.began(0)
    slurm.call("scontrol", "requeue", str(job.id))
    job.requeued()
    resumed_at = job.began(1)
    stopped_at = job.saved()
    assert resumed_at == [stopped_at] * RANKS
    # A job that obeyed the old request to stop would save and stop again within three steps.
    later = stopped_at + TRAINS_ON
    until(
        lambda: all(later in steps_reported_by(tmp_path, rank, "trained") for rank in range(RANKS)), job.story
    )
    job.finish()
    assert job.state["Restarts"] == "1"
    assert [steps_reported_by(tmp_path, rank, "saved") for rank in range(RANKS)] == [[stopped_at]] * RANKS


def test_job_goes_on_without_a_drained_node_and_not_after_scancel(slurm: Slurm, tmp_path: Path):
    port = str(free_port())
    job = Job(slurm, tmp_path, "torchrun.sbatch", MUSTER_ENDPOINT="", COORDINATOR_PORT=port)
    job.began(0)
    # The watcher in the job looks at all of its nodes, and not only at that of the batch script.
    drained = max(job.nodes)
    slurm.call("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=a fan")
    job.requeued()
    assert f"Slurm drains the node {drained}: a fan" in job.story()
    assert job.began(1) == [job.saved(0)] * RANKS
    assert drained not in job.nodes
    # scancel signals the coordinator in the job as well, and the ranks save nevertheless.
    slurm.call("scancel", str(job.id))
    until(lambda: job.state["JobState"] == "CANCELLED", job.story)
    assert job.saved(1) >= job.saved(0)
    assert job.state["Restarts"] == "1"


def test_node_is_replaced_by_the_spare_of_the_job_which_is_not_requeued(
    slurm: Slurm, shared: Coordinator, tmp_path: Path
):
    spare = {"SPARES": "1", "RUN_PREFIX": "team-a."}
    job = Job(slurm, tmp_path, "torchrun.sbatch", "--nodes=3", MUSTER_ENDPOINT=shared.endpoint, **spare)
    job.began(0)
    run = f"team-a.{job.id}"
    members = json.loads(muster(shared.endpoint, "get", "members", run, "--output=json").stdout)["members"]
    replaced = members[0]["node_name"]
    done = muster(shared.endpoint, "replace", run, replaced, f"--wait={PATIENCE}")
    assert f"node {replaced} was replaced" in done.stdout, done.stderr
    job.began(1)
    # The agent on that node has ended with 75.
    job.finish()
    assert job.state["Restarts"] == "0"


def muster(endpoint: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(MUSTER), *arguments, f"--endpoint={endpoint}", f"--timeout={PATIENCE}"]
    return fork_client.run(command, timeout=2 * PATIENCE)
