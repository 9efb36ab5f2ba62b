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
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import demo_local_rank
from demo_rank import CHILD_KILLED, COORDINATOR_KILLED, NODE_KILLED, PAUSE, Moment, go
from muster.checkpoint.directory import CheckpointDirectory
from training_job import SAVE_EVERY

NODES = 3
PER_NODE = 2
WORLD_SIZE = NODES * PER_NODE
STEPS = 400
RUN = "demo"
SESSION_TTL = 5
PATIENCE = 90.0
"""Seconds to wait for a rank before the demo gives up."""
HOST = socket.gethostname()
MUSTER = Path(sys.executable).with_name("muster")
RANK_PROGRAM = Path(__file__).with_name("demo_rank.py")
LOCAL_RUN = "demo-local"
LOCAL_STEPS = 200
LOCAL_PROGRAM = Path(__file__).with_name("demo_local_rank.py")
CONF = "join_timeout=60,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2"


class Coordinator:
    """``muster serve`` on a SQLite file."""

    def __init__(self, folder: Path) -> None:
        self.endpoint, self._http = (f"127.0.0.1:{_free_port()}" for _ in range(2))
        self._state = f"sqlite:///{folder}/muster.db"
        self._log = (folder / "coordinator.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is ready."""
        flags = [f"--listen={self.endpoint}", f"--http={self._http}", f"--state={self._state}"]
        ttl = f"--session-ttl={SESSION_TTL}"
        self._process = subprocess.Popen([MUSTER, "serve", *flags, ttl], stderr=self._log)
        while True:
            with suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://{self._http}/readyz").close()
                return
            if self._process.poll() is not None:
                sys.exit(f"the coordinator did not start; its log is {self._log.name}")
            time.sleep(0.05)

    def kill(self) -> int:
        """SIGKILL it, without any warning."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        return self._process.pid

    def stop(self) -> None:
        """SIGTERM it."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait()
        self._log.close()


@dataclass(frozen=True)
class Report:
    """What a rank tells."""

    node: "Node"
    round: int
    rank: int
    pid: int
    """Return the process id of the rank, or of its child that ``writes``."""
    kind: str
    """``resumed``, ``trained``, ``committed`` or ``failed``; ``writes``: its child does, to a slow disk;
    ``done``."""
    step: int
    text: str


class Node:
    """A torchrun with its ranks.

    Args:
        number: its number, for its log.
        endpoint: the coordinator's.
        folder: where the checkpoints and logs go.
        reports: where what its ranks tell goes.
        run: the job.
        per_node: its ranks.
        program: what a rank runs, with its arguments.
    """

    def __init__(
        self,
        number: int,
        endpoint: str,
        folder: Path,
        reports: "queue.Queue[Report]",
        run: str,
        per_node: int,
        program: list[str],
    ) -> None:
        self._log = (folder / f"node-{number}.log").open("wb")
        self._reports = reports
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=muster"),
                *(f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run}", f"--rdzv-conf={CONF}"),
                *(f"--nnodes={NODES}", f"--nproc-per-node={per_node}", "--max-restarts=3"),
                *("--local-addr=127.0.0.1", *program),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(json.JSONDecodeError):
                self._reports.put(Report(self, **json.loads(line)))

    def kill(self, others: list[int]) -> None:
        """SIGKILL the agent and its other processes, as when the machine dies.

        Args:
            others: the process ids of its ranks, and of its keeper.
        """
        for pid in (self.process.pid, *others):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for its end; a node that does not end is stopped. Returns the exit code."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.stop()
            return -1

    def stop(self) -> None:
        """SIGTERM it, and wait for its end."""
        self.process.terminate()
        self.process.wait()
        self._log.close()


class Audience:
    """Prints what the ranks say, and finds what the demo waits for."""

    def __init__(self) -> None:
        self.reports: queue.Queue[Report] = queue.Queue()
        self._heard: list[Report] = []

    def wait_for(self, kind: str, round: int, count: int = 1, step: int | None = None) -> list[Report]:
        """Wait until so many ranks of a round have reported such a thing, at that step if one is named."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found = [one for one in self._heard if (one.kind, one.round) == (kind, round)]
            found = [one for one in found if step in (None, one.step)]
            if len({one.rank for one in found}) >= count:
                return sorted(found, key=lambda one: one.rank)
            try:
                self._hear(self.reports.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                sys.exit(f"no {count} ranks of round {round} reported {kind!r} within {PATIENCE:.0f} s")

    def heard(self, kind: str, round: int, step: int) -> bool:
        """Whether any rank has reported such a thing."""
        return any((one.kind, one.round, one.step) == (kind, round, step) for one in self._heard)

    def wait_for_moment(self, kind: str, moment: Moment) -> Report:
        """Wait until that rank has reported such a thing."""
        return self.wait_for(kind, moment.round, step=moment.step)[0]

    def _hear(self, report: Report) -> None:
        if report.rank == 0 and report.kind in ("resumed", "trained", "committed"):
            say(f"   step {report.step:3}: {report.kind} {report.text}")
        self._heard.append(report)


def say(text: str = "") -> None:
    """Tell the audience."""
    print(text, flush=True)


def headline(text: str) -> None:
    """Begin a chapter."""
    say(f"\n── {text}")


def show(*arguments: str) -> None:
    """Run a ``muster`` command as the audience would."""
    say(f"   $ muster {' '.join(arguments)}")
    result = subprocess.run([MUSTER, *arguments], capture_output=True, text=True, check=True)
    for line in result.stdout.splitlines():
        say(f"   {line.rstrip()}")


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
        told = self._audience.wait_for("failed", 0, WORLD_SIZE)
        self._all_were_told(told, f"rank {victim} ({HOST}, pid ", "killed by SIGKILL")
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
        told = self._audience.wait_for("failed", 0, WORLD_SIZE - PER_NODE, PAUSE)
        self._all_were_told(told, f"rank {victim.rank} ({HOST}, pid {victim.pid}")
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

    def _all_were_told(self, told: list[Report], *what: str) -> None:
        say(f"   rank {told[0].rank} was told: {_indent(told[0].text)}")
        for report in told:
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


class LocalDemo:
    """Chapter 7: a job whose checkpoints are on its nodes."""

    def __init__(self, coordinator: Coordinator, folder: Path) -> None:
        self._coordinator = coordinator
        self._folder = folder
        self._audience = Audience()
        self._nodes: list[Node] = []

    def _disk(self, number: int) -> Path:
        return self._folder / f"disk-of-node-{number}"

    def _add_node(self) -> None:
        number = len(self._nodes)
        rank = [str(LOCAL_PROGRAM), str(self._folder), str(LOCAL_STEPS), str(self._disk(number))]
        endpoint, reports = self._coordinator.endpoint, self._audience.reports
        self._nodes.append(Node(number, endpoint, self._folder, reports, LOCAL_RUN, 1, rank))

    def lose_a_node_with_its_disk(self) -> None:
        """All of chapter 7."""
        headline(f"another job keeps its checkpoints on the disks of its {NODES} nodes, with one copy each")
        for _ in range(NODES):
            self._add_node()
        step = demo_local_rank.PAUSE
        saved = self._audience.wait_for("committed", 0, NODES, step)
        self._wait_for_copies(step)
        endpoint = f"--endpoint={self._coordinator.endpoint}"
        show("get", "checkpoints", LOCAL_RUN, endpoint)
        victim = saved[1].node
        number = self._nodes.index(victim)
        disk, shared = self._disk(number), self._folder / "checkpoints"
        headline(
            f"a node is killed, its disk is wiped, and shared storage is gone (step {step} was not there yet)"
        )
        (keeper,) = disk.glob("*/keeper.json")
        victim.kill([saved[1].pid, json.loads(keeper.read_text())["pid"]])
        shutil.rmtree(disk)
        shared.rename(self._folder / "unreachable")
        demo_local_rank.go(self._folder).touch()
        lost = time.monotonic()
        self._add_node()
        resumed = self._audience.wait_for("resumed", 1, NODES)
        if {one.step for one in resumed} != {step}:
            sys.exit(f"the ranks resumed from steps {[one.step for one in resumed]}, not {step}")
        say(f"   a fresh node took its place, and all ranks resumed from step {step} after")
        say(
            f"   {time.monotonic() - lost:.1f} s, from their own disks and a peer's: there is no shared storage to read"
        )
        (self._folder / "unreachable").rename(shared)
        self._audience.wait_for("done", 1, NODES)
        if any(node.end() != 0 for node in self._nodes if node is not victim):
            sys.exit(f"a node failed; the logs are in {self._folder}")
        say(f"   training finished at step {LOCAL_STEPS}")

    def _wait_for_copies(self, step: int) -> None:
        command = [str(MUSTER), "get", "checkpoints", LOCAL_RUN, "-o", "json"]
        command.append(f"--endpoint={self._coordinator.endpoint}")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for one in json.loads(shown).get("checkpoints", []):
                is_copied = one["level"] != "DURABILITY_LEVEL_LOCAL"
                if int(one["checkpoint"]["step"]) == step and is_copied:
                    return
            time.sleep(0.1)
        sys.exit(f"step {step} has no copies after {PATIENCE:.0f} s")

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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
