"""Barriers through relays that die, sleep and are cut off, with faults drawn by a seed, and a judge.

Every process is real: a coordinator, three relays, and the ranks of two runs, of which each node has two
behind its relay and one connects directly. For a long run:

    python -m tests.support.chaos.relay_chaos --faults 300
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from lab.patience import PACE, PATIENCE, until
from lab.processes.coordinator import MUSTER, Coordinator, free_port
from lab.processes.fork_client import spawning
from lab.processes.proxy import Proxy
from lab.processes.relay import Relay
from muster.v1 import common_pb2
from tests.support.members import members
from tests.support.ranks import Identity, Rank, RankFailed
from tests.support.world import history

RUNS = ("alpha", "beta")
NODES = 3
PER_NODE = 2
SIZE = NODES * PER_NODE + 1
"""The last rank has no relay."""
SEEN_WITHIN = 10.0
"""Seconds within which the coordinator must know that a worker behind a living relay is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to happen."""

    seed: int
    faults: int
    only: tuple[str, ...] = ()
    """The kinds of fault; empty: all."""
    pauses: float = 1.0
    """For how long faults last, as a part of what they usually do."""
    timeout: float = 60.0
    """Timeout of each barrier, in seconds."""
    pause: float = 0.0
    """Seconds between two barriers; 0: as many as the machine bears."""
    program: tuple[str, ...] = (str(MUSTER),)
    """The relays'."""


@dataclass(slots=True)
class Account:
    """What did happen."""

    plan: Plan
    faults: Counter[str] = field(default_factory=Counter)
    barriers: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    folded: float = 0.0
    """Arrivals in each message of the relays."""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        lines = [
            f"seed {self.plan.seed}, {self.seconds:.0f} s, {self.faults.total()} faults: {faults}",
            f"{self.barriers} barriers of {SIZE} ranks ({outcomes}), the slowest took {self.longest:.1f} s",
            f"{self.folded:.2f} arrivals in a message of a relay",
            *(f"WRONG: {one}" for one in self.wrong),
        ]
        return "\n".join(lines)


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


