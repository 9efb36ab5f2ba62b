"""A job of ranks in this process: one on each node, with fake keepers and a fake coordinator."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster.worker.saves import Checkpointer
from muster.worker.saves.local import tier
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_group import FakeGroup, Member
from tests.support.saves.fake_keepers import Cluster, FakeKeeper, FakeLocalCheckpoints, served


class LocalMember(Member):
    """A member that knows the coordinator's address."""

    def __init__(self, group: FakeGroup, rank: int, prefix: str, endpoint: str, generation: int) -> None:
        super().__init__(group, rank, prefix)
        self.config = SimpleNamespace(endpoint=endpoint)
        self.generation = generation

    def sibling(self, prefix: str) -> Member:
        made = LocalMember(self.group, self.rank, prefix, self.config.endpoint, self.generation)
        return self.siblings.setdefault(prefix, made)


def state(value: float, rank: int = 0) -> dict[str, Any]:
    """What rank 0 writes of it is the weight; each rank has a part of its own."""
    value = float(value)
    return {"weight": torch.full((500,), value), f"own-{rank}": torch.full((100,), value), "step": value}


class LocalJob:
    """Ranks, each on a node of its own.

    Args:
        folder: of the test.
        world_size: how many.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.world_size = world_size
        self.cluster = Cluster()
        self.service = FakeLocalCheckpoints(self.cluster)
        self._stack = ExitStack()
        self.endpoint = self._stack.enter_context(served(self.service))
        self.nodes = [FakeKeeper(self.cluster, folder / f"node-{rank}") for rank in range(world_size)]
        self.generation = -1
        self.ranks: list[Checkpointer] = []

    def begin(self, **options: Any) -> "LocalJob":
        """Begin the next generation."""
        self.end()
        self.generation += 1
        self.group = FakeGroup(self.world_size)
        self.members = [
            LocalMember(self.group, rank, "save", self.endpoint, self.generation)
            for rank in range(self.world_size)
        ]
        self.ranks = self.each(
            lambda rank: Checkpointer(
                self.shared,
                local=self.folder / f"node-{rank}",
                barrier=self.members[rank],  # type: ignore[arg-type]
                timeout=30,
                **options,
            )
        )
        return self

    def end(self) -> None:
        """Close what is open."""
        self.all(lambda one, _: one.close())
        self.ranks = []

    def close(self) -> None:
        self.end()
        for node in self.nodes:
            node.stop()
        self._stack.close()

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        """What a call returns on each rank."""
        calls: list[Future[Any]] = [in_thread(partial(call, rank)) for rank in range(self.world_size)]
        return [one.result() for one in calls]

    def all(self, call: Callable[[Checkpointer, int], Any]) -> list[Any]:
        """What a call returns on each rank, or raises there."""
        calls: list[Future[Any]] = [
            in_thread(partial(call, one, rank)) for rank, one in enumerate(self.ranks)
        ]
        return [one.exception() or one.result() for one in calls]

    def save(self, *steps: int, **options: Any) -> None:
        """Save steps, one after the other, on all ranks."""
        for step in steps:
            heard = self.all(lambda one, rank, step=step: one.save(step, state(step, rank), **options))  # type: ignore[misc]
            assert heard == [None] * self.world_size, heard
            assert self.finalize() == [[step]] * self.world_size

    def finalize(self) -> list[Any]:
        return self.all(lambda one, _: one.finalize(blocking=True))

    def resume(self) -> list[Any]:
        """The step that each rank has loaded, or its error."""

        def resumed(one: Checkpointer, rank: int) -> int | None:
            into = state(-1, rank)
            found = one.resume(into)
            if found is None:
                return None
            assert torch.equal(into["weight"], torch.full((500,), float(found.step)))
            assert torch.equal(into[f"own-{rank}"], torch.full((100,), float(found.step)))
            return found.step

        return self.all(resumed)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalJob]:
    """Three ranks on three nodes."""
    monkeypatch.setattr(Checkpointer, "_check_group", lambda _: None)
    monkeypatch.setattr(tier, "_prefixes", {})
    with no_child_left():
        made = LocalJob(tmp_path, 3)
        yield made
        made.close()
