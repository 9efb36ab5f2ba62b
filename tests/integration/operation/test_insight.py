"""What missing ranks are doing: processes that are stuck in all ways, in the command and in the error."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.patience import until
from lab.processes import command, fork_client
from lab.processes.coordinator import Coordinator
from lab.processes.relay import RelayedCoordinator
from muster import worker
from muster.worker import BarrierTimeoutError, GrpcBarrier
from tests.support.stuck import KINDS, sleeps

TIMEOUT = 12.0
"""Seconds; those who are missing are asked from the second third of it on."""
SESSION_TTL = 60.0
"""Seconds; longer than all of it, so that one that is stopped is still connected."""


@contextmanager
def stuck(endpoint: str, run_id: str, kinds: list[str], **more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks from 1 on that have joined and will never arrive."""
    world = len(kinds) + 1
    environ = os.environ | {"MUSTER_ENDPOINT": endpoint, "MUSTER_RUN_ID": run_id, "WORLD_SIZE": str(world)}
    processes = [
        fork_client.popen(
            [sys.executable, "-m", "tests.support.stuck", kind],
            spawns=True,
            env=environ | more | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank, kind in enumerate(kinds, 1)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "joined\n"
        yield processes
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def muster(coordinator: Coordinator, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return command.muster(coordinator.listens, *arguments)


DOES = {
    "sleeps": "main thread in sleeps, stuck.py:",
    "in_a_collective": "main thread in all_reduce, stuck.py:",
    "in_a_lock": "main thread in in_a_lock, stuck.py:",
    "holds_the_interpreter": "does not answer: it is stopped, or something holds its interpreter's lock",
    "reads_a_pipe": "main thread in reads_a_pipe, stuck.py:",
    "main_has_ended": "main thread has ended",
    "saves": "main thread in maybe_finalize_async_calls, stuck.py:",
    "stopped": "does not answer: it is stopped",
}


@pytest.fixture(params=[Coordinator, RelayedCoordinator], ids=["direct", "relayed"])
def patient(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Coordinator]:
    with request.param(tmp_path, session_ttl=SESSION_TTL) as coordinator:
        yield coordinator
        worker.close()


def test_waiting_ranks_learn_what_the_missing_ranks_are_doing(patient: Coordinator, caplog):
    whole = not isinstance(patient, RelayedCoordinator)
    kinds = [kind.__name__ for kind in KINDS]
    with stuck(patient.endpoint, "stuck", [*kinds, "sleeps"]) as ranks:
        ranks[-1].send_signal(signal.SIGSTOP)
        until(lambda: settled(stacks(patient)))
        barrier = GrpcBarrier(0, len(ranks) + 1, "checkpoint", patient.endpoint, run_id="stuck")
        with pytest.raises(BarrierTimeoutError) as caught:
            barrier.execute_barrier(TIMEOUT)
        # A relay has noticed meanwhile that the last one is silent.
        expected = [*(DOES[kind] for kind in kinds), *([DOES["stopped"]] if whole else [])]
        for missing, does in zip(caught.value.missing, expected, strict=whole):
            assert missing.doing.startswith(does), (missing, does)
            assert f"rank {missing.rank} (" in str(caught.value)
            assert missing.doing in str(caught.value)
        assert "saves in pid " in caught.value.missing[kinds.index("saves")].doing
        assert "main thread in sleeps, stuck.py:" in caplog.text, "the warning at half of the timeout"
        described = muster(patient, "describe", "barrier", "stuck", "checkpoint").stdout
        assert all(does in described for does in expected)


def stacks(coordinator: Coordinator) -> str:
    done = muster(coordinator, "stack", "stuck")
    assert done.returncode == 0, done.stderr
    return done.stdout


def settled(shown: str) -> bool:
    """Whether all are where they get stuck."""
    return all(does in shown for does in DOES.values())


def test_one_process_is_shown_with_all_its_threads(coordinator: Coordinator):
    with stuck(coordinator.endpoint, "one", ["sleeps", "main_has_ended"]):
        until(lambda: "main thread has ended" in muster(coordinator, "stack", "one", "2").stdout)
        shown = muster(coordinator, "stack", "one", "2").stdout
        assert "thread goes on" in shown
        assert "resident" in shown
        answer = json.loads(muster(coordinator, "stack", "one", "1", "-o", "json").stdout)
        (crowd,) = answer["crowds"]
        (main, *_) = (thread for thread in crowd["threads"] if thread.get("main"))
        assert main["frames"][0]["function"].endswith(sleeps.__name__)
        assert "checkpoint" not in muster(coordinator, "stack", "one", "9").stdout
        assert "no process has spoken for rank 9" in muster(coordinator, "stack", "one", "9").stderr


@pytest.mark.also_through_relay
def test_how_far_ranks_have_come_is_seen_without_a_barrier(coordinator: Coordinator):
    def steps() -> list[int | None]:
        answer = json.loads(muster(coordinator, "get", "members", "steps", "-o", "json").stdout)
        return [member.get("step") and int(member["step"]) for member in answer["members"]]

    with stuck(coordinator.endpoint, "steps", ["sleeps", "in_a_lock"]):
        until(lambda: steps() == [41, 41])
        (run,) = json.loads(muster(coordinator, "get", "runs", "-o", "json").stdout)["runs"]
        assert (run["steps"]["highest"], run["steps"]["lowest"]) == ("41", "41")
        assert 'muster_run_step{run="steps"} 41.0' in coordinator.get("/metrics")[1]


def test_a_user_may_refuse_all_of_it(coordinator: Coordinator):
    with stuck(coordinator.endpoint, "off", ["sleeps"], MUSTER_INSPECT="off"):
        shown = muster(coordinator, "stack", "off").stdout
    assert "does not say what it is doing (MUSTER_INSPECT)" in shown
    assert "stuck.py" not in shown
