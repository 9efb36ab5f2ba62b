"""What a worker takes from its environment, and what it says of bad values."""

import os
import pickle
import subprocess
import sys

import pytest

from muster.worker import GrpcBarrierConfig, environment
from muster.worker.barriers import BARRIER_REGISTRY, GrpcBarrier
from muster.worker.environment import EnvironmentValueError


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ("a:1", {"MUSTER_ENDPOINT": "b:2"}, "a:1"),
        (None, {"MUSTER_ENDPOINT": "b:2"}, "b:2"),
        ("[::1]:7550", {}, "[::1]:7550"),
    ],
)
def test_the_endpoint_is_the_argument_or_the_variable(given, environ, expected):
    assert environment.endpoint(given, environ) == expected


@pytest.mark.parametrize("value", [None, "", "host", "host:", ":7550", "host:0", "host:70000", "host:x"])
def test_a_bad_endpoint_is_named(value):
    with pytest.raises(EnvironmentValueError, match=r"MUSTER_ENDPOINT|host:port"):
        environment.endpoint(value, {})


def test_the_run_is_found_in_order():
    environ = {"MUSTER_RUN_ID": "muster", "TORCHELASTIC_RUN_ID": "torch"}
    assert environment.run_id("given", environ) == "given"
    assert environment.run_id(None, environ) == "muster"
    assert environment.run_id(None, {"TORCHELASTIC_RUN_ID": "torch"}) == "torch"
    assert environment.run_id(None, {}) == environment.DEFAULT_RUN_ID


def test_the_generation_is_the_round_before_the_restart_count():
    environ = {"MUSTER_ROUND": "7", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert environment.generation(0, environ) == 0
    assert environment.generation(None, environ) == 7
    assert environment.generation(None, {"TORCHELASTIC_RESTART_COUNT": "3"}) == 3
    assert environment.generation(None, {}) == 0


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "١"])
def test_a_number_that_is_none_is_named_with_its_variable(value: str):
    with pytest.raises(EnvironmentValueError, match=f"RANK = {value}"):
        environment.rank(None, {"RANK": value})
    with pytest.raises(EnvironmentValueError, match="MUSTER_ROUND"):
        environment.generation(None, {"MUSTER_ROUND": value})


def test_a_missing_rank_or_world_size_says_what_to_set():
    with pytest.raises(EnvironmentValueError, match="RANK is not set"):
        environment.rank(None, {})
    with pytest.raises(EnvironmentValueError, match="WORLD_SIZE is not set"):
        environment.world_size(None, {})


def test_the_recipe_for_another_process_carries_its_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_ENDPOINT", "b:2")
    monkeypatch.setenv("MUSTER_RUN_ID", "job1")
    monkeypatch.setenv("MUSTER_ROUND", "4")
    config = pickle.loads(pickle.dumps(GrpcBarrierConfig()))
    monkeypatch.undo()
    assert (config.endpoint, config.run_id, config.generation) == ("b:2", "job1", 4)


def test_torchs_own_registry_knows_the_grpc_barrier():
    from torch.distributed.checkpoint._experimental import barriers as torchs

    assert torchs.BARRIER_REGISTRY is BARRIER_REGISTRY
    assert torchs.BARRIER_REGISTRY["grpc"] is GrpcBarrier


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import muster.worker", "0"),
        ("import grpc, muster.worker", "None"),
    ],
)
def test_grpcs_fork_handlers_are_off_unless_grpc_came_first(program: str, expected: str):
    environ = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    show = "import os; print(os.environ.get('GRPC_ENABLE_FORK_SUPPORT'))"
    ended = subprocess.run(
        [sys.executable, "-c", f"{program}; {show}"], env=environ, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == expected


def test_the_service_brings_no_torch():
    program = "import sys, muster.service.app; print('torch' in sys.modules, 'muster.worker' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "False"]
