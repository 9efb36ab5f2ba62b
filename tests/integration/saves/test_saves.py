"""Saves of real ranks at a real coordinator, with children, ranks and the coordinator killed."""

import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from lab.patience import PATIENCE, until
from lab.processes import fork_client
from lab.processes.coordinator import Coordinator
from muster.worker.saves.queue.backlog import MAX_UNDECIDED
from muster.worker.saves.writers.child import wait_readable
from muster.worker.transport.fork_guard import HANDLERS
from tests.support.saves.save_history import Event, verdict, whole_checkpoint, whole_files
from tests.support.saves.savers import Failed, Saver, all_of, savers

pytestmark = pytest.mark.also_through_relay


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def committed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize("kind", ["checkpointer", "queue"])
@pytest.mark.parametrize(
    ("doom", "said"), [("kill", "killed by SIGKILL"), ("exit", "ended with exit status 9")]
)
def test_a_child_that_fails_fails_the_save_everywhere(
    coordinator: Coordinator, folder: Path, kind: str, doom: str, said: str
):
    with savers(coordinator.endpoint, 2, folder, kind=kind) as world:
        all_of(world, "begin")
        all_of(world, "save", step=1)
        assert all_of(world, "finalize") == [[1], [1]]
        world[0].tell("save", step=2)
        world[1].ask("save", step=2, doom=doom)
        world[0].answer()
        for [heard] in all_of(world, "finalize"):
            assert isinstance(heard, Failed)
            assert heard.kind == "AsyncSaveError"
            assert [(one.rank, one.host) for one in heard.failures] == [(1, "node-1")]
            assert said in heard.failures[0].reason
            assert "node-1" in heard.message
            assert said in heard.message
        assert committed(folder) == ["step-0000000001"]
        all_of(world, "save", step=3)
        assert all_of(world, "finalize") == [[3], [3]]
        assert committed(folder) == ["step-0000000001", "step-0000000003"]
        assert all_of(world, "close") == [[], []]


def test_a_rank_that_dies_takes_its_child_along_and_fails_the_save(coordinator: Coordinator, folder: Path):
    with savers(coordinator.endpoint, 2, folder) as world:
        all_of(world, "begin")
        gate = str(folder / "never")
        world[0].tell("save", step=1)
        child = world[1].ask("save", step=1, gate=gate)
        world[0].answer()
        handle = os.pidfd_open(child)
        world[1].end()
        try:
            assert wait_readable(handle, PATIENCE)
        finally:
            os.close(handle)
        [heard] = world[0].ask("finalize")
        assert heard.kind == "AsyncSaveError"
        assert [one.rank for one in heard.missing] == [1]
        assert committed(folder) == []


@pytest.mark.back_in_time
def test_stopped_rank_delays_no_rank_with_an_unchanged_layout(coordinator: Coordinator, folder: Path):
    with savers(coordinator.endpoint, 2, folder) as world:
        all_of(world, "begin")
        all_of(world, "save", step=1)
        assert all_of(world, "finalize") == [[1], [1]]
        os.kill(world[1].pid, signal.SIGSTOP)
        try:
            world[0].ask("save", step=2)
            world[0].ask("save", step=3)
            until(lambda: world[0].ask("waits"))
        finally:
            os.kill(world[1].pid, signal.SIGCONT)
        for step in (2, 3):
            world[1].ask("save", step=step)
        assert all_of(world, "finalize") == [[2, 3], [2, 3]]
        assert [whole_checkpoint(folder / f"step-{step:010}", step) for step in (2, 3)] == [None, None]


