"""Jobs behind real relays: ranks hear the same decisions as without one, also if a process dies."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.patience import PATIENCE, until
from lab.processes import command
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.relay import Relay
from tests.support.members import connected, members
from tests.support.ranks import Heard, Identity, Rank, everyone, ranks

TTL = 3.0
LONG_TTL = 9.0
"""Seconds; a keepalive finds a silent peer after a third of it at the earliest."""


@contextmanager
def world(*endpoints: str, **identity: Any) -> Iterator[list[Rank]]:
    """One process for each of a run's ranks, each with an endpoint of its own."""
    size = len(endpoints)
    processes = [Rank(Identity(endpoint, rank, size, **identity)) for rank, endpoint in enumerate(endpoints)]
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


def outcomes(heard: list[Heard]) -> list[tuple[str, int]]:
    return [(one.outcome, one.sequence) for one in heard]


# ---------------------------------------------------------------------- the same scene on three ways


def scene(coordinator: Coordinator, ways: tuple[str, str, str], run_id: str) -> list[tuple[str, list[Any]]]:
    """All that can become of a barrier, as three ranks hear it, each on its way to the coordinator."""
    outcomes: list[tuple[str, list[Any]]] = []

    def tell(what: str, *heard: Heard) -> None:
        outcomes.append((what, [_bare(one, run_id) for one in heard]))

    with world(*ways, run_id=run_id) as (zero, one, two), ExitStack() as more:

        def another(rank: int, size: int = 3) -> Rank:
            (process,) = more.enter_context(ranks(ways[rank], size, rank, run_id=run_id))
            return process

        def muster(*arguments: str) -> None:
            command.muster(coordinator.endpoint, *arguments).check_returncode()

        tell("release", *everyone([zero, one, two]))
        for rank in (zero, one, two):
            rank.tell("barrier", payload=f"from {rank.rank}".encode())
        tell("gather", *(rank.answer() for rank in (zero, one, two)))
        # What fails at once names all who had not arrived: here and below one comes after the other.
        tell("vote", one.ask("barrier", failure="disk full: /ckpt"), zero.ask("barrier"), two.ask("barrier"))
        tell("timeout", *everyone([zero, one], timeout=1.0))
        tell("late", two.ask("barrier"))
        tell("subset", *everyone([zero, two], prefix="odd", participants=[0, 2]))
        tell("outsider", one.ask("join", prefix="odd", participants=[0, 2]))
        larger = another(2, size=4)
        for rank in (zero, one, larger):
            rank.ask("join", prefix="eval")
        tell("mismatch", *(rank.ask("barrier", prefix="eval") for rank in (zero, one, larger)))
        muster("evict", run_id, "2", "--reason", "a broken GPU")
        tell("evicted", *(rank.ask("barrier") for rank in (zero, one, two)))
        tell("evicted, too", larger.ask("barrier", prefix="eval"))
        two = another(2)
        two.ask("join")
        tell("after the eviction", *everyone([zero, one, two]))
        one.kill()
        tell("killed", *everyone([zero, two]))
        one = another(1)
        one.ask("join")
        tell("restarted", *everyone([zero, one, two]))
        two.ask("goodbye")
        tell("goodbye", zero.ask("barrier"))
    return outcomes


def _bare(heard: Heard, run_id: str) -> tuple[Any, ...]:
    """What was heard, without what is another in each run."""
    message = re.sub(r"pid \d+", "pid N", heard.message.replace(run_id, "RUN"))
    message = re.sub(r"\d+(\.\d+)? m?s\b", "N s", message)
    message = re.sub(r", rank \d+ last", "", message)
    # What a rank is doing may come too late for the report.
    message = re.sub(r"(still at #\d+\)): [^\n]*", r"\1", message)
    missing = [(one.rank, one.state.name, one.host) for one in heard.missing]
    return heard.outcome, heard.sequence, heard.reason, message, missing, heard.payloads


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Coordinator, Relay, Relay]]:
    """A coordinator, a relay, and another relay that reaches the coordinator through the first."""
    folder = tmp_path_factory.mktemp("stage")
    with (
        Coordinator(folder, session_ttl=TTL) as coordinator,
        Relay(folder, coordinator.endpoint) as near,
        Relay(folder, near.listen) as far,
    ):
        yield coordinator, near, far


@pytest.fixture(scope="module")
def directly(stage: tuple[Coordinator, Relay, Relay]) -> list[tuple[str, list[Any]]]:
    direct = stage[0].endpoint
    return scene(stage[0], (direct, direct, direct), "directly")


