"""A job and its generations. Its ranks are threads of the test, which damages its checkpoints."""

import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from muster.checkpoint.committed import MARKER
from muster.checkpoint.manifest import MANIFEST
from muster.worker.saves import Checkpointer
from tests.support.saves import disk_bucket
from tests.support.saves.fake_group import FakeGroup

T = TypeVar("T")

TARGETS = ("data", "metadata", "manifest", "marker")
"""What of a checkpoint is damaged. A bucket's marker is its verdict."""
KINDS = ("flip", "truncate", "extend", "swap", "drop", "stale")
"""How."""
METADATA = ".metadata"
ROWS = 24
"""Rows of the sharded tensor: every world size of the tests divides it into parts of the same size."""


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of the job's state: something that all have, its own, and a shard of a tensor."""

    rank: int
    world_size: int
    saved_by: int
    """The number of ranks that have saved the state."""

    @property
    def _names(self) -> list[str]:
        own = [f"own-{part}" for part in range(self.saved_by) if part % self.world_size == self.rank]
        return ["shared-9", *own]

    def state_at(self, step: int, version: int) -> dict[str, Any]:
        """Return the part as it is at a step."""
        made: dict[str, Any] = {"step": step, "version": version}
        for name in self._names:
            number = int(name.rpartition("-")[2])
            value = step * 1000 + version * 100 + number
            made[name] = torch.arange(64 * (number + 1), dtype=torch.float32) + value
        return made | {"sharded": self._shard(step * 1000.0 + version * 100)}

    def _shard(self, value: float) -> DTensor:
        whole = torch.arange(ROWS * 16, dtype=torch.float32).reshape(ROWS, 16) + value
        # The rank is a thread: the mesh is told which one, and has no process group.
        mesh = DeviceMesh("cpu", list(range(self.world_size)), _init_backend=False, _rank=self.rank)
        shard = whole.chunk(self.world_size)[self.rank].clone()
        return DTensor.from_local(
            shard, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def differences(self, state: dict[str, Any], right: dict[str, Any]) -> list[str]:
        """Return the names of tensors that are not the same bit by bit in two states."""
        return [name for name in [*self._names, "sharded"] if not _same(state[name], right[name])]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return torch.equal(one.to_local(), other.to_local())
    return torch.equal(one, other)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What one rank has resumed from."""

    step: int | None
    version: int = 0
    error: str = ""
    """The type of what it raised."""


class Job:
    """One job's checkpoints.

    Args:
        folder: where they are, or where the bucket is that has them.
        bucket: whether it is one.
    """

    def __init__(self, folder: Path, *, bucket: bool) -> None:
        self.folder = folder
        self.bucket = bucket

    @property
    def place(self) -> str:
        """What the job names as the place of its checkpoints."""
        return f"{disk_bucket.SCHEME}://{self.folder}" if self.bucket else str(self.folder)

    def copy(self, folder: Path) -> "Job":
        """Copy the folder by links: a test that damages a file writes a new one."""
        shutil.copytree(self.folder, folder, copy_function=os.link)
        return Job(folder, bucket=self.bucket)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, that was committed last."""
        pattern = f"step-{step:010}.*[!n]" if self.bucket else f"step-{step:010}"
        return max(path for path in self.folder.glob(pattern) if path.is_dir())

    def marker(self, step: int) -> Path:
        """Return the file that says that a step was committed."""
        checkpoint = self.checkpoint(step)
        return checkpoint.with_name(f"{checkpoint.name}.json") if self.bucket else checkpoint / MARKER

    def remove(self, step: int) -> None:
        """Remove a checkpoint, as retention does."""
        marker, checkpoint = self.marker(step), self.checkpoint(step)
        marker.unlink()
        shutil.rmtree(checkpoint)

    def run_ranks(
        self, generation: int, world_size: int, do: Callable[[Checkpointer, int], T]
    ) -> list[T | Exception]:
        """Run a function in each rank of one generation, each in a thread. Returns the results or errors."""
        group = FakeGroup(world_size)

        def run(rank: int) -> T | Exception:
            member = group.member(rank)
            member.generation = generation
            try:
                made = Checkpointer(self.place, barrier=member, timeout=60)  # type: ignore[arg-type]
                try:
                    return do(made, rank)
                finally:
                    made.close()
            except Exception as error:
                group.lose(rank)  # Its process ends.
                return error

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(run, range(world_size)))

    def save(self, generation: int, world_size: int, steps: list[int], version: int = 0) -> None:
        """Resume, if there is something; then save and commit some steps, in a generation of their own."""

        def save(made: Checkpointer, rank: int) -> list[int]:
            part = Part(rank, world_size, saved_by=world_size)
            made.resume(part.state_at(-1, -1))
            saved = []
            for step in steps:
                made.save(step, part.state_at(step, version))
                saved += made.finalize(blocking=True)
            return saved

        assert self.run_ranks(generation, world_size, save) == [steps] * world_size

    def resume(self, generation: int, world_size: int, saved_by: int) -> list[Resumed]:
        """Let each rank resume. Whatever it has resumed is compared bit by bit."""

        def resume(made: Checkpointer, rank: int) -> Resumed:
            part = Part(rank, world_size, saved_by)
            into = part.state_at(-1, -1)
            found = made.resume(into)
            if found is None:
                return Resumed(None)
            wrong = part.differences(into, part.state_at(found.step, into["version"]))
            assert not wrong, f"rank {rank} resumed from {found.path} with wrong {wrong}"
            assert into["step"] == found.step
            return Resumed(found.step, into["version"])

        return [_heard(one) for one in self.run_ranks(generation, world_size, resume)]


