"""Watchers of two nodes, a metadata server each, and a real coordinator with a rank on each node."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import pytest

from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator
from lab.processes.watcher import Watcher
from lab.watching.metadata import FakeAws
from muster.v1 import run_pb2, run_pb2_grpc
from tests.support.watching.ranks import rank_on

NODES = ("node-1", "node-2")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(tmp_path, state="memory:") as running:
        yield running


@pytest.fixture
def connection(coordinator: Coordinator) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(coordinator.endpoint) as opened:
        yield opened


def save_of(connection: grpc.Channel, run_id: str) -> run_pb2.Save | None:
    request = run_pb2.RunServiceGetRequest(run_id=run_id)
    run = run_pb2_grpc.RunServiceStub(connection).Get(request, timeout=PATIENCE).run
    return run.save if run.HasField("save") else None


def test_two_nodes_of_a_run_are_one_save_and_other_runs_train_on(
    coordinator: Coordinator, connection: grpc.Channel, tmp_path: Path
):
    with ExitStack() as stack:
        clouds = [stack.enter_context(FakeAws()) for _ in NODES]
        for number, node in enumerate(NODES):
            stack.enter_context(rank_on(connection, node, "both", number))
        stack.enter_context(rank_on(connection, "node-3", "elsewhere"))
        watchers = [
            Watcher(
                tmp_path,
                coordinator.endpoint,
                node,
                "aws",
                extra=(f"--metadata-url={cloud.base}", "--interval=0.1"),
                environment=dict(os.environ),
            )
            for node, cloud in zip(NODES, clouds, strict=True)
        ]
        for watcher in watchers:
            stack.enter_context(watcher)
        clouds[0].recommend_rebalance()
        until(lambda: save_of(connection, "both"))
        advised = save_of(connection, "both")
        assert advised is not None
        assert not advised.stop
        for cloud in clouds:
            cloud.interrupt(seconds=120)
        for watcher in watchers:
            until(partial(asked, watcher, 1))
        stopping = save_of(connection, "both")
        assert stopping is not None
        assert stopping.stop
        for watcher in watchers:
            watcher.kill()
            watcher.start()
            until(partial(asked, watcher, 2))
        assert save_of(connection, "both") == stopping
        assert save_of(connection, "elsewhere") is None


def asked(watcher: Watcher, times: int) -> bool:
    """Return whether a watcher's starts had the run saved so often for the interruption."""
    lines = [line for line in watcher.log.splitlines() if "aws/spot" in line]
    return sum("asked to save: both" in line for line in lines) == times