def test_the_scene_has_all_outcomes(directly: list[tuple[str, list[Any]]]):
    assert {what: sorted({one[0] for one in heard}) for what, heard in directly} == {
        "release": ["RELEASED"],
        "gather": ["RELEASED"],
        "vote": ["ABORTED"],
        "timeout": ["TIMED_OUT"],
        "late": ["TIMED_OUT"],
        "subset": ["RELEASED"],
        "outsider": ["RefusedError"],
        "mismatch": ["MISMATCHED"],
        "evicted": ["MEMBER_LOST", "RefusedError"],
        "evicted, too": ["RefusedError"],
        "after the eviction": ["RELEASED"],
        "killed": ["MEMBER_LOST"],
        "restarted": ["RELEASED"],
        "goodbye": ["MEMBER_LOST"],
    }


@pytest.mark.parametrize("way", ["one", "two", "each"])
def test_ranks_hear_the_same_through_relays(
    stage: tuple[Coordinator, Relay, Relay], directly: list[tuple[str, list[Any]]], way: str
):
    """Through one, through two in a row, and each rank of a run on another way."""
    coordinator, near, far = stage
    ways = {
        "one": (near.listen, near.listen, near.listen),
        "two": (far.listen, far.listen, far.listen),
        "each": (coordinator.endpoint, near.listen, far.listen),
    }[way]
    before = far.metric("muster_relay_arrivals_total"), near.metric("muster_relay_arrivals_total")
    for mine, its in zip(scene(coordinator, ways, f"by-{way}"), directly, strict=True):
        assert mine == its
    assert near.metric("muster_relay_arrivals_total") > before[1]
    assert (far.metric("muster_relay_arrivals_total") > before[0]) is (way != "one")


# ---------------------------------------------------------------------- deaths


def test_relay_reports_a_dead_worker_at_once_and_its_node_continues(tmp_path: Path):
    with (
        Coordinator(tmp_path, session_ttl=LONG_TTL) as coordinator,
        Relay(tmp_path, coordinator.endpoint) as relay,
        ranks(relay.listen, 4) as (zero, one, two, three),
    ):
        assert outcomes(everyone([zero, one, two, three])) == [("RELEASED", 0)] * 4
        two.kill()
        began = time.monotonic()
        until(lambda: connected(coordinator.endpoint) == [0, 1, 3])
        (lost,) = (one for one in members(coordinator.endpoint) if one.rank == 2)
        known = time.monotonic() - began - lost.since_ms / 1000
        heard = everyone([zero, one, three])
        print(f"known after {known:.2f} s, decided after {time.monotonic() - began:.1f} s of {LONG_TTL:g}")
        assert known < LONG_TTL / 3
        assert outcomes(heard) == [("MEMBER_LOST", 1)] * 3
        assert [one.missing_ranks for one in heard] == [[2]] * 3
        assert heard[0].missing[0].last_seen >= LONG_TTL
        assert [rank.ask("logged") for rank in (zero, one, three)] == [[]] * 3
        assert relay.metric("muster_relay_reconnects_total") == 0


def test_a_node_that_dies_with_its_relay_is_named_to_all_others(tmp_path: Path):
    with (
        Coordinator(tmp_path, session_ttl=TTL) as coordinator,
        Relay(tmp_path, coordinator.endpoint) as its,
        Relay(tmp_path, coordinator.endpoint) as other,
        world(*[its.endpoint] * 8, other.endpoint, other.endpoint, coordinator.endpoint) as job,
    ):
        assert outcomes(everyone(job)) == [("RELEASED", 0)] * 11
        for pid in [*(rank.pid for rank in job[:8]), its.pid]:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        heard = everyone(job[8:])
        print(f"8 ranks named to 3 after {time.monotonic() - began:.2f} s; the TTL is {TTL:g} s")
        assert outcomes(heard) == [("MEMBER_LOST", 1)] * 3
        assert [one.missing_ranks for one in heard] == [list(range(8))] * 3
        assert {one.pid for one in heard[0].missing} == {rank.pid for rank in job[:8]}
        assert len({one.message for one in heard}) == 1


# ---------------------------------------------------------------------- relays come and go


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Coordinator]:
    """A coordinator that takes nobody for dead as long as a test lasts."""
    with Coordinator(tmp_path, session_ttl=PATIENCE) as coordinator:
        yield coordinator


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_without_their_relay_workers_go_on_directly(patient: Coordinator, tmp_path: Path, end: str):
    with Relay(tmp_path, patient.endpoint) as relay, ranks(relay.endpoint, 3) as job:
        assert outcomes(everyone(job)) == [("RELEASED", 0)] * 3
        assert [one.relay != "" for one in members(patient.endpoint)] == [True] * 3
        job[0].tell("barrier")
        job[1].tell("barrier")
        until(lambda: relay.metric("muster_relay_arrivals_total") == 5)
        if end == "killed":
            relay.kill()
        else:
            assert relay.stop() == 0, relay.log_path.read_text()
        assert outcomes([job[2].ask("barrier"), job[0].answer(), job[1].answer()]) == [("RELEASED", 1)] * 3
        assert outcomes(everyone(job)) == [("RELEASED", 2)] * 3
        assert [one.relay for one in members(patient.endpoint)] == [""] * 3
        relay.start()
        with ranks(relay.endpoint, 2, run_id="next") as later:
            assert outcomes(everyone(later)) == [("RELEASED", 0)] * 2
            assert relay.metric("muster_relay_processes") == 2
            # Who found another way stays on it.
            assert outcomes(everyone(job)) == [("RELEASED", 3)] * 3
            assert relay.metric("muster_relay_processes") == 2


