"""Saves of real ranks with tracing on: one trace for each, and the same saves when nobody takes it."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from lab.otlp_receiver import LONGEST_CALL, attributes, receiver
from lab.patience import PATIENCE
from lab.processes import fork_client
from lab.processes.coordinator import Coordinator, free_port
from muster.client.trace_ids import barrier_trace
from muster.client.tracing import ENDPOINT

ROOT = Path(__file__).resolve().parents[3]
WORLD = 2
SAVED = ["saved 1 [1]", "saved 2 [2]"]
PHASES = ("save", "stage", "plan", "fork", "write", "vote", "commit", "finalize")


def train(folder: Path, coordinator: Coordinator, environment: Mapping[str, str]) -> None:
    """Run a job that saves twice, and see that it does and ends."""
    ranks = [
        fork_client.popen(
            [
                *(sys.executable, "-m", "tests.support.saves.traced_job"),
                *(str(folder / "checkpoints"), str(rank), str(WORLD), str(folder / "meeting")),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                **environment,
                "MUSTER_ENDPOINT": coordinator.endpoint,
                "MUSTER_RUN_ID": "job1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    for rank in ranks:
        printed, _ = rank.communicate(timeout=PATIENCE)
        assert (printed.splitlines(), rank.returncode) == (SAVED, 0)
    assert {one.name for one in (folder / "checkpoints").glob("step-*")} == {
        "step-0000000001",
        "step-0000000002",
    }


def test_spans_of_all_ranks_and_the_coordinator_meet_in_the_saves_trace(tmp_path: Path):
    with receiver() as received:
        environment = {ENDPOINT: received.endpoint}
        with Coordinator(tmp_path, environment={**os.environ, **environment}) as coordinator:
            train(tmp_path, coordinator, environment)
            assert coordinator.stop() == 0
        spans = received.spans()
    assert [attributes(one)["muster.epoch"] for _, one in spans if one.name == "start"] == [1]
    (prefix,) = {str(attributes(one)["muster.prefix"]) for _, one in spans if one.name == "save"}
    for sequence in (0, 1):
        trace = barrier_trace("job1", prefix, sequence).to_bytes(16, "big")
        mine = [(service, one) for service, one in spans if one.trace_id == trace]
        assert Counter(one.name for _, one in mine) == {"barrier": 1, **dict.fromkeys(PHASES, WORLD)}
        assert {service for service, one in mine if one.name == "barrier"} == {"muster-coordinator"}
        (root,) = (one for _, one in mine if one.name == "barrier")
        saves = [one for _, one in mine if one.name == "save"]
        assert {one.parent_span_id for one in saves} == {root.span_id}
        assert {attributes(one)["muster.rank"] for one in saves} == {0, 1}


@pytest.mark.parametrize("blocks", [True, False])
def test_saves_and_exit_are_the_same_when_nobody_takes_traces(tmp_path: Path, blocks: bool):
    with receiver(blocks=True) as received, Coordinator(tmp_path) as coordinator:
        endpoint = received.endpoint if blocks else f"http://127.0.0.1:{free_port()}"
        train(tmp_path, coordinator, {ENDPOINT: endpoint, **LONGEST_CALL})
        assert received.called.is_set() == blocks
