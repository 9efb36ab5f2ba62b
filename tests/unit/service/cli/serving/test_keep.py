"""How ``muster keep`` is told what to do, and what it says where it cannot."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from muster.keeper import process
from muster.keeper.node import supervisor
from muster.keeper.settings import KeeperSettings
from muster.service.cli.failure import Exit
from tests.unit.service.cli.test_main import invoke

GOOD = ("keep", "--folder=/nvme/muster", "--run-id=job1", "--endpoint=muster:7550")


@pytest.fixture
def started_with(monkeypatch: pytest.MonkeyPatch) -> list[KeeperSettings]:
    """The settings of the keepers that were started."""
    settings: list[KeeperSettings] = []
    monkeypatch.setattr(process, "run_until_stopped", settings.append)
    return settings


def test_keep_options_reach_the_keeper_settings(started_with: list[KeeperSettings]):
    result = invoke(
        *GOOD,
        *("--listen=10.0.0.1:7600", "--advertise=node-1", "--failure-domain=rack-7"),
        *("--quota=1000", "--upload-rate=2000", "--follow=77", "--listen-ranks=10.0.0.2:0"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    (settings,) = started_with
    assert (settings.folder, settings.run_id) == (Path("/nvme/muster"), "job1")
    assert (settings.endpoint, settings.listen) == ("muster:7550", ("10.0.0.1", 7600))
    assert (settings.advertise, settings.failure_domain) == ("node-1", "rack-7")
    assert (settings.quota, settings.upload_rate, settings.follow) == (1000, 2000, 77)
    assert (settings.listen_ranks, settings.idle) == (("10.0.0.2", 0), 0)


def test_the_environment_is_asked_too(started_with: list[KeeperSettings], monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "MUSTER_RUN_ID": "job2",
        "MUSTER_ENDPOINT": "other:7550",
        "MUSTER_NODE_ADDRESS": "node-2",
        "MUSTER_NODE_NAME": "two",
        "MUSTER_FAILURE_DOMAIN": "rack-8",
        "MUSTER_LOCAL_QUOTA": "3000",
        "MUSTER_UPLOAD_RATE": "4000",
        "MUSTER_STORAGE_OPTIONS": '{"key": "value"}',
    }.items():
        monkeypatch.setenv(name, value)
    assert invoke("keep", "--folder=here").exit_code == 0
    (settings,) = started_with
    assert settings.folder == Path("here").absolute()
    assert (settings.run_id, settings.endpoint) == ("job2", "other:7550")
    assert (settings.advertise, settings.node_name, settings.failure_domain) == ("node-2", "two", "rack-8")
    assert (settings.quota, settings.upload_rate) == (3000, 4000)
    assert settings.storage_options == {"key": "value"}
    assert "value" not in repr(settings)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--listen=here",), "is not HOST:PORT"),
        (("--endpoint=nowhere",), "is not host:port"),
        (("--quota=-1",), "greater than or equal to 0"),
    ],
)
def test_wrong_option_is_named(started_with: list[KeeperSettings], given: tuple[str, ...], said: str):
    result = invoke(*GOOD, *given)
    assert result.exit_code == Exit.USAGE
    assert said in result.stderr
    assert started_with == []


def test_options_of_storage_that_are_no_json_are_named_and_not_repeated(
    started_with: list[KeeperSettings], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MUSTER_STORAGE_OPTIONS", "{secret")
    result = invoke(*GOOD)
    assert result.exit_code == Exit.USAGE
    assert "MUSTER_STORAGE_OPTIONS is no JSON object" in result.stderr
    assert "secret" not in result.stderr


def test_keeper_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "run_until_stopped", lambda _: "another keeper runs in /nvme/muster")
    result = invoke(*GOOD)
    assert result.exit_code == Exit.FAILED
    assert "another keeper runs in /nvme/muster" in result.stderr


def test_all_runs_of_a_node_are_kept_for_by_patterns(monkeypatch: pytest.MonkeyPatch):
    started_with: list[tuple[KeeperSettings, Sequence[str]]] = []
    monkeypatch.setattr(supervisor, "run_node_until_stopped", lambda *given: started_with.append(given))
    result = invoke("keep", "--folder=/n", "--endpoint=muster:7550", "--runs=a.*", "--runs=b")
    assert (result.exit_code, result.stderr) == (0, "")
    ((settings, patterns),) = started_with
    assert (list(patterns), settings.run_id, settings.idle) == (["a.*", "b"], "", 86_400)


@pytest.mark.parametrize("given", [(), ("--run-id=job1", "--runs=*")])
def test_either_one_run_or_patterns_are_given(started_with: list[KeeperSettings], given: tuple[str, ...]):
    result = invoke("keep", "--folder=/n", "--endpoint=muster:7550", *given)
    assert result.exit_code == Exit.USAGE
    assert "give either --run-id (MUSTER_RUN_ID) or --runs" in result.stderr
    assert started_with == []


def test_switch_that_slurm_names_is_the_failure_domain(
    started_with: list[KeeperSettings], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "core.rack-7.node-3")
    invoke(*GOOD)
    invoke(*GOOD, "--failure-domain=zone-a")
    assert [settings.failure_domain for settings in started_with] == ["rack-7", "zone-a"]
