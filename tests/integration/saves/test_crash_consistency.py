"""A loss of power at any moment of a save leaves a checkpoint that can be resumed, bit by bit.

Real saves of real processes are recorded by strace. What they did is replayed in a model of a file system,
which says what a loss of power could leave. Each of these states is made real, and loaded.

The tests fail on code that is wrong. This was tried with one rank:

- ``DigestingStream`` syncs a file before it flushes it, as torch does with its metadata: "no whole checkpoint
  can be loaded: .metadata: it has 0 bytes, and 1189 were written".
- The folder is not synced after the rename that commits: step 1 is resumed, and step 2 was saved.
- The entries of the draft are not synced before: step 2 is resumed, and step 3 was saved.
- The marker is not synced: "no whole checkpoint can be loaded: committed.json: Unterminated string".
- The parents of the job's folder are not synced: nothing is left, and step 3 was saved.
- Rank 0 alone syncs what all ranks of a folder adapter have written: "random_states_1.pkl: it has 0 bytes,
  and 14561 were written", in all checkpoints.
"""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.fork_client import TORCH, popen
from muster.worker.integrations.checkpoint import CommittedReader, latest
from muster.worker.integrations.commit.cleanup import restore
from muster.worker.integrations.commit.folders import FolderSaves
from muster.worker.integrations.commit.numbered import newest, numbered
from muster.worker.saves import Checkpointer
from tests.support.crashes.power_loss import History, Image
from tests.support.crashes.power_loss_job import LAST, RUN, STEPS
from tests.support.crashes.syscalls import Recording
from tests.support.jobs.generations import TRANSFORMERS
from tests.support.saves.fake_barrier import FakeBarrier
from tests.support.saves.save_history import weight_at

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Resume = Callable[[Path], int]
"""Loads what there is in a folder: the step, 0 if there is nothing. Raises where it is not that step's."""

DOSE = 100
"""States that are loaded of a job, if there is no time."""


