"""The failure domain of nodes on a real Slurm that has switches."""

import sys
import tempfile
from pathlib import Path

from lab.processes.slurm import Slurm

PROGRAM = """
import os
from muster.client.failure_domain import failure_domain
print(os.environ["SLURMD_NODENAME"], failure_domain())
"""


def test_failure_domain_of_a_task_is_the_leaf_switch_of_its_node():
    switches = {"rack-1": ["n1"], "rack-2": ["n2", "n3"]}
    # Slurm's sockets need short paths.
    with (
        tempfile.TemporaryDirectory(prefix="s") as folder,
        Slurm(Path(folder), 3, switches=switches) as slurm,
    ):
        said = slurm.call("srun", "--nodes=3", sys.executable, "-c", PROGRAM)
    assert sorted(said.splitlines()) == ["n1 rack-1", "n2 rack-2", "n3 rack-2"]
