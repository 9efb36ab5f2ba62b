"""Nodes with a keeper each, at a fake coordinator."""

from collections.abc import Collection, Mapping
from pathlib import Path

from lab.processes.keeper import Keeper
from muster.v1 import local_pb2 as pb
from tests.support.keeping.checkpoints import MadeCheckpoint
from tests.support.keeping.fake_service import FakeService


class Nodes:
    """Keepers by the names of their nodes.

    Args:
        folder: it gets a folder for each node.
        service: their coordinator.
    """

    def __init__(self, folder: Path, service: FakeService) -> None:
        self.folder = folder
        self._service = service
        self._keepers: list[Keeper] = []

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.kill()

    def add(
        self,
        name: str,
        *extra: str,
        ranks: Collection[int] = (),
        world_size: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> Keeper:
        """Start a keeper, and attach ranks to it."""
        keeper = self.make(name, *extra, environment=environment)
        keeper.start()
        self._service.connected(keeper.id)
        for rank in ranks:
            keeper.attach(1, world_size, rank)
        return keeper

    def make(self, name: str, *extra: str, environment: Mapping[str, str] | None = None) -> Keeper:
        """Return a keeper that is not started; it is killed with the others."""
        keeper = Keeper(self.folder / name, self._service.endpoint, "job", *extra, environment=environment)
        self._keepers.append(keeper)
        return keeper

    def pair(self) -> tuple[Keeper, Keeper]:
        """Start two nodes with a rank each."""
        return self.add("a", ranks=[0]), self.add("b", ranks=[1])


def order(
    made: MadeCheckpoint,
    ranks: Collection[int],
    *sources: pb.Location,
    persist: Collection[int] = (),
    persist_to: str = "",
    keep_persisted: int = 0,
    commit: bool = False,
) -> pb.Order:
    """An order about a checkpoint."""
    return pb.Order(
        checkpoint=made.message(persist_to=persist_to, keep_persisted=keep_persisted),
        level=pb.DURABILITY_LEVEL_LOCAL,
        ranks=ranks,
        sources=sources,
        persist=persist,
        commit=commit,
    )