def test_ranks_with_a_grown_state_plan_again_and_learn_the_lost_rank(coordinator: Coordinator, folder: Path):
    with savers(coordinator.endpoint, 2, folder) as world:
        all_of(world, "begin")
        all_of(world, "save", step=1)
        world[1].tell("save", step=2, more="of rank 1")
        world[0].ask("save", step=2)
        assert world[1].answer() > 0
        all_of(world, "save", step=3, more="of both")
        assert all_of(world, "finalize") == [[1, 2, 3], [1, 2, 3]]
        for step in (1, 2, 3):
            assert whole_checkpoint(folder / f"step-{step:010}", step) is None
        written = [FileSystemReader(folder / f"step-{step:010}").read_metadata() for step in (2, 3)]
        assert [set(one.state_dict_metadata) - {"weight", "step"} for one in written] == [
            {"of rank 1"},
            {"of both"},
        ]
        world[0].tell("save", step=4)
        world[1].end()
        assert world[0].answer() == -1, "it cannot be planned"
        [heard] = world[0].ask("finalize")
        assert heard.kind == "AsyncSaveError"
        assert "rank 1 (node-1, pid" in heard.message
        assert len(committed(folder)) == 3


@pytest.mark.back_in_time
def test_coordinator_decides_after_a_restart_between_write_and_decision(
    coordinator: Coordinator, folder: Path
):
    with savers(coordinator.endpoint, 2, folder) as world:
        all_of(world, "begin")
        gate = folder / "gate"
        world[0].tell("save", step=1)
        world[1].ask("save", step=1, gate=str(gate))
        world[0].answer()
        until(lambda: world[0].ask("waits"))
        coordinator.kill()
        gate.touch()
        until(lambda: world[1].ask("waits"))
        assert all_of(world, "finalize", blocking=False) == [[], []]
        coordinator.start()
        assert all_of(world, "finalize") == [[1], [1]]
        assert committed(folder) == ["step-0000000001"]
        assert whole_checkpoint(folder / "step-0000000001", 1) is None


@pytest.mark.back_in_time
def test_saves_without_a_coordinator_take_bounded_room(coordinator: Coordinator, folder: Path):
    """All ranks count alike, although one is refused a save that the other begins after the outage."""
    with savers(coordinator.endpoint, 2, folder) as world:
        all_of(world, "begin")
        all_of(world, "save", step=1)
        assert all_of(world, "finalize") == [[1], [1]]
        coordinator.kill()
        until(lambda: not any(all_of(world, "has_contact")))
        begun = [*range(2, 2 + MAX_UNDECIDED)]
        refused, refused_on_one = begun[-1] + 1, begun[-1] + 2
        for step in [*begun, refused]:
            all_of(world, "save", step=step)
        world[0].ask("save", step=refused_on_one)
        assert len(list(folder.glob(".step-*"))) == MAX_UNDECIDED
        coordinator.start()
        heard = world[1].ask("finalize")
        assert world[1].ask("save", step=refused_on_one) > 0, "it begins to write"
        heard += world[1].ask("finalize")
        for *finalized, first, second in (heard, world[0].ask("finalize")):
            assert finalized == begun
            assert f"step {refused} was not committed" in first.message
            assert f"step {refused_on_one} was not committed" in second.message
            assert all("the coordinator is away" in failed.message for failed in (first, second))
        all_of(world, "save", step=refused)
        assert all_of(world, "finalize") == [[refused], [refused]]
        assert committed(folder) == [f"step-{step:010}" for step in [1, *begun, refused]]


def test_another_number_of_ranks_loads_and_goes_on(coordinator: Coordinator, folder: Path):
    with savers(coordinator.endpoint, 2, folder) as world:
        all_of(world, "begin")
        all_of(world, "save", step=1)
        all_of(world, "save", step=2)
        assert all_of(world, "close") == [[], []]
        assert all_of(world, "load") == [(2, True)] * 2
    with savers(coordinator.endpoint, 1, folder, generation=1) as (alone,):
        alone.ask("begin")
        assert alone.ask("latest").world_size == 2
        assert alone.ask("load") == (2, True)
        alone.ask("save", step=3)
        assert alone.ask("finalize") == [3]
        assert alone.ask("latest").world_size == 1
        assert alone.ask("load") == (3, True)


def test_stateful_object_of_two_ranks_is_loaded_by_three(coordinator: Coordinator, folder: Path):
    """Each rank's shard is written: what is no tensor, as an object would be, is written by rank 0 alone."""
    with savers(coordinator.endpoint, 2, folder, stateful=True) as world:
        all_of(world, "begin")
        for step in (1, 2):
            all_of(world, "save", step=step)
        assert all_of(world, "finalize") == [[1, 2]] * 2
        assert all_of(world, "load") == [(2, True)] * 2
    saved = FileSystemReader(folder / "step-0000000002").read_metadata().state_dict_metadata
    assert set(saved) == {"app.model.weight", "app.step"}
    with savers(coordinator.endpoint, 3, folder, stateful=True, generation=1) as world:
        all_of(world, "begin")
        assert all_of(world, "load") == [(2, True)] * 3