def recorded(coordinator: Coordinator, tmp_path: Path, saver: str, ranks: int) -> History:
    """Let the ranks of a job save, and return what they did to its folder."""
    root = tmp_path / "job" / "checkpoints"
    root.mkdir(parents=True)
    environment = os.environ | {
        "MUSTER_ENDPOINT": coordinator.endpoint,
        "MUSTER_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        popen(
            [sys.executable, "-m", "tests.support.crashes.power_loss_job", saver, str(root)],
            imports=TORCH if saver in ("checkpointer", "writer") else TRANSFORMERS,
            env=environment | {"RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    recordings: list[Recording] = []
    try:
        for rank, process in enumerate(processes):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            recordings.append(Recording(process.pid, tmp_path / f"calls-{rank}").__enter__())
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go on\n")
            process.stdin.flush()
        for process in processes:
            assert process.wait(PATIENCE) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        for recording in recordings:
            recording.__exit__(None, None, None)
    return History(root, {rank: recording.calls() for rank, recording in enumerate(recordings)})


@dataclass(frozen=True, slots=True)
class Left:
    """What a loss of power may leave, and which steps may be resumed from it."""

    image: Image
    least: int
    """The last step that a rank was told to be saved, whenever this may be left."""
    most: int
    """The last step that a rank had begun to save, whenever this may be left."""

    def __str__(self) -> str:
        sizes = {
            path: None if data is None else len(data) for path, data in sorted(self.image.content.items())
        }
        return f"step {self.least} was saved and step {self.most} begun, and this was left: {sizes}"


def lefts(history: History, dose: int, *, thorough: bool) -> list[Left]:
    """All that a loss of power may leave, drawn by a constant seed where there is too much."""
    chance = random.Random(29)
    found: dict[bytes, Left] = {}
    for point in history.points():
        said = [text.split() for text in history.said(point)]
        least, most = (
            max((int(step) for what, step in said if what == word), default=0) for word in ("saved", "begins")
        )
        for image in history.images(point, chance, 40 if thorough else 4):
            key = image.key
            before = found.get(key, Left(image, least, most))
            found[key] = Left(image, max(least, before.least), min(most, before.most))
    chance.shuffle(every := list(found.values()))
    return every if thorough else every[:dose]


def check(history: History, resume: Resume, folder: Path, *, thorough: bool, dose: int = DOSE) -> None:
    """Load all that may be left."""
    for number, left in enumerate(lefts(history, dose, thorough=thorough)):
        place = folder / str(number)
        place.mkdir(parents=True)
        left.image.write(place)
        try:
            step = resume(place)
        except Exception as error:
            error.add_note(f"{left}; see {place}")
            raise
        assert left.least <= step <= left.most, f"step {step} was resumed from {place}: {left}"


def state(ranks: int) -> dict[str, Any]:
    own = {f"own-{rank}": torch.zeros(1000) for rank in range(ranks)}
    return {"weight": torch.zeros_like(weight_at(0)), "step": -1, **own}


def check_state(found: dict[str, Any], step: int) -> None:
    assert found["step"] == step
    assert torch.equal(found["weight"], weight_at(step))
    for key, value in found.items():
        if key.startswith("own-"):
            assert torch.equal(value, torch.full((1000,), float(step * 10 + int(key[4:]))))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpointer_resumes_after_any_loss_of_power(
    coordinator: Coordinator, tmp_path: Path, ranks: int, thorough: bool
):
    numbers = itertools.count()

    def resume(folder: Path) -> int:
        made = Checkpointer(folder / RUN, barrier=FakeBarrier())  # type: ignore[arg-type]
        into = state(ranks)
        found = made.resume(into)
        step = 0 if found is None else found.step
        if step:
            check_state(into, step)
        if next(numbers) % 10 == 0:  # What is left keeps nobody from going on.
            made.save(step + 1, into)
            assert made.finalize(blocking=True) == [step + 1]
        made.close()
        return step

    history = recorded(coordinator, tmp_path, "checkpointer", ranks)
    check(history, resume, tmp_path / "left", thorough=thorough)


@pytest.mark.timeout(900)
def test_committed_writer_resumes_after_any_loss_of_power(
    coordinator: Coordinator, tmp_path: Path, thorough: bool
):
    def resume(folder: Path) -> int:
        if not (folder / RUN).exists() or latest(folder / RUN) is None:
            return 0
        into = state(2)
        dcp.load(into, storage_reader=CommittedReader(folder / RUN / LAST))
        check_state(into, into["step"])
        return int(into["step"])

    history = recorded(coordinator, tmp_path, "writer", 2)
    check(history, resume, tmp_path / "left", thorough=thorough)


@dataclass(frozen=True, slots=True)
class Adapter:
    """How a framework's checkpoints are named."""

    saver: str
    named: str
    folder: str
    first: int
    """The number of the first."""
    dose: int = DOSE


ADAPTERS = [
    Adapter("accelerate", "checkpoint_", f"{RUN}/checkpoints", 0),
    Adapter("transformers", "checkpoint-", RUN, 1, dose=50),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.saver)
def test_folder_adapter_resumes_after_any_loss_of_power(
    coordinator: Coordinator, tmp_path: Path, adapter: Adapter, thorough: bool
):
    """What is chosen is byte for byte what all ranks had saved, or were about to."""
    history = recorded(coordinator, tmp_path, adapter.saver, 2)
    saved = {
        step: content(history, f"{adapter.folder}/{adapter.named}{step - 1 + adapter.first}")
        for step in range(1, STEPS + 1)
    }

    def resume(folder: Path) -> int:
        place = folder / adapter.folder
        if not place.exists():
            return 0
        restore(place)
        saves = FolderSaves("checkpoint", "one", FakeBarrier(), 60, "raise")  # type: ignore[arg-type]

        def find(damaged: Set[Path]) -> Path | None:
            return newest(place, adapter.named, damaged) if numbered(place, adapter.named, damaged) else None

        path = saves.choose_any(saves.meet(0, 1), place, find)
        if path is None:
            return 0
        step = int(path.name.removeprefix(adapter.named)) + 1 - adapter.first
        there = {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}
        assert there == saved[step]
        return step

    check(history, resume, tmp_path / "left", thorough=thorough, dose=adapter.dose)


def content(history: History, checkpoint: str) -> dict[str, bytes]:
    """What a checkpoint held when a rank was first told that it was saved."""
    for point in history.points():
        image = history.image(point)
        if (
            history.said(point)[-1:]
            and history.said(point)[-1].startswith("saved")
            and checkpoint in image.content
        ):
            return {
                path.removeprefix(f"{checkpoint}/"): data
                for path, data in image.content.items()
                if data is not None and path.startswith(f"{checkpoint}/")
            }
    raise AssertionError(f"{checkpoint} was never saved")
