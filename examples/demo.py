"""``make demo``: the main job of Muster, shown with real processes in a minute and a half.

1. A coordinator keeps its state in SQLite. Three nodes, each a torchrun with two ranks, come together through
   it and train. The ranks of a node speak through one stream, that of the relay in their agent. Every few
   steps a child of each rank writes a checkpoint, while training goes on.
2. One such child is killed (SIGKILL): all ranks learn which rank, where and how, and none believes in the
   checkpoint. Training goes on, and the next one is committed.
3. One node is killed while a checkpoint is written: all other ranks learn which rank, and where.
4. A new node takes its place. torchrun brings them together in a new round, and they resume from the last
   checkpoint that was committed.
5. The coordinator is killed (SIGKILL) while ranks wait for its decision on a checkpoint: training goes on.
   The coordinator is started again, and the checkpoint is committed.
6. Training goes on to the end.
7. Another job keeps its checkpoints on the disks of its three nodes, each part with a copy on another node. A
   node is lost with its disk, and shared storage as well. The job resumes from the copies.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from demo_local import LocalDemo
from demo_parts import (
    MUSTER,
    NODES,
    PATIENCE,
    SESSION_TTL,
    Audience,
    Coordinator,
    Node,
    Report,
    headline,
    say,
    show,
)
from demo_rank import CHILD_KILLED, COORDINATOR_KILLED, NODE_KILLED, PAUSE, go
from muster.checkpoint.directory import CheckpointDirectory
from training_job import SAVE_EVERY

PER_NODE = 2
WORLD_SIZE = NODES * PER_NODE
STEPS = 400
RUN = "demo"
HOST = socket.gethostname()
RANK_PROGRAM = Path(__file__).with_name("demo_rank.py")


class Demo:
    """The nodes of the job, and the chapters of the show."""

    def __init__(self, coordinator: Coordinator, folder: Path) -> None:
        self._coordinator = coordinator
        self._folder = folder
        self._checkpoints = CheckpointDirectory(folder / "checkpoints")
        self._audience = Audience()
        self._nodes: list[Node] = []

    @property
    def _endpoint(self) -> str:
        return f"--endpoint={self._coordinator.endpoint}"

    def _add_node(self) -> None:
        node = Node(
            len(self._nodes),
            self._coordinator.endpoint,
            self._folder,
            self._audience.reports,
            RUN,
            PER_NODE,
            [str(RANK_PROGRAM), str(self._folder), str(STEPS)],
        )
        self._nodes.append(node)

    def kill_a_child(self) -> None:
        """Chapters 1 and 2."""
        nodes = f"{NODES} nodes of {PER_NODE} ranks"
        headline(f"{nodes} come together by torchrun --rdzv-backend=muster, train and save")
        for _ in range(NODES):
            self._add_node()
        victim, step = CHILD_KILLED.rank, CHILD_KILLED.step
        child = self._audience.wait_for_moment("writes", CHILD_KILLED)
        self._all_speak_through_relays()
        headline(
            f"rank {victim}'s child (pid {child.pid}) is killed while it writes the checkpoint of step {step}"
        )
        os.kill(child.pid, signal.SIGKILL)
        reports = self._audience.wait_for("failed", 0, WORLD_SIZE)
        self._all_were_told(reports, f"rank {victim} ({HOST}, pid ", "killed by SIGKILL")
        say("   and the other ranks the same: each names the rank, its host and the signal")
        self._audience.wait_for("committed", 0, WORLD_SIZE, step + SAVE_EVERY)
        if self._audience.heard("committed", 0, step) or self._checkpoints.path(step).exists():
            sys.exit(f"the checkpoint of step {step} was committed, and rank {victim} had not written it")
        say(f"   no rank has finalized step {step}; training went on, and the next save was committed")

    def kill_a_node(self) -> None:
        """Chapter 3."""
        step = NODE_KILLED.step
        self._audience.wait_for_moment("writes", NODE_KILLED)
        trained = self._audience.wait_for("trained", 0, WORLD_SIZE, PAUSE)
        victim = trained[NODE_KILLED.rank]
        on_it = [one for one in trained if one.node is victim.node]
        self._wait_for_votes(WORLD_SIZE - 1)
        ranks = " and ".join(str(one.rank) for one in on_it)
        headline(f"the node of ranks {ranks} is killed, with its relay, while step {step} is written")
        killed = time.monotonic()
        victim.node.kill([one.pid for one in on_it])
        # Before they train on: whose peers are gone breaks off, and its agent ends the others of its node.
        self._wait_for_decision()
        go(self._folder, "training", round=0).touch()
        reports = self._audience.wait_for("failed", 0, WORLD_SIZE - PER_NODE, PAUSE)
        self._all_were_told(reports, f"rank {victim.rank} ({HOST}, pid {victim.pid}")
        say("   and the other ranks the same: each names the rank, its host and its pid")
        say(f"   all were told within {time.monotonic() - killed:.1f} s; the session TTL is {SESSION_TTL} s")
        self._last_committed_is(step - SAVE_EVERY)
        show("get", "barriers", RUN, "--history=2", self._endpoint)

    def replace_the_node(self) -> None:
        """Chapter 4."""
        headline("a new node takes its place; torchrun brings all together in a new round")
        self._add_node()
        resumed = self._audience.wait_for("resumed", 1, WORLD_SIZE)
        if {one.step for one in resumed} != {NODE_KILLED.step - SAVE_EVERY}:
            sys.exit(f"the ranks resumed from steps {[one.step for one in resumed]}")
        show("get", "rounds", RUN, self._endpoint)

    def kill_the_coordinator(self) -> None:
        """Chapters 5 and 6."""
        slow, step = COORDINATOR_KILLED.rank, COORDINATOR_KILLED.step
        self._audience.wait_for_moment("writes", COORDINATOR_KILLED)
        self._audience.wait_for("trained", 1, WORLD_SIZE, PAUSE)
        self._wait_for_votes(WORLD_SIZE - 1)
        headline(
            f"{WORLD_SIZE - 1} ranks have written step {step}, rank {slow} has not; the coordinator is killed"
        )
        say(f"   SIGKILL to pid {self._coordinator.kill()}")
        go(self._folder, "training", round=1).touch()
        self._audience.wait_for("trained", 1, WORLD_SIZE, step + SAVE_EVERY)
        say("   training went on without it; now it is started again, on the same SQLite file")
        self._coordinator.start()
        say(f"   rank {slow}'s child comes to its end")
        go(self._folder, "writing", round=1).touch()
        self._audience.wait_for("committed", 1, WORLD_SIZE, step)
        losses = [report.text for report in self._audience.wait_for("done", 1, WORLD_SIZE)]
        living = [node for node in self._nodes if node.process.poll() != -signal.SIGKILL]
        if any(node.end() != 0 for node in living):
            sys.exit(f"a node failed; the logs are in {self._folder}")
        headline("done")
        say(f"   training finished at step {STEPS}; the losses of the ranks: {', '.join(losses)}")
        self._last_committed_is(STEPS)
        if left := [path.name for path in self._checkpoints.folder.glob(".*")]:
            sys.exit(f"half-written checkpoints were left behind: {', '.join(left)}")
        show("get", "barriers", RUN, "--history=2", self._endpoint)
        show("get", "runs", self._endpoint)

    def _all_speak_through_relays(self) -> None:
        """See in the coordinator's own list of members that no rank has a stream of its own."""
        ranks: dict[str, list[str]] = {}
        for member in self._asked("members")["members"]:
            ranks.setdefault(member.get("relay", ""), []).append(str(member.get("rank", 0)))
        if ranks.keys() != {f"{HOST}:{node.process.pid}" for node in self._nodes}:
            sys.exit(f"the ranks should speak through the relays of their agents, and do so through {ranks}")
        say(f"   {WORLD_SIZE} ranks speak through {NODES} relays; to the coordinator each is one stream")
        for relay, its in ranks.items():
            agent = relay.rpartition(":")[2]
            say(f"   ranks {' and '.join(its)} through the one in the agent with pid {agent}")

    def _asked(self, what: str) -> dict[str, Any]:
        """What ``muster get`` says of the run, for programs."""
        command = [str(MUSTER), "get", what, RUN, "-o", "json", self._endpoint]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return cast(dict[str, Any], json.loads(shown))

    def _all_were_told(self, reports: list[Report], *what: str) -> None:
        say(f"   rank {reports[0].rank} was told: {_indent(reports[0].text)}")
        for report in reports:
            if not all(part in report.text for part in what):
                sys.exit(f"rank {report.rank} was not told {' and '.join(what)!r}, but: {report.text}")

    def _last_committed_is(self, step: int) -> None:
        last = self._checkpoints.latest()
        if last is None or last.step != step:
            sys.exit(f"the last checkpoint should be that of step {step}, and is {last}")
        say(f"   the last checkpoint that was committed is {Path(last.path).name}, for every rank")

    def _wait_for_votes(self, count: int) -> None:
        """Wait until so many ranks have written, and the others have not."""
        self._poll(
            lambda: any(one["arrived"] == count for one in self._undecided_saves()),
            f"{count} ranks have not voted on a checkpoint",
        )

    def _wait_for_decision(self) -> None:
        """Wait until no checkpoint's outcome is open."""
        self._poll(lambda: not self._undecided_saves(), "no decision was taken on a checkpoint")

    def _poll(self, happened: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            if time.monotonic() >= deadline:
                sys.exit(f"{otherwise} within {PATIENCE:.0f} s")
            time.sleep(0.1)

    def _undecided_saves(self) -> list[dict[str, Any]]:
        shown = self._asked("barriers").get("barriers", [])
        return [one for one in shown if one["prefix"] == "save" and "decision" not in one]

    def stop(self) -> None:
        """Stop what still runs."""
        for node in self._nodes:
            if node.process.poll() is None:
                node.stop()


def main() -> None:
    """Show everything, in a folder that is removed at the end."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="muster-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        coordinator = Coordinator(folder)
        headline("a coordinator starts, with its state in SQLite")
        coordinator.start()
        demo = Demo(coordinator, folder)
        (folder / "local").mkdir()
        local = LocalDemo(coordinator, folder / "local")
        try:
            demo.kill_a_child()
            demo.kill_a_node()
            demo.replace_the_node()
            demo.kill_the_coordinator()
            local.lose_a_node_with_its_disk()
        finally:
            demo.stop()
            local.stop()
            coordinator.stop()
    say(
        f"""
What you saw, in {time.monotonic() - started:.0f} s:
 - torchrun's agents came together through the coordinator; no node hosted what the others needed.
 - The ranks of a node spoke through one stream, that of the relay in their agent. No line of the training
   script is about it.
 - Checkpoints were written aside while training went on, and each became one only when every rank's
   child had written its part: one decision, the same for all.
 - A killed child was named to every rank: which rank, which host, which signal. None finalized that
   checkpoint, training went on, and the next one was committed.
 - A killed node was named to every other rank, with host and pid, without waiting for a timeout. A new node
   took its place, and training resumed from the last checkpoint that was committed.
 - A coordinator killed while ranks waited lost nothing and stopped nobody: training went on, the
   coordinator came back, and the checkpoint was committed.
 - A job with its checkpoints on its own nodes lost a node with its disk, and shared storage: the coordinator
   decided what to resume from, a fresh node got its part from a peer, and every byte was verified."""
    )


def _indent(text: str) -> str:
    return text.replace("\n", "\n     ")


if __name__ == "__main__":
    main()