def _heard(one: Resumed | Exception) -> Resumed:
    if isinstance(one, AssertionError):
        raise one
    return one if isinstance(one, Resumed) else Resumed(None, error=type(one).__name__)


@dataclass(frozen=True, slots=True)
class Injection:
    """A way to damage a checkpoint."""

    target: str
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind} {self.target} ({self.seed})"

    def inject(self, job: Job, step: int, older: int) -> str:
        """Damage a step's checkpoint.

        Args:
            job: the job that saved it.
            step: the checkpoint's.
            older: the step of a checkpoint before it.

        Returns:
            What was done.
        """
        chance = random.Random(f"{self.seed}-{self.target}-{self.kind}")
        path = self._chosen(job, step, chance)
        before = path.read_bytes()
        if self.kind == "drop":
            path.unlink()
            return f"{path} dropped"
        if self.kind == "swap":
            checkpoint = job.checkpoint(step)
            others = [one for one in sorted(checkpoint.iterdir()) if one.is_file() and one != path]
            other = chance.choice([one for one in others if one.read_bytes() != before])
            _replace(path, other.read_bytes())
            _replace(other, before)
            return f"{path} and {other.name} swapped"
        if self.kind == "stale":
            stale = job.marker(older) if self.target == "marker" else job.checkpoint(older) / path.name
            after = stale.read_bytes()
        elif self.kind == "truncate":
            after = before[: chance.randrange(len(before))]
        elif self.kind == "extend":
            after = before + b"x" + chance.randbytes(chance.randrange(100))
        else:
            at, bit = chance.randrange(len(before)), chance.randrange(8)
            after = before[:at] + bytes([before[at] ^ 1 << bit]) + before[at + 1 :]
        assert after != before, f"{self} changes nothing"
        _replace(path, after)
        return f"{path}: {len(before)} bytes became {len(after)} others"

    def _chosen(self, job: Job, step: int, chance: random.Random) -> Path:
        checkpoint = job.checkpoint(step)
        if self.target == "marker":
            return job.marker(step)
        if self.target == "data":
            return chance.choice(sorted(checkpoint.glob("*.distcp")))
        return checkpoint / {"metadata": METADATA, "manifest": MANIFEST}[self.target]


def _replace(path: Path, data: bytes) -> None:
    path.unlink()  # It may be a link to another job's.
    path.write_bytes(data)
