"""Barriers through relays that die, sleep and are cut off.

Every process is real: a coordinator, three relays, and the ranks of two runs. Each node has two ranks of each
run behind its relay, and one rank connects directly. For a long run:

    python -m tests.support.chaos.relay_chaos --faults 300
"""

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lab.patience import PATIENCE, until
from lab.processes.coordinator import MUSTER, Coordinator, free_port
from lab.processes.proxy import Proxy
from lab.processes.relay import Relay
from muster.v1 import common_pb2
from tests.support.chaos.harness import DrawnFaults, command, option
from tests.support.chaos.traffic import Traffic
from tests.support.members import members
from tests.support.ranks import Identity, Rank

RUNS = ("alpha", "beta")
NODES = 3
PER_NODE = 2
SIZE = NODES * PER_NODE + 1
"""The last rank has no relay."""
SEEN_WITHIN = 10.0
"""Seconds within which the coordinator must know that a worker behind a living relay is dead."""


@dataclass(slots=True)
class Node:
    """A relay, its way up and, on the last node, its way down, each of which can be cut."""

    relay: Relay
    above: Proxy
    below: Proxy | None
    direct: str

    @property
    def endpoint(self) -> str:
        """For its workers."""
        return f"{self.below.endpoint if self.below else self.relay.listen},{self.direct}"


@dataclass(kw_only=True)
class RelayChaos(DrawnFaults):
    """Inject faults into relays, their workers and their coordinator."""

    BROKEN = "broken_relay"
    PROGRAM = (str(MUSTER),)
    BETWEEN = 0.3

    timeout: float = option(60.0, "timeout of each barrier, in seconds")

    def open(self, folder: Path, stack: ExitStack) -> None:
        """Start the coordinator, the relays and the ranks, and wait for their first barriers."""
        self._stack = stack
        self.coordinator = stack.enter_context(Coordinator(folder, session_ttl=PATIENCE))
        self.traffic = Traffic(self, folder, stack, self.timeout)
        self.nodes = [self._node(number, folder) for number in range(NODES)]
        self.ranks = {(run, rank): self._rank(run, rank) for run in RUNS for rank in range(SIZE)}
        self.killed: list[Rank] = []
        self._arrivals = self._messages = 0.0
        until(lambda: {line["run"] for line in self.coordinator.log("barrier.decided")} >= set(RUNS))

    def _node(self, number: int, folder: Path) -> Node:
        above = self._stack.enter_context(Proxy(self.coordinator.port))
        last = number == NODES - 1
        listen = f"127.0.0.1:{free_port()}" if last else ""
        relay = Relay(folder, above.endpoint, listen=listen, program=self.program)
        self._stack.enter_context(relay)
        below = self._stack.enter_context(Proxy(int(listen.rpartition(":")[2]))) if last else None
        return Node(relay, above, below, self.coordinator.endpoint)

    def _rank(self, run: str, rank: int) -> Rank:
        alone = rank == SIZE - 1
        endpoint = self.coordinator.endpoint if alone else self.nodes[rank // PER_NODE].endpoint
        return self.traffic.start("mixed", Identity(endpoint, rank, SIZE, run_id=run))

    def judge(self) -> None:
        """Let the ranks end, and judge their barriers."""
        for node in self.nodes:
            self._count(node.relay)
        self.traffic.end()
        self.traffic.judge_barriers(list(self.ranks.values()), self.killed)

    @property
    def folded(self) -> float:
        """Arrivals in each message of the relays."""
        return self._arrivals / max(self._messages, 1.0)

    def facts(self) -> list[str]:
        """Return how slow the barriers were, and how much the relays folded."""
        return [
            f"the slowest: {self.traffic.slowest()}",
            f"{self.folded:.2f} arrivals in a message of a relay",
        ]

    def _count(self, relay: Relay) -> None:
        self._arrivals += relay.metric("muster_relay_arrivals_total")
        self._messages += relay.metric("muster_relay_messages_total")

    # ------------------------------------------------------------------ faults

    def kinds(self) -> tuple[Callable[[], None], ...]:
        """Return the faults."""
        return (
            self.relay_killed,
            self.relay_stopped_and_woken,
            self.relay_cut_from_coordinator,
            self.relay_silent_above,
            self.relay_cut_from_workers,
            self.relay_restarted,
            self.worker_killed,
            self.worker_stopped_and_woken,
            self.coordinator_killed,
        )

    def relay_killed(self) -> None:
        """SIGKILL; its workers go on without it, and it comes back."""
        relay = self._any().relay
        relay.kill()
        self.idle(0.1, 2.0)
        relay.start()

    def relay_stopped_and_woken(self) -> None:
        """SIGSTOP for longer than a keepalive."""
        relay = self._any().relay
        relay.signal(signal.SIGSTOP)
        self.idle(1.0, 9.0)
        relay.signal(signal.SIGCONT)

    def relay_cut_from_coordinator(self) -> None:
        """Its connection is reset, and none is taken for a while."""
        node = self._any()
        node.above.cut(refuse=True)
        self.idle(0.1, 5.0)
        node.above.heal()

    def relay_silent_above(self) -> None:
        """What it says, and is told, is lost, and nothing tells it."""
        node = self._any()
        node.above.black_hole()
        self.idle(0.5, 9.0)
        node.above.cut()
        node.above.heal()

    def relay_cut_from_workers(self) -> None:
        """Their connections are reset, or fall silent."""
        below = self.nodes[-1].below
        assert below is not None
        if self.chance.random() < 0.5:
            below.black_hole()
            self.idle(0.5, 9.0)
        below.cut()
        below.heal()

    def relay_restarted(self) -> None:
        """SIGTERM: it asks its workers to go on without it."""
        relay = self._any().relay
        self._count(relay)
        if relay.stop() != 0:
            self.wrong.append(f"a relay that was told to stop failed: {relay.log_path.read_text()[-500:]}")
        self.idle(0.0, 1.0)
        relay.start()

    def worker_killed(self) -> None:
        """SIGKILL behind a living relay, which must tell; another process of the rank takes its place."""
        run = RUNS[-1]  # What the dead have heard is lost, so that the other run is judged by all.
        rank = self.chance.randrange(1, SIZE - 1)  # Rank 0 says when it is over.
        worker = self.ranks[run, rank]
        worker.kill()
        try:
            until(lambda: not self._is_there(run, worker.pid), patience=SEEN_WITHIN)
        except AssertionError:
            self.wrong.append(f"the death of rank {rank} of {run} was not known after {SEEN_WITHIN:g} s")
        self.killed.append(worker)
        self.ranks[run, rank] = self._rank(run, rank)

    def worker_stopped_and_woken(self) -> None:
        """SIGSTOP: it is silent, and then speaks as if nothing had happened."""
        worker = self.chance.choice(list(self.ranks.values()))
        worker.kill(signal.SIGSTOP)
        self.idle(0.5, 6.0)
        worker.kill(signal.SIGCONT)

    def coordinator_killed(self) -> None:
        """SIGKILL, while relays hold arrivals; it is started again on its state."""
        self.coordinator.kill()
        self.idle(0.0, 2.0)
        self.coordinator.start()

    def _any(self) -> Node:
        return self.chance.choice(self.nodes)

    def _is_there(self, run: str, pid: int) -> bool:
        connected = common_pb2.MEMBER_STATE_CONNECTED
        shown = members(self.coordinator.endpoint, run)
        return any(member.pid == pid and member.state == connected for member in shown)


if __name__ == "__main__":
    sys.exit(command(RelayChaos, faults=300))
