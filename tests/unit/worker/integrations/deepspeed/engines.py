"""DeepSpeed's engine without its collectives, and helpers that read what it has saved."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from muster.worker.integrations.deepspeed import attach, commit_together, ranks
from muster.worker.integrations.deepspeed import engine as engine_module
from tests.support.jobs import alone

FILE = "mp_rank_00_model_states.pt"


class Alone(alone.Alone):
    """The barrier of a job of one rank, which hears no other. Each is of a group of its own."""

    prefix = "checkpoint/deepspeed"

    def __init__(self, rank: int = 0, world_size: int = 1, prefix: str = "") -> None:
        self.rank, self.world_size = rank, world_size
        self.sequence = 0

    def _take_number(self) -> int:
        self.sequence += 1
        return self.sequence - 1


class Comm:
    """DeepSpeed's collectives, of one rank or of two, of which the other one says what the test does."""

    def __init__(self, rank: int = 0, said: list[Any] | None = None) -> None:
        self.rank = rank
        self.said = said
        self.barriers = 0

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return 1 if self.said is None else 2

    def barrier(self) -> None:
        self.barriers += 1

    def broadcast_object_list(self, words: list[Any], src: int) -> None:
        if self.rank != src:
            assert self.said is not None
            words[0] = self.said.pop(0)

    def all_gather_object(self, words: list[Any], mine: Any) -> None:
        words[0] = mine
        if self.said is not None:
            words[1] = self.said.pop(0)


class Writer:
    """A checkpoint engine of DeepSpeed's, the default one."""

    fault: Exception | None = None
    decoupled = False

    def is_decoupled(self) -> bool:
        return self.decoupled

    def save(self, state_dict: Any, path: str) -> None:
        if self.fault is not None:
            raise self.fault
        Path(path).write_text(str(state_dict))


class DecoupledCheckpointEngine(Writer):
    """The one of the same name, as far as it concerns the adapter."""

    decoupled = True


class Engine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's, with a checkpoint of one file."""

    def __init__(self, writer: Writer | None = None, *, local: bool = False, universal: bool = False) -> None:
        nn.Module.__init__(self)
        self.checkpoint_engine = writer or Writer()
        self.optimizer = SimpleNamespace()
        self.global_steps = 7
        self.local, self.universal = local, universal
        self.destroyed = 0
        self.crash: Exception | None = None
        """What its decoupled writer raises."""
        self.committed = 0

    def use_node_local_storage(self) -> bool:
        return self.local

    def load_universal_checkpoint(self) -> bool:
        return self.universal

    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: Any = None, *options: bool
    ) -> bool:
        assert options == (False, False)
        self.checkpoint_engine.save(client_state, f"{save_dir}/{tag}/{FILE}")
        return True

    def load_checkpoint(self, load_dir: str, tag: Any = None, **options: Any) -> Any:
        path = Path(load_dir) / tag / FILE
        return str(path), {"content": path.read_text(), **options}

    def _commit_decoupled_checkpoint(self) -> None:
        if self.crash is not None:
            raise self.crash
        self.committed += 1

    def destroy(self) -> None:
        self.destroyed += 1


def content(engine: Any, folder: Path, tag: object = None) -> Any:
    return engine.load_checkpoint(folder, tag)[1]["content"]


def latest(folder: Path) -> str:
    return (folder / "latest").read_text()


def full() -> OSError:
    return OSError(28, "No space left on device")


def let_speak(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a fake in the place of DeepSpeed's collectives."""
    for module in (attach, engine_module, ranks):
        monkeypatch.setattr(module, "comm", comm)


def two_ranks(monkeypatch: pytest.MonkeyPatch, said: list[Any]) -> Any:
    let_speak(Comm(1, said), monkeypatch)
    return commit_together(Engine())
