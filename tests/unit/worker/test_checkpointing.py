"""The recipe that travels to the checkpoint process."""

import dataclasses
import pickle
from dataclasses import dataclass

import pytest
from torch_checkpointing.barriers import BarrierConfig

from muster.worker import GrpcBarrierConfig, checkpointing
from muster.worker.environment import EnvironmentValueError


@dataclass
class RankInfo:
    role_rank: int = 3
    role_world_size: int = 16


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "MUSTER_ENDPOINT",
        "MUSTER_RUN_ID",
        "TORCHELASTIC_RUN_ID",
        "MUSTER_ROUND",
        "TORCHELASTIC_RESTART_COUNT",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The arguments with which barriers are built, instead of barriers."""
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(checkpointing, "GrpcBarrier", lambda **arguments: calls.append(arguments))
    return calls


def test_defaults_come_from_the_process_that_makes_the_config(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_ENDPOINT", "muster.example:7550")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    config = GrpcBarrierConfig()
    assert (config.endpoint, config.run_id, config.generation) == ("muster.example:7550", "job1", 2)


def test_explicit_values_win(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_ENDPOINT", "muster.example:7550")
    monkeypatch.setenv("MUSTER_ROUND", "9")
    config = GrpcBarrierConfig(endpoint="other:1", run_id="job2", generation=0)
    assert (config.endpoint, config.run_id, config.generation) == ("other:1", "job2", 0)


def test_checkpoint_process_needs_no_environment(
    monkeypatch: pytest.MonkeyPatch, built: list[dict[str, object]]
):
    monkeypatch.setenv("MUSTER_ENDPOINT", "muster.example:7550")
    monkeypatch.setenv("MUSTER_RUN_ID", "job1")
    monkeypatch.setenv("MUSTER_ROUND", "2")
    data = pickle.dumps(GrpcBarrierConfig(barrier_prefix="async", timeout_barrier_init_sec=7))
    for name in ("MUSTER_ENDPOINT", "MUSTER_RUN_ID", "MUSTER_ROUND"):
        monkeypatch.delenv(name)
    pickle.loads(data).create_barrier(RankInfo())
    assert built == [
        {
            "global_rank": 3,
            "global_world_size": 16,
            "barrier_prefix": "async",
            "endpoint": "muster.example:7550",
            "run_id": "job1",
            "generation": 2,
            "timeout_barrier_init_secs": 7,
        }
    ]


@pytest.mark.parametrize("arguments", [{}, {"endpoint": "no port"}, {"endpoint": "h:1", "generation": -1}])
def test_unusable_value_raises_where_the_config_is_made(arguments: dict[str, object]):
    with pytest.raises(EnvironmentValueError):
        GrpcBarrierConfig(**arguments)  # type: ignore[arg-type]


def test_config_is_accepted_by_torch_checkpointing():
    assert issubclass(GrpcBarrierConfig, BarrierConfig)
    assert dataclasses.is_dataclass(GrpcBarrierConfig)


def test_replaced_copy_differs_only_in_the_given_fields():
    config = GrpcBarrierConfig(endpoint="h:1")
    assert dataclasses.replace(config) == config
    assert dataclasses.replace(config, barrier_prefix="eval") != config
