"""Ranks with local checkpoints: real processes, and the real keepers that they start."""

import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lab.patience import PATIENCE, until
from muster.checkpoint.committed import run_mark
from tests.support.ranks import RankProcess, obey
from tests.support.saves.damage import flip

RUN = "local"
ROWS = 60
"""Rows of the weight, which is sharded among all ranks."""


def weight_of(step: int) -> torch.Tensor:
    """The weight after a step."""
    return torch.randn(ROWS, 257, generator=torch.Generator().manual_seed(step))


class Node:
    """A machine: a folder on its own disk, and the keeper that a rank starts there.

    Args:
        folder: its disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = folder / f"muster-{run_mark(RUN)}"

    @property
    def keeper(self) -> int | None:
        """The process id of its keeper; None if it has ended."""
        try:
            pid = int(json.loads((self.kept / "keeper.json").read_bytes())["pid"])
            os.kill(pid, 0)
        except (FileNotFoundError, ProcessLookupError):
            return None
        return pid

    def kill_keeper(self, number: int = signal.SIGKILL) -> bool:
        """Kill its keeper. Returns whether there was one."""
        pid = self.keeper
        if pid is None:
            return False
        handle = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, number)
            until(lambda: _ended(pid), "the keeper does not end")
        finally:
            os.close(handle)
        return True

    def pause_keeper(self, seconds: float) -> bool:
        """Stop its keeper for a while. Returns whether there was one."""
        pid = self.keeper
        if pid is None:
            return False
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(seconds, _continue, (pid,)).start()
        return True

    def lose(self) -> None:
        """Lose its keeper and its disk."""
        self.kill_keeper()
        shutil.rmtree(self.folder, ignore_errors=True)

    def flip(self, attempt: str, name: str) -> bool:
        """Flip a bit of a file. Returns whether the file is here, and not empty."""
        path = self.kept / attempt / name
        if not path.exists() or not path.stat().st_size:
            return False
        flip(path)
        return True

    def remove(self, attempt: str, name: str) -> None:
        """Remove a file, if it is here, or all of it was fetched already."""
        for one in (name, f".{name}.fetch"):
            (self.kept / attempt / one).unlink(missing_ok=True)

    def log(self) -> str:
        """What its keepers have logged."""
        with suppress(FileNotFoundError):
            return (self.kept / "keeper.log").read_text()
        return ""


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a rank's process."""

    endpoint: str
    rank: int
    world_size: int
    generation: int
    local: str
    shared: str
    meeting: str
    options: dict[str, Any]


class LocalJob:
    """A job on nodes of its own.

    Args:
        folder: of the test.
        endpoint: the coordinator's.
        nodes: how many.
    """

    def __init__(self, folder: Path, endpoint: str, nodes: int) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.where = str(self.shared)
        self.endpoint = endpoint
        self.nodes = [Node(folder / f"node-{number}") for number in range(nodes)]
        self.generation = -1
        self.ranks: list[RankProcess] = []

    def begin(self, *nodes: int, per_node: int = 1, **options: Any) -> list[Any]:
        """Begin the next generation on some nodes; what each rank says."""
        self.kill()
        self.generation += 1
        chosen = [self.nodes[number] for number in nodes] or self.nodes
        world_size = len(chosen) * per_node
        meeting = str(self.folder / f"meeting-{self.generation}-{time.monotonic_ns()}")
        self.ranks = [
            RankProcess(
                _main,
                Identity(
                    self.endpoint,
                    rank,
                    world_size,
                    self.generation,
                    str(chosen[rank // per_node].folder),
                    self.where,
                    meeting,
                    options,
                ),
            )
            for rank in range(world_size)
        ]
        return self.all("begin")

    def all(self, operation: str, **arguments: Any) -> list[Any]:
        """What an operation returns on each rank."""
        for rank in self.ranks:
            rank.tell(operation, **arguments)
        return [rank.answer() for rank in self.ranks]

    def save(self, *steps: int, **options: Any) -> None:
        """Save steps, one after the other."""
        for step in steps:
            assert self.all("save", step=step, **options) == [None] * len(self.ranks)
            heard = self.all("finalize")
            assert heard == [[step]] * len(self.ranks), heard

    def hide_shared(self) -> None:
        """Take shared storage away: whatever looks at it meets a file."""
        if self.shared.exists():
            self.shared.rename(self.folder / "hidden")
        self.shared.write_text("not a folder")

    def kill(self) -> None:
        """SIGKILL to all ranks."""
        for rank in self.ranks:
            rank.end()
        self.ranks = []

    def kill_keepers(self) -> None:
        """SIGKILL to all keepers."""
        for node in self.nodes:
            node.kill_keeper()


@contextmanager
def local_job(folder: Path, endpoint: str, nodes: int) -> Iterator[LocalJob]:
    """A job of which nothing runs afterwards."""
    job = LocalJob(folder, endpoint, nodes)
    try:
        yield job
    finally:
        job.kill()
        job.kill_keepers()


@dataclass
class _Worker:
    identity: Identity
    saver: Any = None
    weight: Any = None

    def begin(self) -> None:
        """Meet the others, and make the checkpointer."""
        import torch.distributed as dist

        from muster.worker import Checkpointer, GrpcBarrier

        log = Path(self.identity.local).parent / f"rank-{self.identity.rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(filename=log, level=logging.INFO)
        who = self.identity
        dist.init_process_group(
            "gloo", init_method=f"file://{who.meeting}", rank=who.rank, world_size=who.world_size
        )
        barrier = GrpcBarrier(
            who.rank, who.world_size, "save", who.endpoint, PATIENCE, PATIENCE, RUN, who.generation
        )
        self.saver = Checkpointer(
            who.shared, local=who.local, barrier=barrier, timeout=PATIENCE, **who.options
        )

    def _state(self, step: int) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        world_size = self.identity.world_size
        if self.weight is None:
            mesh = init_device_mesh("cpu", (world_size,))
            self.weight = distribute_tensor(weight_of(step), mesh, [Shard(0)])
        part = torch.tensor_split(weight_of(step), world_size)[self.identity.rank]
        self.weight.to_local().copy_(part)
        return {"weight": self.weight, "step": step, "alike": torch.full((100,), float(step))}

    def save(self, step: int, **options: Any) -> None:
        """Begin to save a step, then overwrite the state."""
        state = self._state(step)
        self.saver.save(step, state, **options)
        state["weight"].to_local().fill_(-1)

    def finalize(self) -> Any:
        """The steps that were finalized."""
        return self.saver.finalize(blocking=True)

    def level(self, step: int) -> Any:
        """How safe a step is."""
        level = self.saver.level(step)
        return None if level is None else str(level)

    def resume(self) -> str:
        """The step, where it came from, and whether each bit of the state is right."""
        state = self._state(0)
        state["weight"].to_local().zero_()
        found = self.saver.resume(state)
        if found is None:
            return "nothing"
        right = torch.equal(state["weight"].full_tensor(), weight_of(found.step))
        right = right and torch.equal(state["alike"], torch.full((100,), float(found.step)))
        if not right or state["step"] != found.step:
            return f"wrong bits of step {found.step}"
        local = Path(found.path).is_relative_to(self.identity.local)
        return f"step {found.step}, {'local' if local else 'shared'}"

    def close(self) -> None:
        """Close."""
        self.saver.close()


def _main(identity: Identity, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    worker = _Worker(identity)
    obey(worker, pipe, lambda error: f"{type(error).__name__}: {error}")
