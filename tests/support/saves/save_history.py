"""What ranks wrote down of their saves, and a judge of it.

The state at a step is a function of the step alone, so that anybody can tell whether a checkpoint holds it.
"""

import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

ROWS = 600
STRIDE = ROWS * 4
"""By how much every number grows in a step. Float32 counts exactly to 2**24, which is some 7,000 steps."""

PHASE = 10
"""After so many steps the state has other tensors."""

UNCONFIRMED = "its commit failed or is not confirmed"
"""How the error begins if all had written: such a save may be committed, and yet nobody finalizes it."""


def weight_at(step: int) -> torch.Tensor:
    """The whole weight at a step."""
    return torch.arange(ROWS * 4, dtype=torch.float32).reshape(ROWS, 4) + STRIDE * step


def extras_at(step: int, rank: int) -> dict[str, torch.Tensor]:
    """What a rank's state has at a step beside the weight.

    Nothing, then a tensor that rank 1 alone has, then tensors of all, which change their shapes, and nothing
    again.
    """
    phase = step // PHASE
    value = float(step * 1000 + rank)
    if phase % 4 == 1 and rank == 1:
        return {"own": torch.full((3,), value)}
    if phase % 4 in (2, 3):
        return {f"extra-{rank}": torch.full((2 + phase % 5, 3), value)}
    return {}


@dataclass(frozen=True, slots=True)
class Event:
    """What one rank saw of one step."""

    rank: int
    what: str
    """``loaded`` (what it starts from; step 0 without a path is nothing), ``scheduled``, ``finalized``,
    ``failed``, ``latest``, or ``closed`` (it ended well, and knows how all its saves went)."""
    step: int
    path: str = ""
    round: int = 0
    """The number of the job's restart. In each round, a rank is one process."""
    text: str = ""


def to_line(event: Event) -> str:
    """The event as one line of JSON."""
    return json.dumps(asdict(event)) + "\n"


def from_line(line: str) -> Event:
    """The event back."""
    return Event(**json.loads(line))


# ---------------------------------------------------------------------- the judge


def verdict(
    events: list[Event], whole: Callable[[str, int], str | None], committed: set[int] | None = None
) -> list[str]:
    """What is wrong with a history.

    Args:
        events: of all ranks; those of one process in their order.
        whole: says what is wrong with a checkpoint that should hold the state at a step; None if nothing is.
        committed: the steps of all checkpoints that there are at the end, if none was removed.
    """
    events = sorted(events, key=lambda event: (event.round, event.rank))
    wrong = [
        *_disagreements(events),
        *_broken_checkpoints(events, whole),
        *_steps_back(events),
        *_untold_outcomes(events),
    ]
    if committed is not None:
        wrong += [*_commits_at_odds(events, committed), *_wrong_resumptions(events, committed)]
    return wrong


def _disagreements(events: list[Event]) -> Iterator[str]:
    finalized = {(event.round, event.step): event.rank for event in events if event.what == "finalized"}
    for event in events:
        who = finalized.get((event.round, event.step))
        if event.what == "failed" and who is not None:
            yield f"step {event.step}: rank {who} finalized it, rank {event.rank} saw it fail"


def _broken_checkpoints(events: list[Event], whole: Callable[[str, int], str | None]) -> Iterator[str]:
    for path, step in sorted({(event.path, event.step) for event in events if event.path}):
        fault = whole(path, step)
        if fault is not None:
            yield f"step {step}: latest() returned {path}, but {fault}"


def _steps_back(events: list[Event]) -> Iterator[str]:
    """Once a rank or an earlier round knows of a checkpoint, it is told of no older one, and saves none."""
    known_before = -1
    for _, of_round in groupby(events, key=lambda event: event.round):
        known = known_before
        for rank, of_process in groupby(of_round, key=lambda event: event.rank):
            newest = known_before
            for event in of_process:
                if event.what in ("latest", "loaded") and event.step < newest:
                    how = "latest() returned" if event.what == "latest" else "it loaded"
                    yield f"rank {rank}: {how} step {event.step} after step {newest}"
                if event.what == "scheduled" and event.step <= newest:
                    yield f"rank {rank}: it saved step {event.step} after step {newest} was committed"
                if event.what in ("latest", "loaded", "finalized"):
                    newest = max(newest, event.step)
            known = max(known, newest)
        known_before = known