def test_ranks_that_ask_together_get_the_same_answer_at_each_call(coordinator: Coordinator, folder: Path):
    with savers(coordinator.endpoint, 2, folder, kind="queue") as world:
        all_of(world, "begin")
        given: list[int] = []
        for step in range(10):
            all_of(world, "save", step=step)
            one, other = all_of(world, "finalize_together", times=3)
            assert one == other
            given += [number for numbers in one for number in numbers]
        assert given == list(range(len(given)))
        assert all_of(world, "finalize") == [list(range(len(given), 10))] * 2


# ---------------------------------------------------------------------- chaos


def chaos(world: list[Saver], saves: int, seed: int, odds: float) -> list[Event]:
    """Save again and again, with children killed and states changed at random; what all ranks saw."""
    chance = random.Random(seed)
    all_of(world, "begin")
    for step in range(saves):
        for rank in world:
            how: dict[str, Any] = {}
            if chance.random() < odds:
                how = chance.choice([{"doom": "kill"}, {"kill_after": chance.random() * 0.03}])
            if chance.random() < odds:
                how["more"] = chance.choice(["of all", f"of rank {rank.rank}"])
            rank.tell("save", step=step, **how)
        for rank in world:
            rank.answer()
        all_of(world, "finalize", blocking=chance.random() < 0.3)
    all_of(world, "finalize", blocking=True)
    return [event for events in all_of(world, "history") for event in events]


@pytest.mark.parametrize(("world_size", "seed", "copy"), [(2, 1, False), (3, 2, True)])
def test_checkpoints_are_whole_and_ranks_agree_after_any_kill(
    coordinator: Coordinator, folder: Path, world_size: int, seed: int, copy: bool, thorough: bool
):
    saves = 100 if thorough else 30
    with savers(coordinator.endpoint, world_size, folder, copy=copy) as world:
        events = chaos(world, saves, seed, 0.15 if thorough else 0.3)
        assert all_of(world, "close") == [[]] * world_size
    assert verdict(events, whole_checkpoint) == []
    seen = {what: {event.step for event in events if event.what == what} for what in ("finalized", "failed")}
    assert seen["finalized"] | seen["failed"] == set(range(saves))
    assert min(len(steps) for steps in seen.values()) >= saves / 10
    assert committed(folder) == [f"step-{step:010}" for step in sorted(seen["finalized"])]
    for rank in range(world_size):
        judged = [event.step for event in events if event.rank == rank and event.what != "latest"]
        assert judged == list(range(saves))


@pytest.mark.parametrize("blind", [False, True], ids=["honest", "ignores exit codes"])
def test_a_caller_that_ignores_exit_codes_is_caught(coordinator: Coordinator, folder: Path, blind: bool):
    with savers(coordinator.endpoint, 2, folder, kind="queue", blind=blind) as world:
        events = chaos(world, 30, 3, 0.2)
    wrong = verdict(events, partial(whole_files, world_size=2))
    assert bool(wrong) is blind, wrong
    assert all("does not load" in one for one in wrong)


def test_the_judge_sees_ranks_that_disagree_and_a_latest_that_goes_back():
    events = [
        Event(0, "finalized", 1),
        Event(1, "failed", 1),
        Event(0, "latest", 3, "/3"),
        Event(0, "latest", 2, "/2"),
    ]
    assert verdict(events, lambda path, step: "it is torn" if step == 2 else None) == [
        "step 1: rank 0 finalized it, rank 1 saw it fail",
        "step 2: latest() returned /2, but it is torn",
        "rank 0: latest() returned step 2 after step 3",
    ]


# ---------------------------------------------------------------------- forks beside a session

