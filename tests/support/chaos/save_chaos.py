"""A job under torchrun that saves again and again, while its children, ranks and coordinator are killed.

What is killed, and when, is drawn from a seed; what it hits is up to the machine. Again and again the state
gets other tensors, on one rank and on all. Afterwards a judge reads what the ranks wrote down. For long:

    python -m tests.support.chaos.save_chaos --saves 500
"""

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lab.patience import PATIENCE
from lab.processes.agents import Job, Worker
from lab.processes.bucket_server import BUCKET, BucketServer
from lab.processes.coordinator import Coordinator
from muster.checkpoint.directory import CheckpointDirectory
from muster.worker.saves.storage.bucket_storage import BucketStorage
from tests.support.saves.child_processes import children_of, state_of
from tests.support.saves.save_history import (
    UNCONFIRMED,
    Event,
    from_line,
    verdict,
    whole_checkpoint,
    whole_files,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to happen."""

    seed: int
    saves: int
    """After how many the job is told to finish. A step that is saved again after a restart counts again."""
    kind: str = "checkpointer"
    """As :class:`tests.support.chaos.chaos_rank.Rank` takes it."""
    agents: int = 2
    ranks: int = 2
    """Ranks of each agent."""
    device: str = "cpu"
    """Where the state is, ``cpu`` or ``cuda``; several ranks may share a GPU."""
    bucket: bool = False
    """Whether the checkpoints are in a bucket."""
    bucket_faults: float = 0.0
    """How many of the requests to it go wrong."""
    relays: bool = True
    """Whether the ranks of an agent speak through one stream."""
    child_odds: float = 0.15
    """That a child of a save is killed."""
    rank_every: tuple[int, int] | None = (20, 30)
    """A rank is killed after so many saves, at least and at most; None: never."""
    coordinator_every: int | None = None
    """The coordinator is killed after so many saves; None: never."""


@dataclass(slots=True)
class Account:
    """What did happen."""

    plan: Plan
    events: list[Event] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)
    killed: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("children", "ranks", "coordinators"), 0)
    )
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def saves(self, *what: str) -> set[tuple[int, int]]:
        """The saves (round, step) of which a rank wrote that down."""
        return {(event.round, event.step) for event in self.events if event.what in what}

    def __str__(self) -> str:
        failed = self.saves("failed")
        unconfirmed = {(e.round, e.step) for e in self.events if e.what == "failed" and UNCONFIRMED in e.text}
        scheduled = self.saves("scheduled")
        unheard = scheduled - self.saves("finalized", "failed")
        resumed = {event.round for event in self.events if event.what == "loaded" and event.path}
        rounds = {event.round for event in self.events}
        lines = [
            f"seed {self.plan.seed}: {self.plan.agents} agents of {self.plan.ranks} ranks, "
            f"{'with' if self.plan.relays else 'without'} relays, {self.seconds:.0f} s",
            f"saves: {len(scheduled)} scheduled, {len(self.saves('finalized'))} finalized, "
            f"{len(failed)} failed ({len(unconfirmed)} of them written by all, and not confirmed), "
            f"{len(unheard)} of which no rank heard",
            f"committed checkpoints: {len(self.committed)}, all of them loaded afterwards",
            f"killed: {self.killed['children']} children, {self.killed['ranks']} ranks, "
            f"{self.killed['coordinators']} coordinators",
            f"rounds: {len(rounds)}, of which {len(resumed)} resumed from a checkpoint",
            *(f"WRONG: {one}" for one in self.wrong),
        ]
        return "\n".join(lines)


def run(plan: Plan, folder: Path) -> Account:
    """Let it happen, and judge it.

    Args:
        plan: what is to happen.
        folder: an empty one, where all traces are left.
    """
    account = Account(plan)
    began = time.monotonic()
    with ExitStack() as stack:
        place: _FolderPlace | _BucketPlace = (
            stack.enter_context(_BucketPlace(plan, folder)) if plan.bucket else _FolderPlace(folder)
        )
        _run(account, folder, place.name)
        account.seconds = time.monotonic() - began
        for history in sorted(folder.glob("history-*")):
            account.events += [from_line(line) for line in history.read_text().splitlines()]
        account.committed = place.committed()
        world_size = plan.agents * plan.ranks
        files = partial(whole_files, world_size=world_size)
        checkpoints = partial(whole_checkpoint, options=place.options, world_size=world_size)
        whole = checkpoints if plan.kind == "checkpointer" else files
        account.wrong = [*verdict(account.events, whole, account.committed), *place.left_over()]
    return account


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
        plan: how often it fails.
        folder: of the run.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._server = BucketServer(folder)
        self.name = f"s3://{BUCKET}/job"
        self.options = self._server.options()

    def __enter__(self) -> "_BucketPlace":
        self._server.__enter__()
        self._before = dict(os.environ)
        os.environ.update(self._server.environ())
        self._server.spoil(self._plan.bucket_faults)
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


def _run(account: Account, folder: Path, place: str) -> None:
    plan = account.plan
    command = ("--module", "tests.support.chaos.chaos_rank", str(folder), place, plan.kind, plan.device)
    with (
        Coordinator(folder, session_ttl=2.0) as coordinator,
        Job(folder, coordinator.endpoint, command=command, ranks=plan.ranks, restarts=plan.saves) as job,
        Wire(folder / "events") as wire,
    ):
        for _ in range(plan.agents):
            job.agent(str(plan.agents), join_timeout=60, keep_alive_interval=5, relay=int(plan.relays))
        monkey = _Monkey(plan, account, job, coordinator)
        try:
            for event in wire.events():
                monkey.see(event)
                if monkey.all_closed:
                    break
        except TimeoutError as error:
            raise AssertionError(f"{error}; seed {plan.seed}\n{job.said()}\n{_stacks(job)}") from None
        codes = [agent.wait() for agent in job.agents]
        assert codes == [0] * plan.agents, job.said()


def _stacks(job: Job) -> str:
    """What all threads of the last round's ranks and of their children are doing."""
    workers = job.workers()
    found = []
    for worker in (one for one in workers if one.round == workers[-1].round):
        log = job.folder / f"stacks-{worker.pid}"
        for pid in (worker.pid, *sorted(children_of(worker.pid))):
            found.append(f"--- rank {worker.rank}, process {pid}, state {state_of(pid)}")
            before = log.stat().st_size
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.5)
            found.append(log.read_text()[before:])
    return "\n".join(found)


