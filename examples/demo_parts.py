"""What the chapters of the demo are made of: the coordinator, the nodes, and what the audience hears."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from demo_rank import Moment

NODES = 3
SESSION_TTL = 5
PATIENCE = 90.0
"""Seconds to wait for a rank before the demo gives up."""
MUSTER = Path(sys.executable).with_name("muster")
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
