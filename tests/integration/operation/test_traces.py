"""Traces of a real coordinator: at a real receiver, at a dead one, and at one that never answers."""

import json
import os
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from lab.otlp_receiver import LONGEST_CALL, attributes, receiver
from lab.patience import PATIENCE
from lab.processes.command import job, output
from lab.processes.coordinator import Coordinator, free_port
from muster.client.trace_ids import barrier_trace, round_trace, trace_text
from muster.client.tracing import ENDPOINT
from muster.worker.node.membership import NodeMembership
from tests.support.node_config import node_config


def traced(folder: Path, endpoint: str) -> Coordinator:
    environment = {**os.environ, **LONGEST_CALL, ENDPOINT: endpoint}
    return Coordinator(folder, state="memory:", environment=environment)


def test_receiver_gets_the_spans_of_a_start_and_a_barrier(tmp_path: Path):
    with receiver() as received, traced(tmp_path, received.endpoint) as coordinator, job(coordinator):
        spans = received.await_spans(lambda found: len(found) == 2)
        ((service, span),) = [(service, one) for service, one in spans if one.name == "barrier"]
        address = f"http://127.0.0.1:{coordinator.http_port}/metrics"
        request = Request(address, headers={"Accept": "application/openmetrics-text"})
        with urlopen(request, timeout=PATIENCE) as response:
            metrics = response.read().decode()
    assert {one.name for _, one in spans} == {"start", "barrier"}
    assert f'# {{trace_id="{span.trace_id.hex()}"}}' in metrics
    assert service == "muster-coordinator"
    assert span.trace_id == barrier_trace("job1", "checkpoint", 0).to_bytes(16, "big")
    assert attributes(span)["muster.run"] == "job1"
    assert [event.name for event in span.events] == ["last arrival", "decided", "committed"]
    assert span.start_time_unix_nano <= span.events[0].time_unix_nano <= span.end_time_unix_nano
    decided, committed = (event.time_unix_nano for event in span.events[1:])
    assert decided <= committed <= span.end_time_unix_nano


def test_receiver_gets_the_span_of_a_rendezvous_round(tmp_path: Path):
    with receiver() as received, traced(tmp_path, received.endpoint) as coordinator:
        node = NodeMembership(node_config(coordinator.endpoint, "job1"))
        node.join()
        node.leave("the test is over")
        spans = received.await_spans(lambda found: any(one.name == "rendezvous round" for _, one in found))
    (span,) = (one for _, one in spans if one.name == "rendezvous round")
    assert span.trace_id == round_trace("job1", 0).to_bytes(16, "big")
    assert attributes(span)["muster.run"] == "job1"
    assert span.start_time_unix_nano <= span.end_time_unix_nano


def test_restart_is_a_start_span_with_a_higher_epoch(tmp_path: Path):
    with receiver() as received:
        environment = {**os.environ, ENDPOINT: received.endpoint}
        with Coordinator(tmp_path, environment=environment) as coordinator:
            received.await_spans(lambda found: len(found) == 1)
            coordinator.restart()
            spans = [span for _, span in received.await_spans(lambda found: len(found) == 2)]
    assert [span.name for span in spans] == ["start", "start"]
    first, second = (int(str(attributes(span)["muster.epoch"])) for span in spans)
    assert second > first
    assert spans[0].trace_id != spans[1].trace_id


@pytest.mark.parametrize("blocks", [True, False])
def test_barriers_are_decided_and_exit_is_bounded_when_nobody_takes_traces(tmp_path: Path, blocks: bool):
    with receiver(blocks=True) as received:
        endpoint = received.endpoint if blocks else f"http://127.0.0.1:{free_port()}"
        with traced(tmp_path, endpoint) as coordinator:
            with job(coordinator) as running:  # The first barrier is decided.
                if blocks:
                    assert received.called.wait(30)
                running.arrive(1, [3])
                assert running.decision().sequence == 1
            assert coordinator.stop() == 0


def test_trace_command_draws_a_decided_and_an_open_barrier(tmp_path: Path):
    with Coordinator(tmp_path, state="memory:") as coordinator, job(coordinator):
        decided = output(coordinator.endpoint, "trace", "job1", "checkpoint", "0")
        waiting = json.loads(output(coordinator.endpoint, "trace", "job1", "checkpoint", "1", "-o", "json"))
    assert f"Trace:    {trace_text(barrier_trace('job1', 'checkpoint', 0))}\n" in decided
    assert "ranks arrive  " in decided
    assert waiting["trace_id"] == trace_text(barrier_trace("job1", "checkpoint", 1))
    assert waiting["phases"][0]["name"] == "ranks arrive, so far"
    assert waiting["barrier"]["arrived"] == 3