def test_a_relay_that_reaches_no_coordinator_is_done_without(patient: Coordinator, tmp_path: Path):
    nowhere = f"127.0.0.1:{free_port()}"
    with (
        Relay(tmp_path, nowhere) as relay,
        ranks(f"{relay.listen},{patient.endpoint}", 2) as job,
    ):
        assert outcomes(everyone(job)) == [("RELEASED", 0)] * 2
        assert [one.relay for one in members(patient.endpoint)] == [""] * 2
        assert relay.metric("muster_relay_upstream_connected") == 0
        assert "this relay does not reach the coordinator (" in relay.log_path.read_text()


def test_rank_with_only_a_relay_waits_until_it_reaches_the_coordinator(patient: Coordinator, tmp_path: Path):
    with Relay(tmp_path, patient.endpoint) as relay, ranks(relay.listen, 2) as job:
        patient.kill()
        for rank in job:
            rank.tell("barrier")
        until(lambda: relay.metric("muster_relay_workers") == 2)
        patient.start()
        assert outcomes([rank.answer() for rank in job]) == [("RELEASED", 0)] * 2
        assert [one.relay != "" for one in members(patient.endpoint)] == [True] * 2


# ---------------------------------------------------------------------- forks


def test_children_of_a_worker_behind_a_relay_save_and_end_well(
    patient: Coordinator, tmp_path: Path, thorough: bool
):
    forks = 500 if thorough else 100
    with Relay(tmp_path, patient.endpoint) as relay, ranks(relay.listen, 2) as job:
        everyone(job)
        assert job[0].ask("fork_and_save", folder=str(tmp_path), count=forks) == [0] * forks
        assert len(list(tmp_path.glob("child-*.pt"))) == forks
        assert outcomes(everyone(job)) == [("RELEASED", 1)] * 2
        assert "forked" in job[0].ask("barrier_in_forked_child", prefix="checkpoint")


AGENT = """
import os
import sys
import torch
from muster.worker.node.relay import start

endpoint, folder, forks = sys.argv[1], sys.argv[2], int(sys.argv[3])
relay = start(endpoint)
print(relay.endpoint, flush=True)
sys.stdin.readline()
statuses = set()
for number in range(forks):
    child = os.fork()
    if child == 0:
        torch.save(torch.full((1000,), number), f"{folder}/child-{number}.pt")
        relay.stop()
        # A few with all handlers of the exit, for which torch takes a second.
        sys.exit(0) if number % 50 == 0 else os._exit(0)
    statuses.add(os.waitpid(child, 0)[1])
print(statuses, flush=True)
sys.stdin.readline()
relay.stop()
"""


def test_an_agent_with_a_relay_forks_children_that_come_and_go(
    patient: Coordinator, tmp_path: Path, thorough: bool
):
    forks, end = 500 if thorough else 100, tmp_path / "end"
    # Not forked, for its children are to end as those of a program that torch is in.
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, patient.endpoint, str(tmp_path), str(forks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        try:
            endpoint = agent.stdout.readline().strip()
            with ranks(endpoint, 2) as job:
                assert outcomes(everyone(job)) == [("RELEASED", 0)] * 2
                # Barriers go on through the relay while its process forks.
                for rank in job:
                    rank.tell("mixed", until=str(end), pause=0.01)
                begun = len(patient.logged("barrier.decided", 2))
                print(file=agent.stdin, flush=True)
                assert agent.stdout.readline().strip() == "{0}"
                meanwhile = len(patient.log("barrier.decided"))
                end.touch()
                assert meanwhile > begun
                assert all(len(rank.answer()) >= meanwhile for rank in job)
                assert len({one.relay for one in members(patient.endpoint)} - {""}) == 1
                assert [rank.ask("logged") for rank in job] == [[], []]
            assert len(list(tmp_path.glob("child-*.pt"))) == forks
            print(file=agent.stdin, flush=True)
            _, said = agent.communicate(timeout=PATIENCE)
            assert (agent.returncode, said) == (0, "")
            assert not Path(endpoint.split(",")[0].removeprefix("unix://")).parent.exists()
        finally:
            agent.kill()
