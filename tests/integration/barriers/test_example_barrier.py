"""The example runs for every choice of barrier, and tells a barrier from none."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from lab.processes import fork_client

PROGRAM = Path(__file__).parents[3] / "examples" / "with_and_without_barrier.py"
REPETITIONS = 5
FOREIGN = ("MUSTER_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_")


def run_example(*arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    command = [sys.executable, str(PROGRAM), "--ranks", "2", "--repetitions", str(REPETITIONS), *arguments]
    return fork_client.run(command, spawns=True, env=environment, timeout=2 * PATIENCE)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("with_and_without_barrier", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def settings(example, kind, log, ranks=2, repetitions=1):
    return example.Settings(kind, ranks, repetitions, "", "", log)


def test_without_a_barrier_phases_interleave():
    done = run_example("--barrier", "none")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Barrier none: in 0 of" not in done.stdout
    assert "As expected: without a barrier some must." in done.stdout


@pytest.mark.parametrize("kind", ["dist_barrier", "tcp_store", "grpc"])
def test_with_a_barrier_phases_never_interleave(kind):
    done = run_example("--barrier", kind)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Barrier {kind}: in 0 of {REPETITIONS} repetitions" in done.stdout
    assert "As expected: with a barrier none may." in done.stdout


def test_a_rank_that_fails_fails_the_program():
    done = run_example("--barrier", "grpc", "--endpoint", "nowhere")

    assert done.returncode == 1
    assert "FAILED: a rank ended early." in done.stdout
    assert 'endpoint "nowhere" is not host:port' in done.stdout


LEVEL = ("0: phase 1 done", "1: phase 1 done", "1: phase 2 started", "0: phase 2 started")
EARLY = ("0: phase 1 done", "0: phase 2 started", "1: phase 1 done", "1: phase 2 started")
LOST = ("0: phase 1 done", "0: phase 2 started", "1: phase 1 done")


@pytest.mark.parametrize(
    ("kind", "seen", "as_expected"),
    [
        ("none", EARLY, True),
        ("none", LEVEL, False),
        ("none", LOST, False),
        ("grpc", LEVEL, True),
        ("grpc", EARLY, False),
        ("grpc", (), False),
    ],
)
def test_the_check_believes_only_the_log(example, tmp_path, kind, seen, as_expected):
    log = tmp_path / "log"
    log.write_text("".join(f"repetition 0, rank {line}\n" for line in seen))

    assert example.check(settings(example, kind, log)) is as_expected


def test_a_coordinator_that_is_given_is_used(example):
    with example.meeting_place("grpc", "muster.example:7550") as address:
        assert address == "muster.example:7550"
