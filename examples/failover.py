"""``make failover``: several coordinators on etcd lose what they can lose, and a training job goes on.

Three members of etcd, three coordinators of which one leads, and two nodes of torchrun that train and save.

1. The leader is killed (SIGKILL) while a rank waits at a barrier: another one leads and releases it.
2. The next one is stopped (SIGSTOP) for longer than its lease, and woken: it finds itself deposed, and ends.
3. The next one is cut off from etcd, but not from the ranks: it ends before another one leads.
4. The leader among the members of etcd is killed.
5. The last leader is told to stop (SIGTERM), as in a rolling update: it hands the lead over.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from failover_rank import GATE_EVERY

from demo_parts import headline, say
from lab.processes.coordinator import MUSTER
from lab.processes.etcd import Cluster, cluster
from lab.processes.replicas import LEASE_TTL, Replica, Replicas, replicas

NODES = 2
RUN = "failover"
PATIENCE = 90.0
"""Seconds to wait for a rank before the demonstration gives up."""
RANK_PROGRAM = Path(__file__).with_name("failover_rank.py")


@dataclass(frozen=True)
class Report:
    """What a rank tells."""

    rank: int
    kind: str
    """``at the gate``, ``through the gate``, ``committed`` or ``done``."""
    step: int
    seconds: float


class Job:
    """The nodes of a job under torchrun, and what its ranks tell.

    Args:
        endpoint: the coordinators'.
        folder: where checkpoints and logs go.
    """

    def __init__(self, endpoint: str, folder: Path) -> None:
        self._folder = folder
        self._reports: queue.Queue[Report] = queue.Queue()
        self.heard: list[Report] = []
        self.nodes = [self._node(number, endpoint) for number in range(NODES)]

    def _node(self, number: int, endpoint: str) -> "subprocess.Popen[str]":
        log = (self._folder / f"node-{number}.log").open("wb")
        node = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=muster"),
                *(f"--rdzv-endpoint={endpoint}", f"--rdzv-id={RUN}", f"--nnodes={NODES}"),
                *("--nproc-per-node=1", "--max-restarts=0", "--local-addr=127.0.0.1"),
                *(str(RANK_PROGRAM), str(self._folder)),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        threading.Thread(target=self._listen, args=(node,), daemon=True).start()
        return node

    def _listen(self, node: "subprocess.Popen[str]") -> None:
        assert node.stdout is not None
        for line in node.stdout:
            with suppress(json.JSONDecodeError):
                self._reports.put(Report(**json.loads(line)))

    def wait_for(self, kind: str, count: int = 1, step: int | None = None) -> list[Report]:
        """Wait until so many new reports of a kind have come."""
        found: list[Report] = []
        deadline = time.monotonic() + PATIENCE
        while len(found) < count:
            try:
                report = self._reports.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                sys.exit(f"no rank reported {kind!r} within {PATIENCE:.0f} s; logs: {self._folder}")
            self.heard.append(report)
            if report.kind == kind and step in (None, report.step):
                found.append(report)
        return found

    def checkpoints(self, count: int) -> float:
        """Wait for some more checkpoints; returns the seconds that the slowest took."""
        return max(report.seconds for report in self.wait_for("committed", count * NODES))

    def go(self, step: int) -> None:
        """Let rank 1 through a gate."""
        (self._folder / f"go-{step}").touch()

    def end(self) -> list[int]:
        """Let the training end; the exit codes of the nodes."""
        (self._folder / "enough").touch()
        self.wait_for("done", NODES)
        return [node.wait(PATIENCE) for node in self.nodes]

    def stop(self) -> None:
        """Stop what still runs."""
        for node in self.nodes:
            if node.poll() is None:
                node.terminate()
                node.wait()


def show(*arguments: str) -> None:
    """Run a ``muster`` command as the audience would."""
    say(f"   $ muster {' '.join(one for one in arguments if not one.startswith('--endpoint'))}")
    result = subprocess.run([MUSTER, *arguments], capture_output=True, text=True, check=True)
    for line in result.stdout.splitlines():
        say(f"   {line.rstrip()}")


class Demonstration:
    """The chapters."""

    def __init__(self, installation: Replicas, etcd: Cluster, job: Job) -> None:
        self._replicas = installation
        self._etcd = etcd
        self._job = job
        self._names = {
            one.endpoint: f"coordinator {number}" for number, one in enumerate(installation.members)
        }
        self._gate = GATE_EVERY

    def name(self, replica: Replica) -> str:
        """What the audience knows it as."""
        return self._names[replica.endpoint]

    def begin(self) -> None:
        """All is well."""
        headline(f"three members of etcd, three coordinators, {NODES} nodes of torchrun that train and save")
        for endpoint, name in self._names.items():
            say(f"   {name} is at {endpoint}")
        leader = self.name(self._replicas.leader())
        say(f"   {leader} leads; its lease lasts for {LEASE_TTL} s without news of it")
        show("get", "replicas", f"--endpoint={self._replicas.endpoint}")
        slowest = self._job.checkpoints(2)
        say(f"   2 checkpoints committed, on every rank; the slower one took {slowest:.1f} s")

    def kill_the_leader(self) -> None:
        """Chapter 1."""
        while not any(report.step == self._gate for report in self._job.wait_for("at the gate", NODES)):
            self._gate += GATE_EVERY
        leader = self._replicas.leader()
        headline(f"{self.name(leader)}, which leads, is killed while rank 0 waits at a barrier for rank 1")
        began = time.monotonic()
        leader.coordinator.kill()
        self._succeeded(leader, began)
        self._job.go(self._gate)
        for report in self._job.wait_for("through the gate", NODES, self._gate):
            say(f"   rank {report.rank} was released, after {report.seconds:.1f} s at the barrier")
        leader.coordinator.start()
        self._goes_on()

    def stop_and_wake_the_leader(self) -> None:
        """Chapter 2."""
        leader = self._replicas.leader()
        headline(f"{self.name(leader)} is stopped (SIGSTOP) for longer than its lease, and woken")
        began = time.monotonic()
        leader.coordinator.signal(signal.SIGSTOP)
        self._succeeded(leader, began)
        leader.coordinator.signal(signal.SIGCONT)
        code = leader.coordinator.ended()
        say(f"   woken, {self.name(leader)} ended with {code}: {self._last_words(leader)}")
        leader.coordinator.start()
        self._goes_on()

    def cut_the_leader_from_etcd(self) -> None:
        """Chapter 3."""
        leader = self._replicas.leader()
        headline(f"{self.name(leader)} is cut off from etcd; the ranks still reach it")
        began = time.monotonic()
        leader.cut_from_etcd()
        leader.coordinator.ended()
        say(f"   it ended by itself after {time.monotonic() - began:.1f} s: {self._last_words(leader)}")
        self._succeeded(leader, began)
        leader.heal()
        leader.coordinator.start()
        self._goes_on()

    def kill_etcds_leader(self) -> None:
        """Chapter 4."""
        member = self._etcd.leader()
        before = self._replicas.leader()
        headline(f"{member.name}, the leader among the members of etcd, is killed")
        member.kill()
        self._goes_on()
        same = "still leads" if self._replicas.leader() is before else "leads now"
        say(f"   {self.name(self._replicas.leader())} {same}")
        member.start()
        self._etcd.wait()

    def hand_over(self) -> None:
        """Chapter 5."""
        leader = self._replicas.leader()
        headline(f"{self.name(leader)} is told to stop (SIGTERM), as in a rolling update")
        began = time.monotonic()
        leader.coordinator.signal(signal.SIGTERM)
        self._succeeded(leader, began)
        leader.coordinator.ended()
        leader.coordinator.start()
        self._goes_on()

    def finish(self) -> None:
        """The job comes to its end."""
        codes = self._job.end()
        if any(codes):
            sys.exit(f"the nodes ended with {codes}")
        committed = {report.step for report in self._job.heard if report.kind == "committed"}
        headline("done")
        say(f"   the job ended by itself: {len(committed)} checkpoints committed, no restart, one round")
        show("get", "rounds", RUN, f"--endpoint={self._replicas.endpoint}")
        show("get", "replicas", f"--endpoint={self._replicas.endpoint}")

    def _succeeded(self, before: Replica, began: float) -> None:
        while time.monotonic() < began + PATIENCE:
            leader = next((one for one in self._replicas.members if one is not before and one.leads), None)
            if leader is not None:
                say(f"   {self.name(leader)} leads, {time.monotonic() - began:.1f} s later")
                return
            time.sleep(0.02)
        sys.exit(f"nobody leads within {PATIENCE:.0f} s")

    def _goes_on(self) -> None:
        slowest = self._job.checkpoints(2)
        say(f"   what the job saw: 2 more checkpoints committed, the slower one after {slowest:.1f} s")
        self._pass_gates()

    def _pass_gates(self) -> None:
        """Nobody is to wait at the gates to come."""
        for step in range(self._gate, self._gate + 100 * GATE_EVERY, GATE_EVERY):
            self._job.go(step)

    def _last_words(self, replica: Replica) -> str:
        said = replica.coordinator.log_path.read_text().splitlines()[-1]
        return str(json.loads(said)["reason"]).removeprefix(f"{replica.coordinator.state}: ")


def main() -> None:
    """Show everything, in a folder that is removed at the end."""
    started = time.monotonic()
    with ExitStack() as stack:
        name = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="muster-failover-", ignore_cleanup_errors=True)
        )
        folder = Path(name)
        etcd = stack.enter_context(cluster(3))
        installation = stack.enter_context(replicas(folder, etcd))
        job = Job(installation.endpoint, folder)
        stack.callback(job.stop)
        shown = Demonstration(installation, etcd, job)
        shown.begin()
        shown.kill_the_leader()
        shown.stop_and_wake_the_leader()
        shown.cut_the_leader_from_etcd()
        shown.kill_etcds_leader()
        shown.hand_over()
        shown.finish()
    say(f"   all of it took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
