"""The keeper of a node: found, or started once, whatever the ranks of the node do at the same time."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.patience import PATIENCE, until
from muster.checkpoint.storage_options import STORAGE_OPTIONS
from muster.client.errors import EnvironmentValueError
from muster.worker.saves.local import keeper_process
from muster.worker.saves.local.folder import LocalFolder, RunningKeeper
from muster.worker.saves.local.keeper_client import is_answered
from muster.worker.saves.local.keeper_process import KeeperError, KeeperProcess, keeper_command
from muster.worker.saves.local.storage_options import keeper_environment, options_or_environment
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.fake_keepers import RUN, Cluster, FakeKeeper

PROGRAM = """
import sys, time
from pathlib import Path
from tests.support.saves.fake_keepers import Cluster, FakeKeeper
print("a keeper begins", flush=True)
Path(sys.argv[1], "begun").open("a").write("x")
try:
    FakeKeeper(Cluster(), Path(sys.argv[1]))
except BlockingIOError:
    sys.exit("another one runs")
while True:
    time.sleep(1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[LocalFolder]:
    made = LocalFolder(tmp_path, RUN)
    made.make()
    yield made
    for child in keeper_process._children:
        child.kill()
        child.wait()
    keeper_process._children.clear()


def process(folder: LocalFolder, program: str = PROGRAM) -> KeeperProcess:
    return KeeperProcess(folder, [sys.executable, "-c", program, str(folder.parent)], is_answered)


def test_ranks_of_a_node_start_one_keeper(folder: LocalFolder):
    calls = [in_thread(lambda: process(folder).find(PATIENCE)) for _ in range(4)]
    keepers = {call.result(PATIENCE) for call in calls}
    assert len(keepers) == 1
    assert (folder.parent / "begun").read_text() == "x"
    assert "a keeper begins" in folder.log.read_text()


def test_keeper_that_died_is_replaced(folder: LocalFolder):
    running = process(folder).find(PATIENCE)
    os.kill(running.pid, signal.SIGKILL)
    again = process(folder).find(PATIENCE)
    assert again.pid != running.pid
    assert is_answered(again)


def test_keeper_that_runs_is_used(folder: LocalFolder):
    keeper = FakeKeeper(Cluster(), folder.parent)
    assert process(folder, "raise SystemExit(1)").find(PATIENCE).token == keeper.token
    keeper.stop()


def test_keeper_that_cannot_start_is_an_error_with_the_end_of_its_log(folder: LocalFolder):
    program = "import sys; print('x' * 9000); sys.exit('no coordinator is named')"
    with pytest.raises(KeeperError, match="exit status 1 before it was ready") as raised:
        process(folder, program).find(PATIENCE)
    assert str(raised.value).endswith("no coordinator is named")
    assert len(str(raised.value)) < 3000


def test_keeper_that_holds_its_lock_and_does_not_answer_is_an_error(folder: LocalFolder):
    keeper = FakeKeeper(Cluster(), folder.parent)
    keeper.alive = False
    with pytest.raises(KeeperError, match="did not answer within"):
        process(folder, "raise SystemExit(1)").find(0.3)
    keeper.alive = True
    keeper.stop()


def test_address_of_another_program_is_not_a_keeper(folder: LocalFolder):
    keeper = FakeKeeper(Cluster(), folder.parent)
    running = folder.keeper()
    assert running is not None
    assert is_answered(running)
    assert not is_answered(RunningKeeper(running.pid, running.url, "another", running.id))
    assert not is_answered(RunningKeeper(running.pid, running.url, running.token, "another"))
    keeper.stop()
    assert not is_answered(running)


def test_unreadable_description_is_none(folder: LocalFolder):
    for text in ("", "{", "[]", '{"pid": 1}'):
        (folder.path / "keeper.json").write_text(text)
        assert folder.keeper() is None


def test_keeper_has_the_options_of_shared_storage(folder: LocalFolder):
    environment = keeper_environment({"endpoint_url": "http://here", "retries": 3})
    program = "import os; print(os.environ['MUSTER_STORAGE_OPTIONS'])"
    command = [sys.executable, "-c", program]
    with pytest.raises(KeeperError):
        KeeperProcess(folder, command, is_answered, environment).find(PATIENCE)
    assert json.loads(folder.log.read_text()) == {"endpoint_url": "http://here", "retries": 3}


def test_options_that_no_other_process_can_have_are_refused():
    with pytest.raises(ValueError, match="get them as JSON"):
        keeper_environment({"session": object()})


def test_ranks_have_the_options_of_keepers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(STORAGE_OPTIONS, '{"endpoint_url": "http://here"}')
    assert options_or_environment(None) == {"endpoint_url": "http://here"}
    assert options_or_environment({"profile": "a"}) == {"profile": "a"}
    monkeypatch.setenv(STORAGE_OPTIONS, "secret")
    with pytest.raises(ValueError, match="is no JSON object") as raised:
        options_or_environment(None)
    assert "secret" not in str(raised.value)


def test_command_follows_the_agent(folder: LocalFolder):
    command = keeper_command(folder, RUN, "here:1")
    assert command[1:] == [
        *("-m", "muster.keeper", "--folder", str(folder.parent), "--run-id", RUN),
        *("--endpoint", "here:1", "--follow", str(os.getppid())),
    ]


@pytest.fixture
def node_keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has keepers of its own."""
    monkeypatch.setenv("MUSTER_KEEPER", "node")


@pytest.mark.usefixtures("node_keepers")
def test_keeper_of_the_node_is_asked_for_and_waited_for(folder: LocalFolder):
    command = keeper_command(folder, RUN, "here:1")
    found = in_thread(lambda: KeeperProcess(folder, command, is_answered).find(PATIENCE))
    # As the end of a keeper removes it: in one step, whatever the rank does meanwhile.
    folder.path.rename(folder.path.with_name("removed"))
    until((folder.path / "keeper.run").exists)
    assert (folder.path / "keeper.run").read_text() == RUN
    keeper = FakeKeeper(Cluster(), folder.parent)
    assert found.result(PATIENCE).token == keeper.token
    assert keeper_process._children == []
    keeper.stop()


@pytest.mark.usefixtures("node_keepers")
def test_node_without_the_keeper_that_was_promised_is_an_error_that_says_what_to_look_at(folder: LocalFolder):
    command = keeper_command(folder, RUN, "here:1")
    with pytest.raises(KeeperError, match="see whether `muster keep --runs` runs here for this run"):
        KeeperProcess(folder, command, is_answered).find(0.1)


def test_unknown_kind_of_keeper_is_refused(folder: LocalFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_KEEPER", "cluster")
    with pytest.raises(EnvironmentValueError, match='it is "own" or "node"'):
        keeper_command(folder, RUN, "here:1")