FORKS = """
{first}
import sys, threading, torch
from muster.worker import AsyncCallsQueue, AsyncRequest, GrpcBarrier
{last}

def touch(folder, number):
    torch.save(torch.full((1000,), number), f"{{folder}}/{{number}}.pt")

folder, endpoint, forks = sys.argv[1], sys.argv[2], int(sys.argv[3])
other = GrpcBarrier(0, 1, "busy", endpoint, 20, 20, run_id="{run_id}")
stop = threading.Event()

def keep_busy():
    while not stop.is_set():
        other.execute_barrier()

busy = threading.Thread(target=keep_busy)
busy.start()
done = []
barrier = GrpcBarrier(0, 1, "save", endpoint, 20, 20, run_id="{run_id}")
try:
    with AsyncCallsQueue(barrier=barrier, timeout=120) as queue:
        for number in range(forks):
            done_with = [lambda n=number: done.append(n)]
            queue.schedule_async_request(AsyncRequest(touch, (folder, number), done_with))
            if number % 4 == 3:
                queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
finally:
    stop.set()
    busy.join()
assert done == list(range(forks)), done
print("all well")
"""


def test_forks_beside_an_active_session(coordinator: Coordinator, tmp_path: Path, thorough: bool):
    """Those of a process that imported grpc first and of one that did so last, side by side.

    With gRPC's asyncio client in the parent one child in three died, so few are enough to see it. With its
    fork handlers on, which muster.worker cannot turn off once grpc is imported, it was one in a thousand.
    """
    forks = 1_000 if thorough else 20
    environ = {name: value for name, value in os.environ.items() if name != HANDLERS}
    handlers_off = environ | {HANDLERS: "0"}
    processes = {}
    for run_id, first, last, env in (
        ("grpc first", "import grpc", "", handlers_off),
        ("grpc last", "", "import grpc", environ),
    ):
        (tmp_path / run_id).mkdir()
        program = FORKS.format(first=first, last=last, run_id=run_id)
        processes[run_id] = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / run_id), coordinator.endpoint, str(forks)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        for run_id, process in processes.items():
            said, complaints = process.communicate(timeout=2 * PATIENCE)
            assert (process.returncode, said) == (0, "all well\n"), complaints
            assert len(list((tmp_path / run_id).glob("*.pt"))) == forks
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


# ---------------------------------------------------------------------- beside each other

BESIDE = """
import sys, time
from pathlib import Path
from muster.worker import AsyncCallsQueue, AsyncRequest, AsyncSaveError

rank, gate = int(sys.argv[1]), Path(sys.argv[2])

def write():
    while rank == 1 and not gate.exists():
        time.sleep(0.01)
    if rank == 1:
        raise OSError("disk full")

queue = AsyncCallsQueue(timeout=120)
queue.schedule_async_request(AsyncRequest(write, (), [lambda: print("finalized aside")]))
while rank == 0 and not queue._loop.ledger.saves()[0][0].write._request is None:
    time.sleep(0.01)
while rank == 0 and queue._barrier._session._dialogue.groups["save"].pending is None:
    time.sleep(0.01)  # Until it has voted for what it wrote aside; rank 1 has not written yet.
AsyncRequest(None, (), [lambda: print("finalized at once")]).execute_sync()
gate.touch()
try:
    queue.close()
except AsyncSaveError:
    print("failed aside")
"""


FORGETFUL = """
import time
from muster.worker.saves import AsyncRequest, PersistentCaller
if __name__ == "__main__":
    caller = PersistentCaller()
    print(caller.start(AsyncRequest(time.sleep, (0,), [])).wait(60).failure, flush=True)
"""


def test_a_program_that_forgets_its_worker_ends(tmp_path: Path):
    """The worker ignores the signal by which multiprocessing ends what is left, and then waits for."""
    (tmp_path / "program.py").write_text(FORGETFUL)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


def test_a_save_at_once_is_not_taken_for_one_under_way(coordinator: Coordinator, tmp_path: Path):
    environ = os.environ | {"MUSTER_ENDPOINT": coordinator.endpoint, "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", BESIDE]
    ranks = [
        fork_client.popen(
            [*command, str(rank), str(tmp_path / "gate")],
            env=environ | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said == ["finalized at once\nfailed aside\n"] * 2
