"""What the batch scripts for Slurm do when the time limit is near, and when their agents have ended.

``tests/integration/slurm`` runs them on a real Slurm.
"""

import re
import subprocess
from pathlib import Path

import pytest

from lab.patience import PATIENCE

SCRIPTS = sorted((Path(__file__).resolve().parents[3] / "deploy/slurm").glob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_save_before_the_time_limit_has_a_deadline_that_leaves_time(script: Path):
    text = script.read_text()
    (trap,) = re.findall("^trap '(muster save .*)' USR1$", text, re.MULTILINE)
    assert ' --stop --deadline "$save_seconds" ' in trap
    (seconds,) = re.findall(r"^save_seconds=\$\{SAVE_SECONDS:-(\d+)\}$", text, re.MULTILINE)
    (warning,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    assert 0 < int(seconds) < int(warning)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_watcher_is_a_step_that_ends_with_the_job(script: Path):
    (line,) = re.findall("^(.*)muster watch .*&$", script.read_text(), re.MULTILINE)
    assert line.startswith("srun --overlap ")


def test_scripts_of_both_launchers_are_there():
    assert [script.name for script in SCRIPTS] == ["ranks.sbatch", "torchrun.sbatch"]


COMMANDS = {
    # Starts the agents one after the other, and ends with the highest code, as srun does.
    "srun": """
        while [[ "$1" == --* ]]; do shift; done
        highest=0
        if [ "$1" = muster ]; then exit 0; fi
        for code in $CODES; do
            CODE=$code "$@"
            ended=$?
            if [ "$ended" -gt "$highest" ]; then highest=$ended; fi
        done
        exit "$highest"
    """,
    "torchrun": 'exit "$CODE"',
    "muster": 'echo "RUN   STATE"; echo "$3   $STATE   1"',
    "squeue": "echo RUNNING",
    "scontrol": 'echo "$@" >> "$CALLS"',
}


@pytest.mark.parametrize(
    ("codes", "state", "ends", "requeued"),
    [
        pytest.param("0 0", "CLOSED", 0, False, id="finished"),
        pytest.param("75 75", "STOPPED", 75, True, id="stopped to be resumed"),
        pytest.param("75 0", "CLOSED", 0, False, id="finished without an evicted node"),
        pytest.param("75 1", "CLOSED", 76, False, id="failed without an evicted node"),
        pytest.param("1 1", "CLOSED", 76, False, id="failed"),
        pytest.param("137 75", "CLOSED", 137, False, id="an agent was killed"),
    ],
)
def test_job_is_requeued_if_and_only_if_it_was_stopped_to_be_resumed(
    tmp_path: Path, codes: str, state: str, ends: int, requeued: bool
):
    for name, script in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "MUSTER_ENDPOINT": "muster.example:7550",
        "CODES": codes,
        "STATE": state,
        "CALLS": str(calls),
    }
    (torchrun,) = (one for one in SCRIPTS if one.name == "torchrun.sbatch")
    ended = subprocess.run(["bash", torchrun, "train.py"], env=environment, timeout=PATIENCE, check=False)
    assert ended.returncode == ends
    assert calls.exists() is requeued