class Wire:
    """What the ranks see, as they see it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        # Also for writing: with no rank alive it is silent, and not at its end.
        self._file = os.open(path, os.O_RDWR)
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def events(self) -> Iterator[Event]:
        rest = b""
        while True:
            if not self._poll.poll(PATIENCE * 1000):
                raise TimeoutError(f"no rank saw anything for {PATIENCE:g} s")
            *lines, rest = (rest + os.read(self._file, 65536)).split(b"\n")
            yield from (from_line(line.decode()) for line in lines)


class _Monkey:
    """Kills what the plan says, when the ranks' saves have got that far."""

    def __init__(self, plan: Plan, account: Account, job: Job, coordinator: Coordinator) -> None:
        self._plan = plan
        self._chance = random.Random(plan.seed)
        self._killed = account.killed
        self._job = job
        self._coordinator = coordinator
        self._saves: set[tuple[int, int]] = set()
        self._closed: set[tuple[int, int]] = set()
        self._spared = self._draw_spared()

    @property
    def all_closed(self) -> bool:
        """Whether every rank has come to its end."""
        return len(self._closed) == self._plan.agents * self._plan.ranks

    def see(self, event: Event) -> None:
        """Perhaps do something about it."""
        if event.what == "closed":
            self._closed.add((event.round, event.rank))
        save = (event.round, event.step)
        if event.what != "scheduled" or save in self._saves:
            return
        self._saves.add(save)
        if len(self._saves) == self._plan.saves:
            self._job.finish()
        elif len(self._saves) < self._plan.saves:
            self._torment(event.round)

    def _torment(self, round: int) -> None:
        plan, chance = self._plan, self._chance
        victim = chance.randrange(plan.agents * plan.ranks)
        if plan.coordinator_every is not None and len(self._saves) % plan.coordinator_every == 0:
            self._coordinator.kill()
            time.sleep(chance.random())
            self._coordinator.start()
            self._killed["coordinators"] += 1
        self._spared -= 1
        if self._spared == 0:
            time.sleep(chance.uniform(0.0, 0.05))
            worker = self._worker(round, victim)
            hit = _kill(worker.pid, worker.agent)
            self._killed["ranks"] += hit
            # Who has just gone, for another's sake, is missed; then it is tried again at the next save.
            self._spared = self._draw_spared() if hit else 1
        elif chance.random() < plan.child_odds:
            delay = chance.choice((0.0, chance.uniform(0.0, 0.02)))
            worker = self._worker(round, victim)
            child = _wait_for_child(worker.pid)
            time.sleep(delay)
            self._killed["children"] += child is not None and _kill(child, worker.pid)

    def _draw_spared(self) -> int:
        """After how many saves a rank is to be killed."""
        return self._chance.randint(*self._plan.rank_every) if self._plan.rank_every else -1

    def _worker(self, round: int, rank: int) -> Worker:
        (found,) = (one for one in self._job.workers() if (one.round, one.rank) == (round, rank))
        return found


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


def main() -> int:
    parser = argparse.ArgumentParser(description="Saves under torchrun while everything is killed.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--saves", type=int, default=500)
    parser.add_argument("--kind", choices=("checkpointer", "files", "blind"), default="checkpointer")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each agent")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the state is")
    parser.add_argument("--no-relays", action="store_true")
    parser.add_argument("--bucket", action="store_true")
    parser.add_argument("--bucket-faults", type=float, default=0.02, help="how many of its requests go wrong")
    given = parser.parse_args()
    plan = Plan(
        seed=given.seed,
        saves=given.saves,
        kind=given.kind,
        agents=given.agents,
        ranks=given.ranks,
        device=given.device,
        relays=not given.no_relays,
        bucket=given.bucket,
        bucket_faults=given.bucket_faults,
        coordinator_every=100,
    )
    print(plan, flush=True)
    with tempfile.TemporaryDirectory(prefix="muster-chaos-") as folder:
        account = run(plan, Path(folder))
    print(account)
    return 1 if account.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
