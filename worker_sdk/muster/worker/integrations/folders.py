"""Checkpoints that are folders into which every rank writes, whatever it is that writes them."""

import os
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import get_args

from muster.checkpoint.committed import MARKER, UncommittedError
from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Outcome
from muster.worker.errors import error_for
from muster.worker.integrations.aside import Aside, Marker, read, remove, sweep, sync_below
from muster.worker.integrations.commitment import (
    Commitment,
    OnLost,
    is_of_a_save,
    out_of_step,
    take_turn,
    told,
)
from muster.worker.saves.failure import failure_text

ANOTHERS = b"."
"""What ranks say that look for no checkpoint, since rank 0 does."""
NONE = b"/"
"""What rank 0 says that has found none; the root of all folders is none either."""


class FolderSaves:
    """Lets all ranks of a framework save and resume together.

    Args:
        prefix: the group by whose barriers saves are decided, where no barrier is given.
        name: how the checkpoints are named where they are not committed yet.
        barrier: decides the saves, and is for nothing else; None: it is taken from the environment.
        timeout: seconds that a rank may take for its part of a save, and that it is waited for.
        on_lost: what becomes of this process if a rank is lost, or does not come in time.

    Raises:
        ValueError: ``on_lost`` is not one of its values.
    """

    def __init__(
        self, prefix: str, name: str, barrier: GrpcBarrier | None, timeout: float, on_lost: OnLost
    ) -> None:
        if on_lost not in get_args(OnLost):
            raise ValueError(f'on_lost = {on_lost!r}: it must be "raise" or "abort".')
        self._prefix = prefix
        self._name = name
        self._barrier = barrier
        self._timeout = timeout
        self._on_lost = on_lost

    def meet(self, rank: int, world_size: int) -> GrpcBarrier:
        """The barrier of the framework's ranks.

        Raises:
            ConnectError: the coordinator could not be reached.
            RefusedError: it refused this process.
            ValueError: there is none in the environment, the barrier is of other ranks, or the framework has
                left those ranks alone that were started with it.
        """
        if self._barrier is None:
            _check_joined(world_size)
            self._barrier = GrpcBarrier(rank, world_size, self._prefix)
        theirs = (self._barrier.rank, self._barrier.world_size)
        if theirs != (rank, world_size):
            raise ValueError(
                f"this process is rank {rank} of {world_size} of the job, and rank {theirs[0]} of "
                f"{theirs[1]} of the barrier. Give a barrier of the job's ranks, or none."
            )
        return self._barrier

    def save(
        self,
        barrier: GrpcBarrier,
        path: Path,
        write: Callable[[Path], None],
        finish: Callable[[Path], None] = lambda _: None,
        alias: str | None = None,
    ) -> None:
        """All ranks save.

        Args:
            barrier: theirs.
            path: the checkpoint's name.
            write: writes this rank's part into a folder of the same name elsewhere.
            finish: on rank 0, when all have written there: does what is left.
            alias: how what is not committed is named; default: as the others of these saves, so that they
                are swept with it.

        Raises:
            BarrierError: not all have written, or rank 0 could not commit it; the message names who, and why.
            MusterError: a rank gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached.
        """
        commitment = Commitment(barrier, self._timeout, self._on_lost, name=path.name)
        alias = alias or self._name
        aside = Aside(path, barrier.generation, commitment.begun(), alias, path.name, barrier.run_id)
        place = aside.unfinished.parent
        with told(commitment):
            write(aside.unfinished)
            place.mkdir(parents=True, exist_ok=True)
            _part(place, barrier.rank).touch()
        decision = commitment.written()
        if barrier.rank == 0:
            with told(commitment):
                _check_whole(aside.unfinished, barrier.world_size)
                finish(aside.unfinished)
                sync_below(aside.unfinished)
                # All others have written, and wait for this one.
                sweep(path.parent, alias, but=aside.unfinished)
                commitment.claim()
                marker = (barrier.run_id, barrier.generation, barrier.world_size)
                aside.commit(Marker(*marker, decision.prefix, decision.sequence))
                commitment.committed()
        commitment.confirmed()

    def choose(self, barrier: GrpcBarrier, find: Callable[[], Path]) -> Path:
        """The checkpoint that all ranks load: rank 0 finds it, and all see that it was committed.

        Args:
            barrier: of the ranks.
            find: finds its name.

        Raises:
            BarrierError: not all ranks have come, or one cannot load it; the message names who.
            MusterError: the ranks do not do the same.
            RuntimeError: they do not find the same.
            OSError, ValueError: this one cannot.
        """
        chosen = self.choose_any(barrier, find)
        assert chosen is not None
        return chosen

    def choose_any(self, barrier: GrpcBarrier, find: Callable[[], Path | None]) -> Path | None:
        """As :meth:`choose`, where rank 0 may find none: then that is what all hear."""

        def name() -> bytes:
            found = find()
            return NONE if found is None else os.fsencode(read(found)[0])

        take_turn(barrier)
        found = self._by_all(barrier, name if barrier.rank == 0 else lambda: ANOTHERS)
        if found[0] == NONE:
            return None
        path = Path(os.fsdecode(found[0]))
        # Who goes on alone would hang in the next collective.
        markers = self._by_all(barrier, lambda: repr(read(path)[1]).encode())
        if len(set(markers.values())) > 1:
            raise RuntimeError(
                f"{path} is not the same checkpoint to all ranks: it was replaced just now, or one sees what "
                "was there before. Load it again, on all ranks."
            )
        return path

    def _by_all(self, barrier: GrpcBarrier, find: Callable[[], bytes]) -> Mapping[int, bytes]:
        """What all ranks find, if none fails at it."""
        found, failure = b"", None
        try:
            found = find()
        except (OSError, ValueError) as error:
            failure = error
        word = None if failure is None else failure_text(failure)
        decision = barrier.vote(word, self._timeout, found)
        if failure is not None:
            raise failure
        if decision.outcome is not Outcome.RELEASED:
            raise error_for(decision)
        if len(decision.payloads) < barrier.world_size or any(map(is_of_a_save, decision.payloads.values())):
            raise out_of_step(barrier, "some make a save where others load")
        return decision.payloads


