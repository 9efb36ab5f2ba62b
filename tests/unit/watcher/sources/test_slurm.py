"""Slurm: which states of a node are notices, and how ``scontrol`` is asked."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.patience import PATIENCE, until
from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.sources.slurm import Slurm, node_states
from tests.unit.watcher.sources.failing import why

REASON = " Reason=a fan [root@2026-05-28T20:26:40]"


def line(state: str, reason: str = "", node: str = "n1") -> str:
    """A line of Slurm 22.05, shortened."""
    return (
        f"NodeName={node} Arch=x86_64 CoresPerSocket=1  AvailableFeatures=(null) Version=22.05.8 "
        f"OS=Linux 6.1.0 #1 SMP @0  RealMemory=1 Boards=1 State={state} ThreadsPerCore=1 Owner=N/A "
        f"Partitions=low,high  BootTime=2026-05-28T19:01:38 SlurmdStartTime=2026-05-28T19:13:05 "
        f"ExtSensorsTemp=n/s{reason}\n"
    )


def test_drained_node_is_left_for_the_reason_that_people_gave():
    assert node_states(line("MIXED+DRAIN", REASON), "n1") == [
        Notice(
            id="slurm/node/n1/2026-05-28T20:26:40",
            reason="Slurm drains the node n1: a fan",
            stop=True,
            deadline=None,
            node="n1",
        )
    ]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("ALLOCATED+DRAIN", "Slurm drains the node n1"),
        ("IDLE+DRAIN", "Slurm drains the node n1"),
        ("MIXED*+DRAIN", "Slurm drains the node n1"),
        ("MIXED+DRAIN+NOT_RESPONDING", "Slurm drains the node n1"),
        ("DOWN*+DRAIN", "Slurm drains the node n1"),
        ("MIXED+FAIL", "Slurm expects the node n1 to fail"),
        ("MIXED+REBOOT_REQUESTED", "Slurm is to reboot the node n1"),
        ("MIXED+DRAIN+REBOOT_REQUESTED", "Slurm is to reboot the node n1"),
        ("DOWN+DRAIN+REBOOT_ISSUED", "Slurm reboots the node n1"),
    ],
)
def test_node_that_is_to_be_left_is_a_notice(state: str, reason: str):
    (notice,) = node_states(line(state, REASON), "n1")
    assert (notice.reason, notice.stop) == (f"{reason}: a fan", True)


@pytest.mark.parametrize(
    "state",
    [
        *("IDLE", "MIXED", "ALLOCATED", "ALLOCATED*", "DOWN", "UNKNOWN", "COMPLETING"),
        *("MIXED+MAINT", "MIXED+PLANNED", "MIXED+NOT_RESPONDING", "IDLE+CLOUD+POWERED_DOWN", "NODRAIN"),
    ],
)
def test_other_state_is_no_notice(state: str):
    assert node_states(line(state, REASON), "n1") == []


def test_drain_after_another_is_another_notice():
    later = REASON.replace("20:26", "21:26")
    (first,), (second,) = (node_states(line("MIXED+DRAIN", one), "n1") for one in (REASON, later))
    assert first.id != second.id


def test_reason_that_looks_like_slurms_own_words_is_a_reason():
    said = " Reason=State=IDLE Reason=b [eve@2020-01-01T00:00:00] NodeName=n2 [root@2026-05-28T20:26:40]"
    (notice,) = node_states(line("MIXED+DRAIN", said), "n1")
    assert notice.id == "slurm/node/n1/2026-05-28T20:26:40"
    assert notice.reason.endswith(": State=IDLE Reason=b [eve@2020-01-01T00:00:00] NodeName=n2")
    assert node_states(line("IDLE", " Reason= State=MIXED+DRAIN [root@2026-05-28T20:26:40]"), "n1") == []


def test_notice_without_a_reason_has_the_time_of_the_boot():
    (notice,) = node_states(line("MIXED+REBOOT_REQUESTED"), "n1")
    assert notice.id == "slurm/node/n1/boot-2026-05-28T19:01:38"


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "Node n1 not found",
        line("MIXED+DRAIN", node="n2"),
        line("MIXED+DRAIN", node="n11"),
        line("IDLE") + line("MIXED+DRAIN", node="n2"),
        line("IDLE") + line("MIXED+DRAIN"),
        "NodeName=n1 Arch=x86_64",
        " State=MIXED+DRAIN NodeName=n1 ",
    ],
)
def test_other_output_is_refused(shown: str):
    with pytest.raises(LookError, match="does not show"):
        node_states(shown, "n1")


def test_several_nodes_are_looked_at_together():
    lines = [line("MIXED+DRAIN", REASON), line("MIXED", node="n2"), line("IDLE+FAIL", REASON, node="n3")]
    found = node_states("".join(lines), "n[1-3]")
    assert [notice.node for notice in found] == ["n1", "n3"]
    with pytest.raises(LookError):
        node_states("", "n[1-3]")


def test_warnings_beside_the_line_do_not_matter():
    shown = f"scontrol: warning: old\n{line('MIXED+DRAIN', REASON)}\n"
    assert node_states(shown, "n1") == node_states(line("MIXED+DRAIN", REASON), "n1")


@given(st.text() | st.builds(line, st.text(), st.text()))
def test_garbage_is_refused_or_a_wellformed_notice(shown: str):
    try:
        notices = node_states(shown, "n1")
    except LookError:
        return
    assert all(notice.id.isprintable() and notice.reason.isprintable() for notice in notices)


class FakeScontrol:
    """A program ``scontrol`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_TIME_FORMAT": "%s"}

    def does(self, script: str) -> Slurm:
        """Let it run a script, and return a source that asks it."""
        path = self.folder / "scontrol"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        return Slurm("n1", environment=self.environment, timeout=PATIENCE)


@pytest.fixture
def scontrol(tmp_path: Path) -> FakeScontrol:
    return FakeScontrol(tmp_path)


async def test_scontrol_is_asked_for_one_node_and_for_times_of_one_form(scontrol: FakeScontrol):
    said = line("MIXED+DRAIN", REASON).strip()
    check = '[ "$*" = "show node n1 --oneliner" ] && [ "$SLURM_TIME_FORMAT" = standard ] || exit 9'
    (notice,) = await scontrol.does(f"{check}\necho '{said}'").look()
    assert notice.id == "slurm/node/n1/2026-05-28T20:26:40"


async def test_scontrol_that_fails_is_quoted(scontrol: FakeScontrol):
    source = scontrol.does('echo "slurm_load_node error: Unable to contact\nslurm controller" >&2; exit 1')
    message = "slurm_load_node error: Unable to contact slurm controller"
    assert await why(source.look) == f"scontrol show node n1 ended with 1: {message}"


async def test_scontrol_that_writes_without_end_is_killed(scontrol: FakeScontrol):
    assert "writes more than 16,777,216 bytes" in await why(scontrol.does("yes").look)


async def test_scontrol_that_hangs_is_killed_with_its_children(scontrol: FakeScontrol, tmp_path: Path):
    pids = tmp_path / "pids"
    scontrol.does(f"echo $$ > {pids}; sleep 1000 & echo $! >> {pids}; wait")
    source = Slurm("n1", environment=scontrol.environment, timeout=0.5)
    assert await why(source.look) == "scontrol did not answer within 0.5 s; it was killed."
    await gone(pids)


async def test_process_that_leaves_the_group_of_scontrol_is_not_waited_for(
    scontrol: FakeScontrol, tmp_path: Path
):
    """It holds the pipe open."""
    pids = tmp_path / "pids"
    scontrol.does(f"setsid sleep 1000 & echo $! > {pids}")
    source = Slurm("n1", environment=scontrol.environment, timeout=0.5)
    assert "did not answer" in await why(source.look)
    os.kill(int(pids.read_text()), signal.SIGKILL)


async def test_look_that_is_cancelled_leaves_no_process(scontrol: FakeScontrol, tmp_path: Path):
    pids = tmp_path / "pids"
    look = asyncio.create_task(scontrol.does(f"echo $$ > {pids}; sleep 1000").look())
    await asyncio.to_thread(until, lambda: pids.exists() and pids.read_text())
    look.cancel()
    with pytest.raises(asyncio.CancelledError):
        await look
    await gone(pids)


async def gone(pids: Path) -> None:
    """Wait until the processes have ended; a zombie has."""
    await asyncio.to_thread(until, lambda: not any(map(runs, pids.read_text().split())))


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_machine_without_scontrol_says_so(tmp_path: Path):
    source = Slurm("n1", environment={"PATH": str(tmp_path)})
    message = await why(source.look)
    assert message == (
        "scontrol cannot be started: No such file or directory. Add the folder of Slurm's commands to PATH."
    )
