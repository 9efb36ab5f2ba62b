"""The SDK's session under what a network, a coordinator and its own caller may do to it."""

import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest

import muster.worker
from lab.patience import PATIENCE, until
from lab.processes.command import output
from lab.processes.coordinator import Coordinator
from lab.processes.proxy import Proxy
from muster.client.replicas import Target
from muster.v1 import run_pb2, run_pb2_grpc, session_pb2_grpc
from muster.worker import ConnectError, GrpcBarrier, Outcome, WriteReport
from muster.worker.session.session import Session, SessionConfig
from muster.worker.transport import first_answer, stream
from muster.worker.transport.channel import open_channel
from tests.support.grpc_server import serving
from tests.support.ranks import everyone, ranks
from tests.support.waiters import wait_for_arrivals

pytestmark = pytest.mark.also_through_relay


def barrier(endpoint: str, rank: int = 0, world_size: int = 1, prefix: str = "p", **more: Any) -> GrpcBarrier:
    return GrpcBarrier(rank, world_size, prefix, endpoint, 20, 20, run_id="sdk", generation=0, **more)


def test_a_call_that_cannot_be_made_does_not_hurt_the_session(coordinator: Coordinator):
    good = barrier(coordinator.endpoint)
    for prefix in ("", "x\udcff"):
        with pytest.raises(ValueError, match="prefix"):
            barrier(coordinator.endpoint, prefix=prefix)
    with pytest.raises(muster.worker.RefusedError, match="world_size = 2147483647"):
        barrier(coordinator.endpoint, world_size=2**31 - 1, prefix="large")
    good.execute_barrier()
    coordinator.restart()
    good.execute_barrier()


@pytest.mark.parametrize("reason", ["cannot write /data/\udcff.pt", "x" * 18_000_000])
def test_a_vote_is_heard_whatever_its_reason(coordinator: Coordinator, reason: str):
    good = barrier(coordinator.endpoint)
    assert good.abort(reason).outcome is Outcome.ABORTED
    good.execute_barrier()


def test_save_reports_are_shown_after_a_coordinator_restart(coordinator: Coordinator):
    good = barrier(coordinator.endpoint, prefix="save", host="node-7")
    assert good.vote(report=WriteReport(step=9, bytes=2**30, seconds=1.5, commits=True)).released
    assert not good.vote("disk full", report=WriteReport(step=10)).released
    coordinator.restart()
    good.execute_barrier()
    described = output(coordinator.endpoint, "describe", "run", "sdk")
    assert "Checkpoint:  step 9, committed " in described
    assert " ago; 1.0 GiB; slowest write 1.5s: rank 0 (node-7); 1 so far\n" in described
    (failed,) = (line for line in described.splitlines() if "disk full" in line)
    assert failed.split()[1:3] == ["10", "save#1"]
    header, row = output(coordinator.endpoint, "get", "runs", "-o", "wide").splitlines()
    assert header.endswith("LAST COMMIT")
    assert row.split()[-1].endswith(("ms", "s"))


def test_a_late_hello_of_its_own_does_not_end_a_session(coordinator: Coordinator):
    good = barrier(coordinator.endpoint)
    good.execute_barrier()
    with grpc.insecure_channel(coordinator.endpoint) as channel:
        late = session_pb2_grpc.SessionServiceStub(channel).Connect(iter([good._session._dialogue.hello()]))
        assert next(late).HasField("welcome")
        good.execute_barrier()
        late.cancel()


def test_session_goes_on_when_the_outcome_of_its_barrier_is_not_told(coordinator: Coordinator):
    """The group was reset, and has released #0 again without this process."""
    barrier(coordinator.endpoint).execute_barrier()
    muster.worker.close()
    late = barrier(coordinator.endpoint)
    late._session._dialogue.groups["p"].position = 0
    with pytest.raises(muster.worker.RefusedError, match="was decided before this process joined") as refused:
        late.execute_barrier()
    assert refused.value.reason == "SEQUENCE_BEHIND"
    assert late.sequence == 1
    late.execute_barrier()


