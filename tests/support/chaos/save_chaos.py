"""A job under torchrun that saves again and again, while its children, ranks and coordinator are killed.

What is killed, and when, is drawn from a seed; what it hits is up to the machine. Again and again the state
gets other tensors, on one rank and on all. Afterwards a judge reads what the ranks wrote down. For long:

    python -m tests.support.chaos.save_chaos --saves 500
"""

import json
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from lab.patience import PATIENCE
from lab.processes.agents import Job, Worker
from lab.processes.bucket_server import BUCKET, BucketServer
from lab.processes.coordinator import Coordinator
from muster.checkpoint.directory import CheckpointDirectory
from muster.worker.saves.storage.bucket_storage import BucketStorage
from tests.support.chaos.harness import Chaos, command, option, stacks_of
from tests.support.saves.child_processes import children_of, state_of
from tests.support.saves.save_history import (
    UNCONFIRMED,
    Event,
    from_line,
    verdict,
    whole_checkpoint,
    whole_files,
)


@dataclass(kw_only=True)
class SaveChaos(Chaos):
    """Kill the children, ranks and coordinator of a job that saves under torchrun."""

    saves: int = option(500, "after how many the job ends; one that is repeated after a restart counts again")
    kind: str = option("checkpointer", "the saver", choices=("checkpointer", "files", "blind"))
    """As :class:`tests.support.chaos.chaos_rank.Rank` takes it."""
    agents: int = option(2, "the number of agents")
    ranks: int = option(2, "ranks of each agent")
    device: str = option("cpu", "where the state is; several ranks may share a GPU", choices=("cpu", "cuda"))
    bucket: bool = option(False, "whether the checkpoints are in a bucket")
    bucket_faults: float = option(0.0, "the part of the requests to it that go wrong")
    relays: bool = option(True, "whether the ranks of an agent speak through one stream")
    child_odds: float = option(0.15, "the probability that a child of a save is killed")
    rank_every: tuple[int, ...] = option(
        (20, 30), "a rank is killed after so many saves, between two numbers"
    )
    """Empty: never."""
    coordinator_every: int = option(0, "the coordinator is killed after so many saves; 0: never")
    events: list[Event] = field(init=False, default_factory=list)
    committed: set[int] = field(init=False, default_factory=set)

    def open(self, folder: Path, stack: ExitStack) -> None:
        """Start the coordinator and the agents."""
        self._folder = folder
        self._place: _FolderPlace | _BucketPlace = (
            stack.enter_context(_BucketPlace(folder, self.bucket_faults))
            if self.bucket
            else _FolderPlace(folder)
        )
        rank = ("--module", "tests.support.chaos.chaos_rank")
        program = (*rank, str(folder), self._place.name, self.kind, self.device)
        self._coordinator = stack.enter_context(Coordinator(folder, session_ttl=2.0))
        self._job = stack.enter_context(
            Job(folder, self._coordinator.endpoint, command=program, ranks=self.ranks, restarts=self.saves)
        )
        self._news = stack.enter_context(Wire(folder / "events")).events()
        self._scheduled: set[tuple[int, int]] = set()
        self._closed: set[tuple[int, int]] = set()
        self._spared = self._draw_spared()
        for _ in range(self.agents):
            self._job.agent(str(self.agents), join_timeout=60, keep_alive_interval=5, relay=int(self.relays))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.agents * self.ranks

    def step(self) -> bool:
        """Wait for the next event of a rank, and perhaps kill something; until all have come to their end."""
        event = next(self._news)
        if event.what == "closed":
            self._closed.add((event.round, event.rank))
        save = (event.round, event.step)
        if event.what == "scheduled" and save not in self._scheduled:
            self._scheduled.add(save)
            if len(self._scheduled) == self.saves:
                self._job.finish()
            elif len(self._scheduled) < self.saves:
                self._torment(event.round)
        return len(self._closed) < self.world_size

    def judge(self) -> None:
        """Wait for the agents, and read what the ranks wrote down."""
        codes = [agent.wait() for agent in self._job.agents]
        assert codes == [0] * self.agents, self._job.said()
        for history in sorted(self._folder.glob("history-*")):
            self.events += [from_line(line) for line in history.read_text().splitlines()]
        self.committed = self._place.committed()
        files = partial(whole_files, world_size=self.world_size)
        checkpoints = partial(whole_checkpoint, options=self._place.options, world_size=self.world_size)
        whole = checkpoints if self.kind == "checkpointer" else files
        self.wrong += [*verdict(self.events, whole, self.committed), *self._place.left_over()]

    def stacks(self) -> str:
        """Return what the agents said, and the stacks of the last round's ranks."""
        workers = self._job.workers()
        last = [one.pid for one in workers if one.round == workers[-1].round]
        return f"{self._job.said()}\n{stacks_of(self._folder, last)}"

    # ------------------------------------------------------------------ what happened

    def saves_with(self, *what: str) -> set[tuple[int, int]]:
        """The saves (round, step) of which a rank wrote that down."""
        return {(event.round, event.step) for event in self.events if event.what in what}

    def resumed(self) -> set[int]:
        """The rounds that began from a checkpoint."""
        return {event.round for event in self.events if event.what == "loaded" and event.path}

    def facts(self) -> list[str]:
        """Return how the saves went."""
        failed, scheduled = self.saves_with("failed"), self.saves_with("scheduled")
        unconfirmed = {(e.round, e.step) for e in self.events if e.what == "failed" and UNCONFIRMED in e.text}
        unheard = scheduled - self.saves_with("finalized", "failed")
        rounds = {event.round for event in self.events}
        return [
            f"{self.agents} agents of {self.ranks} ranks, {'with' if self.relays else 'without'} relays",
            f"saves: {len(scheduled)} scheduled, {len(self.saves_with('finalized'))} finalized, "
            f"{len(failed)} failed ({len(unconfirmed)} of them written by all, and not confirmed), "
            f"{len(unheard)} of which no rank heard",
            f"committed checkpoints: {len(self.committed)}, all of them loaded afterwards",
            f"rounds: {len(rounds)}, of which {len(self.resumed())} resumed from a checkpoint",
        ]

    # ------------------------------------------------------------------ faults

    def _torment(self, round: int) -> None:
        chance = self.chance
        victim = chance.randrange(self.world_size)
        if self.coordinator_every and len(self._scheduled) % self.coordinator_every == 0:
            self._coordinator.kill()
            time.sleep(chance.random())
            self._coordinator.start()
            self.injected["coordinator killed"] += 1
        self._spared -= 1
        if self._spared == 0:
            time.sleep(chance.uniform(0.0, 0.05))
            worker = self._worker(round, victim)
            hit = _kill(worker.pid, worker.agent)
            self.injected["rank killed"] += hit
            # Who has just gone, for another's sake, is missed; then it is tried again at the next save.
            self._spared = self._draw_spared() if hit else 1
        elif chance.random() < self.child_odds:
            delay = chance.choice((0.0, chance.uniform(0.0, 0.02)))
            worker = self._worker(round, victim)
            child = _wait_for_child(worker.pid)
            time.sleep(delay)
            self.injected["child killed"] += child is not None and _kill(child, worker.pid)

    def _draw_spared(self) -> int:
        """After how many saves a rank is to be killed."""
        if not self.rank_every:
            return -1
        least, most = self.rank_every
        return self.chance.randint(least, most)

    def _worker(self, round: int, rank: int) -> Worker:
        (found,) = (one for one in self._job.workers() if (one.round, one.rank) == (round, rank))
        return found


