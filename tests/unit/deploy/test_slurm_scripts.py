"""What both batch scripts for Slurm do when the time limit is near; tests/integration/slurm runs them."""

import re
from pathlib import Path

import pytest

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
