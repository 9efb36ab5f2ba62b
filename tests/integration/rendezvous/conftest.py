"""A scenario on torch's rendezvous and on ours at the same time."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

import muster.worker
from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator
from tests.support.rendezvous_runs import (
    Both,
    Each,
    MusterRendezvous,
    RendezvousRun,
    Scenario,
    T,
    TorchRendezvous,
    in_thread,
    kept_environment,
    meeting,
)


@pytest.fixture
def workers_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers host their store: else torch 2.13 lets no newcomer through, as is shown below."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """One coordinator: every scenario is a run of its own."""
    folder: Path = tmp_path_factory.mktemp("coordinator")
    with kept_environment(), Coordinator(folder, session_ttl=3.0) as running:
        yield running
        muster.worker.close()


@pytest.fixture
def each(shared: Coordinator) -> Each:
    def run(scenario: Scenario[T]) -> tuple[T, T]:
        def play(made: RendezvousRun) -> T:
            with meeting(made):
                return scenario(made)

        futures: list[Future[T]] = [
            in_thread(lambda: play(TorchRendezvous())),
            in_thread(lambda: play(MusterRendezvous(shared))),
        ]
        theirs, ours = [future.result(2 * PATIENCE) for future in futures]
        return theirs, ours

    return run


@pytest.fixture
def both(each: Each) -> Both:
    def run(scenario: Scenario[T]) -> T:
        theirs, ours = each(scenario)
        assert ours == theirs
        return ours

    return run
