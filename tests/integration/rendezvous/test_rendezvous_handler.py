"""The rendezvous handler under faults and with bad input: what a user hears, and what goes on undisturbed."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)

import muster.worker.node.dialogue
from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator, free_port
from muster.worker import GrpcBarrier
from muster.worker.node.membership import NodeConfig, NodeMembership, Place
from tests.support import launches, store_users
from tests.support.expect import some
from tests.support.grpc_server import serving
from tests.support.rendezvous_runs import (
    Joining,
    MusterRendezvous,
    RendezvousRun,
    Seen,
    in_thread,
    kept_environment,
    meeting,
)

pytestmark = pytest.mark.also_through_relay

UNHURRIED = 110
"""Seconds of a last call in which more nodes than the fewest come; with the most of them it is over."""


@pytest.fixture
def run(coordinator: Coordinator) -> Iterator[MusterRendezvous]:
    with kept_environment(), meeting(MusterRendezvous(coordinator, "job")) as made:
        yield made


class Elsewhere(RendezvousRun):
    """A run at a port where no coordinator is."""

    backend = "muster"

    def __init__(self, port: int) -> None:
        super().__init__("job")
        self.port = port


def elsewhere(port: int, **conf: Any) -> Joining:
    return Joining(Elsewhere(port).node("1", **({"read_timeout": 1, "close_timeout": 1} | conf)))


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize("value", ["soon", "0", "-1", "1.5", ""])
def test_a_setting_that_is_no_number_is_named(run: MusterRendezvous, value: str):
    with pytest.raises(ValueError, match="must be a whole number above 0") as caught:
        run.node("1", join_timeout=value)  # type: ignore[arg-type]
    assert f"--rdzv-conf join_timeout={value}:" in str(caught.value)


def test_fewer_most_than_least_nodes_is_refused_by_torch_before_us(run: MusterRendezvous):
    with pytest.raises(ValueError, match="maximum number of rendezvous nodes"):
        run.node("3:2")


def test_a_run_without_a_name_is_refused_as_in_torch(coordinator: Coordinator):
    made = MusterRendezvous(coordinator)
    made.run_id = ""
    with pytest.raises(ValueError, match="--rdzv-id"):
        made.node("1")


def test_a_name_that_is_too_long_is_refused_in_short(coordinator: Coordinator):
    error = Joining(MusterRendezvous(coordinator, "x" * 10_240).node("1")).error()
    assert isinstance(error, RendezvousStateError)
    assert "run_id" in str(error)
    assert "it has 10,240 bytes and may have 256" in str(error)
    assert len(str(error)) < 200


def test_address_with_control_characters_is_refused_and_shown_escaped(run: MusterRendezvous):
    error = Joining(run.node("1", "node\x1b[31m-1")).error()
    assert isinstance(error, RendezvousStateError)
    assert "address" in str(error)
    assert "control characters are not allowed" in str(error)
    assert "\x1b" not in str(error)
    assert run.seen() == Seen()


def test_nodes_that_disagree_are_refused_and_others_are_unaffected(run: MusterRendezvous):
    first = Joining(run.node("2"))
    until(lambda: run.seen().participants == 1)
    error = Joining(run.node("1:4")).error()
    assert isinstance(error, RendezvousStateError)
    assert "asks for 1 to 4 nodes, and the nodes of run job for 2 nodes" in str(error)
    second = Joining(run.node("2"))
    assert {first.info().rank, second.info().rank} == {0, 1}


def test_an_sdk_of_another_version_is_refused_with_both_versions(
    run: MusterRendezvous, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(muster.worker.node.dialogue, "PROTOCOL_VERSION", 2)
    error = Joining(run.node("1")).error()
    assert isinstance(error, RendezvousConnectionError)
    assert "protocol_version = 2" in str(error)
    assert "speaks version 1" in str(error)


# ---------------------------------------------------------------------- nobody there, or somebody else


def test_where_nobody_listens_it_tries_again_and_says_where_and_why():
    began = time.monotonic()
    port = free_port()
    # Its relay holds a call for 3 s, and then it has tried the coordinator itself as well.
    error = elsewhere(port, read_timeout=8).error()
    assert isinstance(error, RendezvousConnectionError)
    assert f"127.0.0.1:{port} could not be reached within the timeout of 8 s; last error: " in str(error)
    assert "Connection refused" in str(error)
    assert "--rdzv-endpoint" in str(error)
    assert time.monotonic() - began >= 8


def test_a_coordinator_that_starts_later_is_found(tmp_path: Path):
    late = Coordinator(tmp_path)
    made = MusterRendezvous(late, "job")
    with kept_environment():
        waiting = Joining(made.node("1"))
        try:
            late.start()
            assert waiting.info().world_size == 1
            made.end()
        finally:
            late.kill()


def test_another_server_that_speaks_grpc_is_told_apart_at_once():
    with serving() as endpoint:
        error = elsewhere(int(endpoint.rpartition(":")[2]), read_timeout=20).error()
    assert isinstance(error, RendezvousConnectionError)
    assert f"{endpoint} does not serve muster.v1.RendezvousService" in str(error)


def test_a_server_that_does_not_speak_grpc_is_an_error(coordinator: Coordinator):
    error = elsewhere(coordinator.http_port).error()
    assert isinstance(error, RendezvousConnectionError)
    assert f"127.0.0.1:{coordinator.http_port} could not be reached within the timeout of 1 s" in str(error)


def test_without_a_coordinator_shutting_down_says_so_and_closing_raises():
    handler = Elsewhere(free_port()).node("1", read_timeout=1, close_timeout=1)
    assert handler.shutdown() is False
    with pytest.raises(RendezvousConnectionError, match="did not answer"):
        handler.set_closed()
    with pytest.raises(RendezvousConnectionError, match="did not answer"):
        handler.is_closed()


PROGRAM = "raise SystemExit('the worker must not be started')"


def test_torchrun_shows_both_to_its_user(tmp_path: Path):
    port = free_port()
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def torchrun(conf: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=muster"),
                *(f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", f"--rdzv-conf={conf}"),
                *("--nnodes=1", "--nproc-per-node=1", "--local-addr=127.0.0.1", str(script)),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    runs = [torchrun("join_timeout=soon"), torchrun("read_timeout=8,close_timeout=1")]
    said = [run.communicate(timeout=PATIENCE)[0] for run in runs]
    assert [run.returncode for run in runs] == [1, 1], said
    assert "ValueError: --rdzv-conf join_timeout=soon: it must be a whole number above 0" in said[0]
    assert "RendezvousConnectionError: the coordinator at unix://" in said[1]
    assert f",127.0.0.1:{port} could not be reached within the timeout of 8 s" in said[1]
    assert "Connection refused" in said[1]
    assert "Check the address (--rdzv-endpoint) and that it runs" in said[1]
    assert "the worker must not be started" not in "".join(said)


# ---------------------------------------------------------------------- the closed state


def test_all_hear_by_push_that_the_run_is_closed(run: MusterRendezvous, coordinator: Coordinator):
    first, second = (run.node("1:2", f"127.0.0.{number}", last_call_timeout=UNHURRIED) for number in (1, 2))
    for joining in [Joining(first), Joining(second)]:
        joining.info()
    standing_by = Joining(run.node("1:2", last_call_timeout=UNHURRIED))
    until(lambda: run.seen().redundant == 1)
    barrier = GrpcBarrier(0, 1, "checkpoint", coordinator.endpoint, 20, 5, run_id="job", generation=0)
    before = barrier.closed
    assert before is None
    first.set_closed()
    # Neither asks anyone: they have been told.
    until(second.is_closed)
    until(lambda: barrier.closed is not None)
    assert isinstance(standing_by.error(), RendezvousGracefulExitError)
    # Closing ends membership; a last checkpoint may still commit.
    barrier.execute_barrier()
    second.set_closed()
    assert barrier.closed is not None
    assert barrier.closed.by == f"node 127.0.0.1 (pid {os.getpid()})", "the first one counts"
    assert run.show().closed.by == barrier.closed.by


def test_every_wait_for_a_round_ends_when_the_run_is_closed(run: MusterRendezvous):
    waiting = [Joining(run.node("8")) for _ in range(6)]
    until(lambda: run.seen().participants == 6)
    run.node("8").set_closed()
    errors = [joining.error() for joining in waiting]
    assert {type(error) for error in errors} == {RendezvousClosedError}
    assert "A closed run admits no newcomers: start the job under another run id." in str(errors[0])


def test_a_run_stays_closed_when_the_coordinator_is_killed(run: MusterRendezvous, coordinator: Coordinator):
    first = run.node("1")
    Joining(first).info()
    first.set_closed()
    coordinator.restart()
    assert isinstance(Joining(run.node("1")).error(), RendezvousClosedError)
    assert run.node("1").is_closed()


def test_the_closed_state_costs_no_round_trip(run: MusterRendezvous, coordinator: Coordinator):
    first = run.node("1", read_timeout=600)
    Joining(first).info()
    answers: list[tuple[bool, int]] = []
    os.kill(coordinator.pid, signal.SIGSTOP)
    try:
        answers.append((first.is_closed(), first.num_nodes_waiting()))
    finally:
        os.kill(coordinator.pid, signal.SIGCONT)
    membership = first._membership  # type: ignore[attr-defined]
    coordinator.kill()
    until(lambda: not membership._stream.connected)
    answers.append((first.is_closed(), first.num_nodes_waiting()))
    assert answers == [(False, 0), (False, 0)]
    # And what is true after that is heard when the coordinator is back.
    coordinator.start()
    run.node("1").set_closed()
    until(first.is_closed)


# ---------------------------------------------------------------------- a coordinator that comes and goes


@pytest.mark.parametrize("end", ["drained", "killed"])
def test_nodes_that_wait_and_nodes_of_a_round_outlive_the_coordinator(
    run: MusterRendezvous, coordinator: Coordinator, end: str
):
    def renew() -> None:
        if end == "drained":
            assert coordinator.stop() == 0
        else:
            coordinator.kill()
        coordinator.start()

    nodes = [
        run.node("2:3", f"127.0.0.{number}", last_call_timeout=2, keep_alive_max_attempt=60)
        for number in (1, 2, 3)
    ]
    first = Joining(nodes[0])
    until(lambda: run.seen().participants == 1)
    renew()
    until(lambda: run.seen().participants == 1)
    second = Joining(nodes[1])
    infos = [first.info(), second.info()]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
    renew()
    until(lambda: [node.connected for node in run.show().nodes] == [True, True])
    assert run.seen() == Seen(True, 2, 0, 0)
    third = Joining(nodes[2])
    until(lambda: nodes[0].num_nodes_waiting() == nodes[1].num_nodes_waiting() == 1)
    renew()
    until(lambda: run.seen() == Seen(True, 2, 1, 0))
    again = [Joining(node) for node in nodes[:2]]
    infos = [joining.info() for joining in [*again, third]]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    assert [round.round for round in run.show().rounds] == [1, 0]


# ---------------------------------------------------------------------- what people see


def test_rounds_show_up_in_the_metrics(run: MusterRendezvous, coordinator: Coordinator):
    nodes = [run.node("1:2", last_call_timeout=UNHURRIED) for _ in range(2)]
    for joining in [Joining(node) for node in nodes]:
        joining.info()
    for joining in [Joining(node) for node in nodes]:
        joining.info()
    nodes[0].set_closed()
    text = coordinator.get("/metrics")[1]
    assert 'muster_rendezvous_rounds_total{run="job"} 2.0' in text
    assert 'muster_rendezvous_join_seconds_count{run="job"} 2.0' in text
    assert 'muster_rendezvous_waiting_nodes{run="job"} 0.0' in text
    assert 'muster_run_closed{run="job"} 1.0' in text


def test_no_thread_and_no_stream_is_left_when_a_node_has_shut_down(run: MusterRendezvous):
    handler = run.node("1")
    Joining(handler).info()
    assert handler.shutdown()
    until(lambda: not any(thread.name.startswith("muster-node") for thread in threading.enumerate()))
    assert run.seen() == Seen()


def test_a_handler_that_nobody_holds_lets_its_node_go(run: MusterRendezvous):
    """With the most nodes reached, the next one of the node would stand by for ever."""
    dropped = run.node("1")
    Joining(dropped).info()
    run.nodes.remove(dropped)
    del dropped
    gc.collect()
    assert Joining(run.node("1")).info().world_size == 1
    (gone,) = run.show().departed
    assert gone.reason == "left (nobody holds its handler any more)"


def test_a_process_may_launch_and_fork_in_turn(coordinator: Coordinator):
    """Workers and launching children are forked; what was shut down, or dropped, is given back."""
    (lines,) = store_users.together(launches.in_turn, 1, coordinator.endpoint)
    assert lines == [
        *("the process launched 2 workers", "its child launched 2 workers") * 2,
        *("its child launched 2 workers",) * 2,
        "process 2 was forked from process 1, which holds a store",
    ]


# ---------------------------------------------------------------------- rank 0 does not speak


def test_round_is_abandoned_if_rank_0_dies_before_publishing_its_address(
    coordinator: Coordinator, run: MusterRendezvous
):
    config = NodeConfig(
        endpoint=coordinator.endpoint,
        run_id="job",
        address="127.0.0.1",
        min_nodes=2,
        max_nodes=2,
        join_timeout=20,
        last_call_timeout=1,
        keep_alive_timeout=4,
        connect_timeout=10,
        call_timeout=5,
    )
    mute = NodeMembership(config)
    place = in_thread(mute.join)
    until(lambda: run.seen().participants == 1)
    survivor = Joining(run.node("2", read_timeout=2))
    assert place.result(PATIENCE) == Place(0, 0, 2)
    mute.leave("it dies")
    newcomer = Joining(run.node("2"))
    assert {survivor.info().world_size, newcomer.info().world_size} == {2}
    theirs, mine = (some(one.info().bootstrap_store_info) for one in (survivor, newcomer))
    assert theirs.master_port == mine.master_port
    assert run.seen().participants == 2


def test_a_node_that_cannot_host_the_workers_store_says_which_option_helps(run: MusterRendezvous):
    error = Joining(run.node("1", "no-such-host.invalid", read_timeout=1)).error()
    assert isinstance(error, RendezvousConnectionError)
    assert "cannot host the workers' store at its address, no-such-host.invalid" in str(error)
    assert "--local-addr" in str(error)