def _check_joined(world_size: int) -> None:
    """See that a framework has all the ranks: each that it leaves alone would save under the same names."""
    started = os.environ.get("WORLD_SIZE", "1")
    if world_size == 1 and started != "1":
        raise ValueError(
            f"WORLD_SIZE={started}, and each of these ranks would train and save alone: without a GPU the "
            "framework joins them if it is told to use the processor, by Accelerator(cpu=True) or "
            "TrainingArguments(use_cpu=True)."
        )


def committed(folder: Path, named: str) -> list[Path]:
    """The committed checkpoints, in the order of their numbers.

    Args:
        folder: where checkpoints have their names.
        named: how these begin; a number follows.
    """
    return [path for path in _numbered(folder, named) if _is_committed(path)]


def rotate(checkpoints: list[Path], limit: int, kept: Set[Path]) -> None:
    """Remove what is :func:`stale`."""
    for old in stale(checkpoints, limit, kept):
        remove(old)


def stale(checkpoints: list[Path], limit: int, kept: Set[Path] = frozenset()) -> list[Path]:
    """The oldest, by when they were committed: their numbers may be of a run that was rolled back.

    Args:
        checkpoints: those that are committed.
        limit: how many are to be left.
        kept: those that stay in any case.
    """
    others = sorted((one for one in checkpoints if one not in kept), key=_committed_at)
    return others[: max(0, len(checkpoints) - limit)]


def _committed_at(path: Path) -> float:
    return (path / MARKER).stat().st_mtime


def newest(folder: Path, named: str) -> Path:
    """The committed checkpoint of the highest number; the arguments are those of :func:`committed`.

    Raises:
        UncommittedError: there is none.
    """
    if found := committed(folder, named):
        return found[-1]
    others = ", ".join(path.name for path in _numbered(folder, named))
    written = f"; {others} were written by something else" if others else ""
    raise UncommittedError(
        f"there is no committed checkpoint in {folder}{written}. Begin anew, or name one that was committed."
    )


def _numbered(folder: Path, named: str) -> list[Path]:
    numbers = {path: path.name.removeprefix(named) for path in folder.glob(f"{named}*")}
    there = [path for path in numbers if numbers[path].isdecimal()]
    return sorted(there, key=lambda path: int(numbers[path]))


def _is_committed(path: Path) -> bool:
    with suppress(UncommittedError):
        return bool(read(path))
    return False


def _part(place: Path, rank: int) -> Path:
    """What a rank leaves where it has written: a word could be another save's."""
    return place / f".part-{rank}"


def _check_whole(unfinished: Path, world_size: int) -> None:
    """Raises: OSError: a rank has written something else, or elsewhere."""
    parts = [_part(unfinished.parent, rank) for rank in range(world_size)]
    missing = [rank for rank, part in enumerate(parts) if not part.exists()]
    if missing:
        raise OSError(
            f"what ranks {missing} have written is not in {unfinished.parent}: they do not share the folder, "
            "or another job has removed it."
        )
    written = sorted(path.name for path in unfinished.parent.iterdir() if path not in parts)
    if written != [unfinished.name]:
        raise OSError(
            f"the ranks have written {', '.join(written) or 'nothing'}, and not {unfinished.name}: they are "
            "at different steps, or do not share the folder."
        )