class _FolderPlace:
    """Checkpoints in a folder.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "checkpoints"
        self.name = str(self._folder)
        self.options = None

    def committed(self) -> set[int]:
        """The steps of all checkpoints."""
        return {int(path.name.removeprefix("step-")) for path in self._folder.glob("step-*")}

    def left_over(self) -> list[str]:
        """What should not be there after a sweep."""
        CheckpointDirectory(self._folder).sweep(None)
        return [f"{path} is left over" for path in self._folder.iterdir() if path.name.startswith(".")]


class _BucketPlace:
    """Checkpoints in a bucket of its own.

    Args:
        folder: of the run.
        faults: the part of the requests that go wrong.
    """

    def __init__(self, folder: Path, faults: float) -> None:
        self._faults = faults
        self._server = BucketServer(folder)
        self.name = f"s3://{BUCKET}/job"
        self.options = self._server.options()

    def __enter__(self) -> Self:
        self._server.__enter__()
        self._before = dict(os.environ)
        os.environ.update(self._server.environ())
        self._server.spoil(self._faults)
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.clear()
        os.environ.update(self._before)
        self._server.__exit__(None, None, None)

    def committed(self) -> set[int]:
        """The steps of all checkpoints."""
        self._server.spoil(0.0)
        verdicts = self._server.filesystem().glob(f"{BUCKET}/job/step-*.json")
        read = self._server.filesystem().cat(verdicts) if verdicts else {}
        return {json.loads(one)["step"] for one in read.values() if b"committed" in one}

    def left_over(self) -> list[str]:
        """What should not be there after a sweep, by all that the protocol knows."""
        BucketStorage(self.name, self.options, "a last job").take_over()
        there = self._server.filesystem().find(f"{BUCKET}/job")
        attempts = {Path(name).name.removesuffix(".json") for name in there if name.endswith(".json")}
        left = [name for name in there if name.split("/")[2].removesuffix(".json") not in attempts]
        return [f"{name} is left over" for name in left]


class Wire:
    """What the ranks see, as they see it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        # Also for writing: with no rank alive it is silent, and not at its end.
        self._file = os.open(path, os.O_RDWR)
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)
        self._lines: deque[bytes] = deque()
        """What was read, and not taken yet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def events(self) -> Iterator[Event]:
        """Wait for one event after the other."""
        rest = b""
        while True:
            while self._lines:
                yield from_line(self._lines.popleft().decode())
            if not self._poll.poll(PATIENCE * 1000):
                raise AssertionError(f"no rank saw anything for {PATIENCE:g} s")
            *lines, rest = (rest + os.read(self._file, 65536)).split(b"\n")
            self._lines.extend(lines)

    def is_quiet(self) -> bool:
        """Return whether no event is there to be taken."""
        return not self._lines and not self._poll.poll(0)


def _wait_for_child(pid: int) -> int | None:
    """A child of the process; None if it has none for a second."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if found := children_of(pid):
            return max(found)
        time.sleep(0.001)
    return None


def _kill(pid: int, parent: int) -> bool:
    """SIGKILL a process, if it lives, and is the parent's and not another that got its number."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if pid in children_of(parent) and state_of(pid) not in (None, "Z"):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return True
        finally:
            os.close(handle)
    return False


if __name__ == "__main__":
    sys.exit(command(SaveChaos, coordinator_every=100, bucket_faults=0.02))