class Scene:
    """All processes.

    Args:
        plan: what is to happen.
        folder: an empty one, where all traces are left.
        stack: ends them.
    """

    def __init__(self, plan: Plan, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._chance = random.Random(plan.seed)
        self._plan = plan
        self._end = folder / "end"
        self.coordinator = stack.enter_context(Coordinator(folder, session_ttl=PATIENCE))
        self.nodes = [self._node(number, folder) for number in range(NODES)]
        self.ranks = {(run, rank): self._rank(run, rank) for run in RUNS for rank in range(SIZE)}
        self.killed: list[Rank] = []
        self.wrong: list[str] = []
        self.arrivals = self.messages = 0.0
        self.kinds: tuple[Callable[[], None], ...] = (
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
        if plan.only:
            self.kinds = tuple(kind for kind in self.kinds if kind.__name__ in plan.only)

    def _node(self, number: int, folder: Path) -> Node:
        above = self._stack.enter_context(Proxy(self.coordinator.port))
        last = number == NODES - 1
        listen = f"127.0.0.1:{free_port()}" if last else ""
        relay = Relay(folder, above.endpoint, listen=listen, program=self._plan.program)
        self._stack.enter_context(relay)
        below = self._stack.enter_context(Proxy(int(listen.rpartition(":")[2]))) if last else None
        return Node(relay, above, below, self.coordinator.endpoint)

    def _rank(self, run: str, rank: int) -> Rank:
        alone = rank == SIZE - 1
        endpoint = self.coordinator.endpoint if alone else self.nodes[rank // PER_NODE].endpoint
        process = Rank(Identity(endpoint, rank, SIZE, run_id=run))
        self._stack.callback(process.end)
        process.tell("mixed", until=str(self._end), pause=self._plan.pause, timeout=self._plan.timeout)
        return process

    def draw(self, number: int) -> str:
        """Let a fault happen; each kind comes once before any comes again. All is well when it returns.

        Returns:
            Its name.
        """
        if number % len(self.kinds) == 0:
            self._order = self._chance.sample(self.kinds, len(self.kinds))
        kind = self._order[number % len(self.kinds)]
        kind()
        return kind.__name__

    def end(self) -> None:
        """Let the ranks come to their end."""
        self._end.touch()

    def count(self) -> None:
        """Add up what the relays that run now have folded."""
        for node in self.nodes:
            self.arrivals += node.relay.metric("muster_relay_arrivals_total")
            self.messages += node.relay.metric("muster_relay_messages_total")

    # ------------------------------------------------------------------ faults

    def relay_killed(self) -> None:
        """SIGKILL; its workers go on without it, and it comes back."""
        relay = self._any().relay
        relay.kill()
        self._pause(0.1, 2.0)
        relay.start()

    def relay_stopped_and_woken(self) -> None:
        """SIGSTOP for longer than a keepalive."""
        relay = self._any().relay
        relay.signal(signal.SIGSTOP)
        self._pause(1.0, 9.0)
        relay.signal(signal.SIGCONT)

    def relay_cut_from_coordinator(self) -> None:
        """Its connection is reset, and none is taken for a while."""
        node = self._any()
        node.above.cut(refuse=True)
        self._pause(0.1, 5.0)
        node.above.heal()

    def relay_silent_above(self) -> None:
        """What it says, and is told, is lost, and nothing tells it."""
        node = self._any()
        node.above.black_hole()
        self._pause(0.5, 9.0)
        node.above.cut()
        node.above.heal()

    def relay_cut_from_workers(self) -> None:
        """Their connections are reset, or fall silent."""
        below = self.nodes[-1].below
        assert below is not None
        if self._chance.random() < 0.5:
            below.black_hole()
            self._pause(0.5, 9.0)
        below.cut()
        below.heal()

    def relay_restarted(self) -> None:
        """SIGTERM: it asks its workers to go on without it."""
        relay = self._any().relay
        self.arrivals += relay.metric("muster_relay_arrivals_total")
        self.messages += relay.metric("muster_relay_messages_total")
        if relay.stop() != 0:
            self.wrong.append(f"a relay that was told to stop failed: {relay.log_path.read_text()[-500:]}")
        self._pause(0.0, 1.0)
        relay.start()

    def worker_killed(self) -> None:
        """SIGKILL behind a living relay, which must tell; another process of the rank takes its place."""
        run = RUNS[-1]  # What the dead have heard is lost, so that the other run is judged by all.
        rank = self._chance.randrange(1, SIZE - 1)  # Rank 0 says when it is over.
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
        worker = self._chance.choice(list(self.ranks.values()))
        worker.kill(signal.SIGSTOP)
        self._pause(0.5, 6.0)
        worker.kill(signal.SIGCONT)

    def coordinator_killed(self) -> None:
        """SIGKILL, while relays hold arrivals; it is started again on its state."""
        self.coordinator.kill()
        self._pause(0.0, 2.0)
        self.coordinator.start()

    def _any(self) -> Node:
        return self._chance.choice(self.nodes)

    def _is_there(self, run: str, pid: int) -> bool:
        connected = common_pb2.MEMBER_STATE_CONNECTED
        shown = members(self.coordinator.endpoint, run)
        return any(member.pid == pid and member.state == connected for member in shown)

    def _pause(self, least: float, most: float) -> None:
        # An idle wait is wanted here: the fault lasts for so long.
        time.sleep(self._chance.uniform(least, most) * self._plan.pauses)


def run(plan: Plan, folder: Path) -> Account:
    """Let it happen, and judge it.

    Args:
        plan: what is to happen.
        folder: an empty one, where all traces are left.
    """
    account = Account(plan)
    began = time.monotonic()
    with ExitStack() as stack:
        scene = Scene(plan, folder, stack)
        until(lambda: {line["run"] for line in scene.coordinator.log("barrier.decided")} >= set(RUNS))
        for number in range(plan.faults):
            account.faults[scene.draw(number)] += 1
            # They are to get on in between.
            time.sleep(0.3)
        scene.count()
        scene.end()
        _judge(account, scene)
        account.wrong += scene.wrong
        account.folded = scene.arrivals / max(scene.messages, 1.0)
    account.seconds = time.monotonic() - began
    return account


def _judge(account: Account, scene: Scene) -> None:
    """One decision, none released without all, nobody out of step, none hung: by what ranks wrote down."""
    events: list[tuple[float, history.Event]] = []
    for process, took in _answers(account, scene):
        account.longest = max([account.longest, *(seconds for _, seconds in took)])
        if process.rank == 0:
            account.barriers += len(took)
        events += process.ask("history")
    told = [event for _, event in sorted(events, key=lambda pair: pair[0])]
    account.wrong += _without_the_killed(history.violations(told), scene)
    account.outcomes.update(
        event.outcome for event in told if isinstance(event, history.Heard) and event.life.rank == 0
    )


def _answers(account: Account, scene: Scene) -> Iterator[tuple[Rank, list[tuple[float, float]]]]:
    """What ranks answer, as they do; nothing if one has failed, and then the others may go on for ever."""
    waiting, deadline = list(scene.ranks.values()), time.monotonic() + 2 * PATIENCE
    while waiting and time.monotonic() < deadline:
        for process in [one for one in waiting if one.has_answered()]:
            waiting.remove(process)
            took = []
            try:
                took = process.answer()
            except RankFailed as failure:
                account.wrong.append(str(failure))
                deadline = min(deadline, time.monotonic() + 2 * account.plan.timeout)
            yield process, took
        time.sleep(PACE)
    account.wrong += [f"rank {one.rank} of {one.identity.run_id} goes on" for one in waiting]


def _without_the_killed(wrong: list[str], scene: Scene) -> list[str]:
    """A killed rank has no history, so its arrivals are unknown."""
    gone = {(one.identity.run_id, one.rank) for one in scene.killed}
    return [one for one in wrong if not any(f"rank {rank}" in one and run in one for run, rank in gone)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Relays under faults of every kind.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=(), metavar="FAULT", help="the kinds of fault")
    parser.add_argument(
        "--broken", metavar="KIND", help="with a fault of tests.support.chaos.broken_relay built in"
    )
    given = parser.parse_args()
    broken = (sys.executable, "-m", "tests.support.chaos.broken_relay", given.broken)
    plan = Plan(
        seed=given.seed,
        faults=given.faults,
        only=tuple(given.only),
        program=broken if given.broken else (str(MUSTER),),
    )
    print(plan, flush=True)
    with tempfile.TemporaryDirectory(prefix="muster-relay-chaos-") as folder, spawning():
        account = run(plan, Path(folder))
    print(account)
    return 1 if account.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
