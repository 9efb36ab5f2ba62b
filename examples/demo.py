"""``make demo``: the main job of Muster, shown with real processes in a minute and a half.

1. A coordinator keeps its state in SQLite. Four nodes, each a torchrun with one rank, come together through
   it, train, and checkpoint.
2. One node is killed (SIGKILL) before a barrier: all other ranks learn which rank, where, and stop.
3. A new node takes its place. torchrun brings them together in a new round, and they resume from the last
   checkpoint that was committed.
4. The coordinator is killed (SIGKILL) while ranks wait, and started again: the barrier completes.
5. Training goes on to the end.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from training_job import UNCOMMITTED, latest

WORLD_SIZE = 4
STEPS = 100
HOLD_AT = 60
RUN = "demo"
SESSION_TTL = 5
PATIENCE = 90.0
"""Seconds to wait for a rank before the demo gives up."""
MUSTER = Path(sys.executable).with_name("muster")
RANK_PROGRAM = Path(__file__).with_name("demo_rank.py")
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
    kind: str
    """``says``, ``holds``, ``failed`` or ``done``."""
    text: str


class Node:
    """A torchrun with one rank.

    Args:
        number: its number, for its log.
        endpoint: the coordinator's.
        folder: where the checkpoints and logs go.
        held: the rank that waits before the barrier of one step.
        reports: where what its ranks tell goes.
    """

    def __init__(
        self, number: int, endpoint: str, folder: Path, held: int, reports: "queue.Queue[Report]"
    ) -> None:
        self._log = (folder / f"node-{number}.log").open("wb")
        self._reports = reports
        arguments = [f"{folder}", f"{STEPS}", f"{held}", f"{HOLD_AT}"]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=muster"),
                *(f"--rdzv-endpoint={endpoint}", f"--rdzv-id={RUN}", f"--rdzv-conf={CONF}"),
                *(f"--nnodes={WORLD_SIZE}", "--nproc-per-node=1", "--max-restarts=3"),
                *("--local-addr=127.0.0.1", str(RANK_PROGRAM), *arguments),
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

    def kill(self, rank_pid: int) -> None:
        """SIGKILL the agent and its rank, as when the machine dies."""
        self.process.kill()
        with suppress(ProcessLookupError):
            os.kill(rank_pid, signal.SIGKILL)

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

    def wait_for(self, round: int, kind: str, count: int) -> list[Report]:
        """Wait until so many ranks of a round have reported such a thing."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found = [one for one in self._heard if (one.round, one.kind) == (round, kind)]
            if len(found) >= count:
                return sorted(found, key=lambda one: one.rank)
            try:
                report = self.reports.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                sys.exit(f"no {count} ranks of round {round} reported {kind!r} within {PATIENCE:.0f} s")
            if report.kind == "says":
                say(f"   {report.text}")
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


def wait_for_arrivals(endpoint: str, arrived: int) -> None:
    """Wait until so many ranks are at the open barrier."""
    while True:
        command = [str(MUSTER), "get", "barriers", RUN, "-o", "json", f"--endpoint={endpoint}"]
        shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        if any("decision" not in one and one["arrived"] == arrived for one in shown.get("barriers", [])):
            return
        time.sleep(0.1)


class Demo:
    """The nodes of the job, and the chapters of the show."""

    def __init__(self, coordinator: Coordinator, folder: Path) -> None:
        self._coordinator = coordinator
        self._folder = folder
        self._audience = Audience()
        self._nodes: list[Node] = []

    @property
    def _endpoint(self) -> str:
        return f"--endpoint={self._coordinator.endpoint}"

    def _add_node(self, held: int) -> None:
        node = Node(len(self._nodes), self._coordinator.endpoint, self._folder, held, self._audience.reports)
        self._nodes.append(node)

    def kill_a_node(self) -> None:
        """Chapters 1 and 2."""
        headline(f"{WORLD_SIZE} nodes come together by torchrun --rdzv-backend=muster, train and checkpoint")
        victim = 2
        for _ in range(WORLD_SIZE):
            self._add_node(victim)
        (held,) = self._audience.wait_for(0, "holds", 1)
        wait_for_arrivals(self._coordinator.endpoint, WORLD_SIZE - 1)
        headline(f"the node of rank {victim} (pid {held.pid}) is killed before the barrier of step {HOLD_AT}")
        killed = time.monotonic()
        held.node.kill(held.pid)
        told = self._audience.wait_for(0, "failed", WORLD_SIZE - 1)
        say(f"   rank {told[0].rank} was told: {_indent(told[0].text)}")
        for report in told:
            if f"rank {victim} ({socket.gethostname()}, pid {held.pid}" not in report.text:
                sys.exit(f"rank {report.rank} was not told who is missing: {report.text}")
        say("   and the other ranks the same: each names the rank, its host and its pid")
        say(f"   all were told within {time.monotonic() - killed:.1f} s; the session TTL is {SESSION_TTL} s")
        say(f"   step-{HOLD_AT} was not committed, for anyone: the last one is {_name(latest(self._folder))}")
        show("get", "barriers", RUN, "--history=3", self._endpoint)

    def kill_the_coordinator(self) -> None:
        """Chapters 3 to 5."""
        headline("a new node takes its place; torchrun brings all together in a new round")
        self._add_node(held=2)
        (held,) = self._audience.wait_for(1, "holds", 1)
        show("get", "rounds", RUN, self._endpoint)
        wait_for_arrivals(self._coordinator.endpoint, WORLD_SIZE - 1)
        headline(f"{WORLD_SIZE - 1} ranks wait at the barrier of step {HOLD_AT}; the coordinator is killed")
        say(f"   SIGKILL to pid {self._coordinator.kill()}; it is started again on the same SQLite file")
        self._coordinator.start()
        say(f"   rank {held.rank} goes to the barrier now")
        (self._folder / "go-1").touch()
        losses = [report.text for report in self._audience.wait_for(1, "done", WORLD_SIZE)]
        living = [node for node in self._nodes if node.process.poll() != -signal.SIGKILL]
        if any(node.end() != 0 for node in living):
            sys.exit(f"a node failed; the logs are in {self._folder}")
        headline("done")
        say(f"   training finished at step {STEPS}; the losses of the ranks: {', '.join(losses)}")
        show("get", "barriers", RUN, "--history=3", self._endpoint)
        show("get", "runs", self._endpoint)

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
        try:
            demo.kill_a_node()
            demo.kill_the_coordinator()
        finally:
            demo.stop()
            coordinator.stop()
        committed = latest(folder)
        if committed is None or committed[0] != STEPS:
            sys.exit(f"the last checkpoint should be step-{STEPS}, and is {_name(committed)}")
        if list(folder.glob(f"*{UNCOMMITTED}")):
            sys.exit("an uncommitted checkpoint was left behind")
    say(
        f"""
What you saw, in {time.monotonic() - started:.0f} s:
 - torchrun's agents came together through the coordinator; no node hosted what the others needed.
 - A checkpoint became one only when every rank had arrived: one decision, the same for all.
 - A killed rank was named to every other rank, with host and pid, without waiting for a timeout.
 - No rank believed in the checkpoint that the others knew had failed; a new node took the dead one's
   place, and training resumed from the last checkpoint that was committed.
 - A coordinator killed while ranks waited lost nothing: it came back, and the barrier completed."""
    )


def _indent(text: str) -> str:
    return text.replace("\n", "\n     ")


def _name(committed: tuple[int, Path] | None) -> str:
    return committed[1].name if committed else "none"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