def test_an_open_watch_does_not_make_a_draining_coordinator_give_ranks_up(coordinator: Coordinator):
    """The drain waits for the watch for longer than the session TTL."""
    with (
        grpc.insecure_channel(coordinator.endpoint) as channel,
        ranks(coordinator.endpoint, 2) as world,
    ):
        everyone(world)
        world[0].tell("barrier")
        wait_for_arrivals(coordinator.endpoint, 1)
        watch = run_pb2_grpc.RunServiceStub(channel).Watch(run_pb2.WatchRequest())
        next(watch)
        assert coordinator.stop() == 0
        coordinator.session_ttl = PATIENCE  # A process that comes back late is not given up.
        coordinator.start()
        assert [world[1].ask("barrier").outcome, world[0].answer().outcome] == ["RELEASED"] * 2
        with pytest.raises(grpc.RpcError):
            list(watch)


@pytest.mark.back_in_time
def test_session_closed_while_its_stream_is_broken_says_goodbye(coordinator: Coordinator):
    with Proxy(coordinator.port) as proxy, ranks(coordinator.endpoint, 2, 1, run_id="sdk") as (other,):
        other.tell("barrier", prefix="p")
        leaving = barrier(proxy.endpoint, world_size=2)
        leaving.execute_barrier()
        assert other.answer().outcome == "RELEASED"
        other.tell("barrier", prefix="p")
        proxy.cut(refuse=True)
        until(lambda: not leaving._session._stream.connected, "it does not notice")
        # It pauses before it connects again; that is when it is closed.
        proxy.heal()
        muster.worker.close("done")
        assert other.answer().outcome == "MEMBER_LOST"
    gone = [line["reason"] for line in coordinator.logged("member.gone")]
    assert any("rank 0" in line and "left: done" in line for line in gone), gone


def test_group_is_not_joined_after_its_join_timed_out(coordinator: Coordinator):
    good = barrier(coordinator.endpoint)
    coordinator.kill()
    with pytest.raises(ConnectError, match=r"within the timeout of 0\.2 s"):
        GrpcBarrier(0, 3, "late", coordinator.endpoint, 0.2, 20, run_id="sdk", generation=0)
    coordinator.start()
    good.execute_barrier()
    barrier(coordinator.endpoint, prefix="late").execute_barrier()


def test_the_keepalive_follows_a_short_session_ttl(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch):
    used: list[int] = []

    def opened(target: Target) -> grpc.Channel:
        used.append(target.keepalive_ms)
        return open_channel(target)

    monkeypatch.setattr(stream, "open_channel", opened)
    barrier(coordinator.endpoint).execute_barrier()
    assert used == [3_333, 1_000]


@pytest.mark.back_in_time
def test_pings_faster_than_a_long_session_ttl_asks_for_end_no_session(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
):
    """Clients ping before they know the TTL. gRPC would end the connection at the fourth ping."""
    lost = threading.Event()
    monkeypatch.setattr(
        stream, "open_channel", lambda target: open_channel(replace(target, keepalive_ms=600))
    )
    monkeypatch.setattr(stream.ReconnectingStream, "_lost", lambda *_: lost.set())
    idle = barrier(coordinator.endpoint)
    assert not lost.wait(4)
    idle.execute_barrier()


class Mute(session_pb2_grpc.SessionServiceServicer):
    """Takes the first session and says nothing; every later one it refuses."""

    def __init__(self) -> None:
        self.calls = 0
        self.called_again = threading.Event()

    def Connect(self, requests: Any, context: Any) -> Any:  # noqa: N802
        self.calls += 1
        if self.calls == 1:
            list(requests)
        self.called_again.set()
        return iter(())


def test_a_peer_that_never_says_welcome_is_called_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(first_answer, "FIRST_ANSWER_TIMEOUT", 0.2)
    mute = Mute()
    with serving(mute, session_pb2_grpc.add_SessionServiceServicer_to_server) as endpoint:
        opened = Session(SessionConfig(endpoint=endpoint, run_id="r", generation=0, rank=0, host="here"))
        try:
            assert mute.called_again.wait(PATIENCE)
        finally:
            opened.close()
