"""A job under torchrun whose node a cloud takes away: all ranks save at one step in time, and it stops."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.drain import NUMBERS, PROGRAM, reported_steps
from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator
from lab.processes.torchrun import agents
from lab.processes.watcher import Watcher
from lab.watching.metadata import FakeAws, FakeAzure, FakeGoogle, FakeMetadataServer

NODES = ("node-1", "node-2")
RANKS_PER_NODE = 2
RANKS = len(NODES) * RANKS_PER_NODE
STOPPED = 75
SECONDS = 30
"""From the notice until the node goes."""


@contextmanager
def job(endpoint: str, folder: Path) -> Iterator[list[subprocess.Popen[Any]]]:
    """Start an agent on each node."""
    arguments = [
        *("--rdzv-backend=muster", "--rdzv-id=job", f"--rdzv-endpoint={endpoint}"),
        *(f"--nnodes={len(NODES)}", f"--nproc-per-node={RANKS_PER_NODE}", "--local-addr=127.0.0.1"),
        *(str(PROGRAM), str(folder), "point", str(NUMBERS)),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{PATIENCE:.0f}",
    }
    environments = [environment | {"MUSTER_NODE_NAME": node} for node in NODES]
    with agents(arguments, environments, folder / "agents.log") as started:
        yield started


def interrupt(server: FakeMetadataServer) -> None:
    """Take the node away in ``SECONDS``."""
    match server:
        case FakeAws():
            server.interrupt(seconds=SECONDS)
        case FakeGoogle():
            server.preempt()
        case FakeAzure():
            server.schedule("Preempt", seconds=SECONDS)
        case _:
            raise AssertionError


@pytest.mark.parametrize(("source", "make"), [("aws", FakeAws), ("google", FakeGoogle), ("azure", FakeAzure)])
def test_job_saves_at_one_step_and_stops_before_its_node_goes(
    source: str, make: Callable[[], FakeMetadataServer], tmp_path: Path
):
    with (
        make() as server,
        Coordinator(tmp_path, state="memory:") as coordinator,
        Watcher(
            tmp_path,
            coordinator.endpoint,
            NODES[-1],
            source,
            extra=(f"--metadata-url={server.base}", "--interval=0.1"),
            environment=dict(os.environ),
        ),
        job(coordinator.endpoint, tmp_path) as agents,
    ):
        said = (tmp_path / "agents.log").read_text
        until(lambda: len(reported_steps(tmp_path, RANKS, "began")) == RANKS, said)
        interrupt(server)
        assert [agent.wait(PATIENCE) for agent in agents] == [STOPPED] * len(NODES), said()
        assert len(coordinator.log("save.asked")) == len(coordinator.log("save.done")) == 1
        assert coordinator.log("save.late") == []
    saved = reported_steps(tmp_path, RANKS, "saved")
    assert len(saved) == RANKS
    assert len(set(saved)) == 1
    left = reported_steps(tmp_path, RANKS, "left")
    assert len(left) == RANKS
    assert 0 < min(left) <= max(left) <= SECONDS * 1000
