"""The keepers of a node: one for each run whose ranks ask for one, started again when it ends."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from muster.checkpoint.local_folder import run_folder
from muster.client.credentials import Credentials
from muster.keeper.__main__ import _parser, _settings
from muster.keeper.node import supervisor
from muster.keeper.node.supervisor import NodeKeepers, keeper_command
from muster.keeper.settings import UNUSED, KeeperSettings, environment_of
from muster.worker.saves.local.folder import LocalFolder

PROGRAM = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
draft = folder / f"draft-{os.getpid()}"
draft.write_text(str(os.getpid()))
draft.rename(folder / "pid")
while not (folder / "end").exists():
    time.sleep(0.01)
(folder / "pid").unlink()
status = int((folder / "end").read_text())
(folder / "end").unlink()
sys.exit(status)
"""


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "LOOK_PACE", 0.01)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)


@asynccontextmanager
async def keeping(local: Path, *patterns: str, idle: float = 0.0) -> AsyncIterator[NodeKeepers]:
    def command(run_id: str) -> Sequence[str]:
        return sys.executable, "-c", PROGRAM, str(run_folder(local, run_id))

    settings = KeeperSettings(folder=local, run_id="", endpoint="here:1", idle=idle)
    keepers = NodeKeepers(settings, patterns or ("*",), command)
    running = asyncio.create_task(keepers.run())
    try:
        yield keepers
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def happens(what: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not what():  # noqa: ASYNC110 – another process does it
            await asyncio.sleep(0.01)


def ask(local: Path, run_id: str) -> Path:
    """Ask for a keeper as a rank does; where its process writes its id."""
    LocalFolder(local, run_id).make()
    return run_folder(local, run_id) / "pid"


def lives(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_each_run_has_a_keeper_and_all_end_with_the_supervisor(tmp_path: Path):
    first = ask(tmp_path, "a")
    async with keeping(tmp_path):
        await happens(first.exists)
        second = ask(tmp_path, "b")
        await happens(second.exists)
        pids = [int(first.read_text()), int(second.read_text())]

    assert len(set(pids)) == 2
    assert not any(map(lives, pids))


async def test_keeper_that_dies_is_started_again_and_the_others_stay(tmp_path: Path):
    first, second = ask(tmp_path, "a"), ask(tmp_path, "b")
    async with keeping(tmp_path):
        await happens(lambda: first.exists() and second.exists())
        before = first.read_text(), second.read_text()
        first.unlink()
        os.kill(int(before[0]), signal.SIGKILL)
        await happens(first.exists)
        assert first.read_text() != before[0]
        assert second.read_text() == before[1]


async def test_run_that_no_pattern_names_has_no_keeper(tmp_path: Path):
    other, mine = ask(tmp_path, "a-other"), ask(tmp_path, "mine")
    async with keeping(tmp_path, "m*"):
        await happens(mine.exists)
        assert not other.exists()


async def test_folder_of_a_run_that_nobody_uses_any_more_is_deleted(tmp_path: Path):
    used, unused = ask(tmp_path, "used"), ask(tmp_path, "unused")
    async with keeping(tmp_path, idle=0.01):
        await happens(lambda: used.exists() and unused.exists())
        before = used.read_text()
        (unused.parent / "end").write_text(str(UNUSED))
        await happens(lambda: not unused.parent.exists())
        assert used.read_text() == before
        again = ask(tmp_path, "unused")
        await happens(again.exists)


async def test_run_keeps_its_folder_if_a_rank_returns_just_before_deletion(tmp_path: Path):
    pid = ask(tmp_path, "a")
    async with keeping(tmp_path, idle=3600):
        await happens(pid.exists)
        (pid.parent / "part").write_text("bytes")
        (pid.parent / "end").write_text(str(UNUSED))
        await happens(lambda: not pid.exists())
        await happens(pid.exists)
        assert (pid.parent / "part").read_text() == "bytes"


def test_keepers_are_told_all_settings(tmp_path: Path):
    settings = KeeperSettings(
        folder=tmp_path,
        run_id="-job 1",
        endpoint="a:1,[::1]:2",
        listen=("::", 7),
        listen_ranks=("fd00::7", 0),
        advertise="fd00::8",
        failure_domain="zone-a",
        node_name="node-7",
        quota=5,
        upload_rate=6,
        idle=3600.0,
        follow=os.getpid(),
        credentials=Credentials(),
    )
    _, _, module, *arguments = keeper_command(settings)("-job 1")
    assert module == "muster.keeper"
    given = _settings(_parser().parse_args(arguments))
    # The name of the node and the credentials come from the environment.
    for field in KeeperSettings.__slots__:
        if field not in ("node_name", "credentials"):
            assert getattr(given, field) == getattr(settings, field), field


def test_credentials_go_by_the_environment():
    given = Credentials(
        token_file=Path("/t"), ca=Path("/ca"), cert=Path("/c"), key=Path("/k"), server_name="x"
    )
    assert Credentials.of(environment_of(given)) == given
    assert environment_of(Credentials(token="secret")) == {}
