"""Keepers of the node, which outlive the ranks and everything that started these."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from lab.patience import until
from lab.processes.coordinator import Coordinator
from lab.processes.fork_client import MUSTER, popen
from tests.support.saves.local_ranks import RUN, LocalJob, Node, local_job

HOST = "127.0.0.2"
"""Another address than ranks would use by themselves, as a pod's is."""


class NodeKeepers:
    """``muster keep --runs`` on each node."""

    def __init__(self, endpoint: str, nodes: list[Node]) -> None:
        self.processes: list[Popen[Any]] = []
        for node in nodes:
            node.folder.mkdir(parents=True, exist_ok=True)
            with Path(f"{node.folder}.log").open("ab") as log:
                self.processes.append(
                    popen(
                        [
                            *(str(MUSTER), "keep"),
                            *(f"--folder={node.folder}", f"--endpoint={endpoint}", f"--runs={RUN}*"),
                            *(f"--listen-ranks={HOST}:0", "--advertise=127.0.0.1"),
                        ],
                        stdout=log,
                        stderr=log,
                    )
                )

    def stop(self) -> list[int]:
        """SIGTERM to all; their exit codes."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        return [process.wait() for process in self.processes]


@pytest.fixture
def job(tmp_path: Path, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalJob]:
    """A job of three nodes that uses the nodes' keepers."""
    monkeypatch.setenv("MUSTER_KEEPER", "node")
    with local_job(tmp_path, coordinator.endpoint, 3) as made:
        keepers = NodeKeepers(coordinator.endpoint, made.nodes)
        yield made
        assert keepers.stop() == [0] * 3
        until(lambda: not any(node.keeper for node in made.nodes), "keepers outlive their node's command")


def url_of(node: Node) -> str:
    return str(json.loads((node.kept / "keeper.json").read_bytes())["url"])


def test_keepers_of_nodes_outlive_all_ranks_and_serve_nodes_that_the_job_has_left(job: LocalJob):
    assert job.begin(0, 1, persist_every=100) == [None] * 2
    job.save(1, 2, wait_for="replicated")
    pids = [node.keeper for node in job.nodes[:2]]
    assert None not in pids
    assert all(url_of(node).startswith(f"http://{HOST}:") for node in job.nodes[:2])
    job.kill()
    job.hide_shared()
    # Both nodes of the job are others now, or have lost their disk: the parts are where no rank is any more.
    job.nodes[1].lose()
    assert job.begin(1, 2) == [None] * 2
    assert job.all("resume") == ["step 2, local"] * 2
    assert job.nodes[0].keeper == pids[0]
    assert not (job.nodes[0].kept / "keeper.log").exists()


def test_keeper_that_is_killed_is_replaced_by_its_node(job: LocalJob):
    assert job.begin() == [None] * 3
    job.save(1, wait_for="replicated")
    before = job.nodes[1].keeper
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: job.nodes[1].keeper not in (None, before))
    job.save(2, wait_for="replicated")
    assert job.begin() == [None] * 3
    assert job.all("resume") == ["step 2, local"] * 3