def _untold_outcomes(events: list[Event]) -> Iterator[str]:
    """A process learns of its saves in their order; of all of them, if it ended well."""
    for (round, rank), of_process in groupby(events, key=lambda event: (event.round, event.rank)):
        seen = list(of_process)
        scheduled = [event.step for event in seen if event.what == "scheduled"]
        outcomes = [event.step for event in seen if event.what in ("finalized", "failed")]
        if not scheduled:
            continue  # This history does not record it.
        due = scheduled if seen[-1].what == "closed" else scheduled[: len(outcomes)]
        if outcomes != due:
            yield f"round {round}, rank {rank}: it saved {scheduled}, and heard of {outcomes}"


def _commits_at_odds(events: list[Event], committed: set[int]) -> Iterator[str]:
    """What was finalized is there; what a rank could not write is not."""
    for event in events:
        if event.what == "finalized" and event.step not in committed:
            yield f"step {event.step}: rank {event.rank} finalized it, and there is no checkpoint"
        if event.what != "failed" or event.step not in committed or UNCONFIRMED in event.text:
            continue
        if event.round == _made_in(events, event.step):
            yield f"step {event.step}: rank {event.rank} heard that it was not written, and it is committed"


def _wrong_resumptions(events: list[Event], committed: set[int]) -> Iterator[str]:
    """Check that a round starts from the last checkpoint that was committed before it."""
    rounds = {step: _made_in(events, step) for step in committed}
    starts: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event.what == "loaded":
            starts[event.round].add(event.step)
    for round, steps in starts.items():
        due = max((step for step, made in rounds.items() if made < round), default=0)
        if steps != {due}:
            yield f"round {round}: its ranks started from {sorted(steps)}; the last committed was {due}"


def _made_in(events: list[Event], step: int) -> int:
    """The round that committed a step: the last that saved it, for a committed step cannot be saved again."""
    return max(
        (event.round for event in events if (event.what, event.step) == ("scheduled", step)), default=0
    )


# ---------------------------------------------------------------------- its look at checkpoints


def whole_checkpoint(
    path: Path | str, step: int, options: dict[str, Any] | None = None, world_size: int = 0
) -> str | None:
    """The judge's look at one of torch's checkpoints.

    Args:
        path: its folder, or its address in a bucket.
        step: that it should hold.
        options: of the bucket; None: it is a folder.
        world_size: of the ranks that have saved extras, too, and nothing else; default: none has.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        from torch.distributed.checkpoint.fsspec_filesystem import (  # type: ignore[import-not-found]
            FsspecReader,
        )
    except ImportError:  # torch before 2.15
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    weight = torch.zeros(ROWS, 4)
    extras = {key: value for rank in range(world_size) for key, value in extras_at(step, rank).items()}
    found = {key: torch.zeros_like(value) for key, value in extras.items()}
    into = {"weight": weight, "step": -1, **found}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            reader = FileSystemReader(path) if options is None else FsspecReader(path, **options)
            saved = set(reader.read_metadata().state_dict_metadata)
            load(into, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # Torch's is a BaseException.
        return f"it does not load: {error!r}"
    if world_size and saved != set(into):
        return f"it holds {sorted(saved)}, and should hold {sorted(into)}"
    same = torch.equal(weight, weight_at(step)) and into["step"] == step
    same = same and all(torch.equal(found[key], extras[key]) for key in extras)
    return None if same else "it is not the state at that step"


def whole_files(path: Path | str, step: int, world_size: int) -> str | None:
    """The judge's look at a folder with one file of each rank."""
    try:
        parts = [torch.load(Path(path) / f"rank-{rank}.pt") for rank in range(world_size)]
    except Exception as error:
        return f"it does not load: {error!r}"
    return None if torch.equal(torch.cat(parts), weight_at(step)) else "it is not the state at that step"
