"""Checkpoints that are folders into which every rank writes, whatever it is that writes them."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeAlias

from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.containment import followed, path_in
from muster.checkpoint.damage import CorruptCheckpointError, Damage
from muster.checkpoint.directory import make_folder
from muster.checkpoint.manifest import Manifest
from muster.checkpoint.version import LaterVersionError
from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Outcome
from muster.worker.errors import MusterError, error_for
from muster.worker.integrations.commit.cleanup import sweep
from muster.worker.integrations.commit.commitment import (
    Commitment,
    OnLost,
    check_save_settings,
    commit_written,
    report_failure,
    take_turn,
)
from muster.worker.integrations.commit.contents import gather_manifest, record_share, verify_share
from muster.worker.integrations.commit.lookup import (
    ReplacedError,
    corrupt,
    mark_damaged,
    read,
    read_whole,
)
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from muster.worker.integrations.commit.words import is_of_a_save, out_of_step
from muster.worker.saves.failure import cut, failure_text
from muster.worker.saves.queue.groups import Group

logger = logging.getLogger(__name__)

ANOTHERS = b"."
"""What ranks say that look for no checkpoint, since rank 0 does."""
NONE = b"/"
"""What rank 0 says that has found none; no name has a separator."""
CORRUPT = b"/\0"
"""Begins rank 0's word if the checkpoint is damaged; the reason follows. No name has this in it."""
SEPARATOR = b"\0"
"""Separates a marker from the damage of its checkpoint."""

_unfinished_loads: set[Group] = set()
"""Groups in which this rank left the last load early. Others may still be in it."""

Find: TypeAlias = Callable[[Set[Path]], Path | None]
"""Finds a checkpoint's name, given the checkpoints that were just found damaged."""


class FolderSaves:
    """Lets all ranks of a framework save and resume together.

    Args:
        prefix: the group that decides saves, if no barrier is given.
        name: how the checkpoints are named where they are not committed yet.
        barrier: decides the saves, and is for nothing else; None: it is taken from the environment.
        timeout: seconds that a rank may take for its part of a save, and that it is waited for.
        on_lost: what becomes of this process if a rank is lost, or does not come in time.

    Raises:
        ValueError: ``on_lost`` is not one of its values, the timeout is not a finite number above 0, or the
            barrier does not cover all ranks.
    """

    def __init__(
        self, prefix: str, name: str, barrier: GrpcBarrier | None, timeout: float, on_lost: OnLost
    ) -> None:
        check_save_settings(timeout, on_lost, barrier)
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
            ValueError: the environment names no barrier, the barrier is of other ranks, or the framework did
                not join the ranks that were started together.
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
        self, barrier: GrpcBarrier, path: Path, write: Callable[[Path], None], alias: str | None = None
    ) -> None:
        """All ranks save.

        When all have written, each puts a share of it on the disk and digests it. Then rank 0 commits it,
        with a manifest of the digests.

        Args:
            barrier: theirs.
            path: the checkpoint's name.
            write: writes this rank's part into a folder of the same name elsewhere.
            alias: how what is not committed is named; default: as the others of these saves, so that they
                are swept with it.

        Raises:
            BarrierError: not all have written, or rank 0 could not commit it; the message names who, and why.
            MusterError: a rank gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached.
        """
        commitment = Commitment(barrier, self._timeout, self._on_lost, name=path.name, parts=2)
        alias = alias or self._name
        staged = StagedCheckpoint(
            path, barrier.generation, commitment.begun(), barrier.run_id, alias, path.name
        )
        place = staged.unfinished.parent
        with report_failure(commitment):
            make_folder(path.parent)
            write(staged.unfinished)
            place.mkdir(parents=True, exist_ok=True)
            _part(place, barrier.rank).touch()

        def digest() -> int:
            if barrier.rank == 0:
                _check_whole(staged.unfinished, barrier.world_size)
            return record_share(staged.unfinished, barrier.rank, barrier.world_size)

        def gather() -> Manifest:
            manifest = gather_manifest(staged.unfinished, barrier.world_size)
            # All others have written, and wait for this one.
            sweep(path.parent, alias, but=staged.unfinished)
            return manifest

        commit_written(commitment, digest, gather, staged.commit)

    def choose(self, barrier: GrpcBarrier, folder: Path, find: Find, *, verify: bool = True) -> Path:
        """Return the checkpoint that all ranks load: rank 0 finds it, and all ranks verify it.

        Rank 0 tells the checkpoint's name alone, and each rank looks for that name in its own ``folder``: no
        process can make the ranks load a file from elsewhere. Each rank verifies a share of its files. If one
        finds damage, the checkpoint is marked, and rank 0 finds another. If it finds the same one again, all
        ranks raise.

        Args:
            barrier: of the ranks.
            folder: where this rank looks for it, from its own configuration.
            find: finds it in the folder.
            verify: whether to verify its files here. If not, their reader must verify them.

        Raises:
            BarrierError: not all ranks have come, or one cannot load it; the message names who.
            CorruptCheckpointError: it is damaged, or all are. All ranks raise it.
            MusterError: the ranks do not do the same.
            RuntimeError: they do not find the same.
            OSError, ValueError: this one cannot, or the name leads out of the folder.
        """
        chosen = self.choose_any(barrier, folder, find, verify=verify)
        assert chosen is not None
        return chosen

    def choose_named(self, barrier: GrpcBarrier, path: Path) -> Path:
        """As :meth:`choose`, of a checkpoint that the script names on each rank.

        Args:
            barrier: of the ranks.
            path: the checkpoint, or a link to it.
        """
        path = followed(path)
        return self.choose(barrier, path.parent, lambda _: path)

    def choose_any(
        self,
        barrier: GrpcBarrier,
        folder: Path,
        find: Find,
        *,
        verify: bool = True,
        look: Find | None = None,
    ) -> Path | None:
        """As :meth:`choose`, where rank 0 may find none: then that is what all hear.

        Args:
            barrier: of the ranks.
            folder: where this rank looks for it.
            find: finds it in the folder.
            verify: whether its files are verified here.
            look: confirms on each other rank that no checkpoint exists: rank 0's host may not have the share.
        """
        if Group.of(barrier) in _unfinished_loads:
            raise MusterError(
                "the last load ended here before this rank heard from the coordinator how it ends, and the "
                "other ranks may be in the midst of it. Restart the job on all ranks."
            )
        take_turn(barrier)
        damaged: dict[Path, Damage] = {}
        while True:
            mine = partial(_found, find, damaged) if barrier.rank == 0 else _anothers
            # Who does not hear of this barrier can call again: the next choice begins with the same one.
            words = self._by_all(barrier, mine, begins=not damaged)
            _check_in_step(barrier, (said for rank, said in words.items() if rank), ANOTHERS)
            word = words[0]
            if word == NONE:
                if look is not None:
                    words = self._by_all(barrier, partial(_none, barrier, look, damaged.keys()))
                    _check_in_step(barrier, words.values(), NONE)
                return None
            if word.startswith(CORRUPT):
                text = word.removeprefix(CORRUPT).decode("utf-8", "replace")
                raise CorruptCheckpointError(text, tuple(damaged.values()))
            name = os.fsdecode(word)
            damage = self._examine(barrier, folder, name, verify=verify)
            if damage is None:
                return folder / name
            damaged[folder / name] = damage

    def _examine(self, barrier: GrpcBarrier, folder: Path, name: str, *, verify: bool) -> Damage | None:
        """Check that all ranks find the same checkpoint, and verify it.

        Returns:
            The damage that a rank found, if any. Then the checkpoint is marked.
        """
        # Who goes on alone would hang in the next collective.
        words = self._by_all(barrier, partial(_seen, barrier, folder, name, verify=verify))
        path = folder / name
        said = [word.partition(SEPARATOR) for _, word in sorted(words.items())]
        markers = {marker for marker, _, _ in said}
        if len(markers) > 1:
            raise RuntimeError(
                f"{path} is not the same checkpoint to all ranks: it was replaced just now, or one sees what "
                "was there before. Load it again, on all ranks."
            )
        damages = [Damage(**json.loads(damage)) for _, _, damage in said if damage]
        if not damages:
            return None
        if barrier.rank == 0:
            # Whatever is there now is not loaded.
            with suppress(ReplacedError, UncommittedError, LaterVersionError, OSError):
                marker = read(path)[1]
                if repr(marker).encode() in markers:
                    mark_damaged(path, marker, damages[0])
        return damages[0]

    def _by_all(
        self, barrier: GrpcBarrier, find: Callable[[], bytes], *, begins: bool = False
    ) -> Mapping[int, bytes]:
        """What all ranks find, if none fails at it."""
        found, failure = b"", None
        try:
            found = find()
        except Exception as error:  # The others wait for this rank, whatever happens to it.
            failure = error
        word = None if failure is None else failure_text(failure)
        group = Group.of(barrier)
        if not begins:
            _unfinished_loads.add(group)
        decision = barrier.vote(word, self._timeout, found)
        _unfinished_loads.discard(group)
        if failure is not None:
            raise failure
        if decision.outcome is not Outcome.RELEASED:
            raise error_for(decision)
        if len(decision.payloads) < barrier.world_size or any(map(is_of_a_save, decision.payloads.values())):
            raise out_of_step(barrier.prefix, barrier.run_id, "some make a save where others load")
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


def _anothers() -> bytes:
    return ANOTHERS


def _check_in_step(barrier: GrpcBarrier, words: Iterable[bytes], expected: bytes) -> None:
    """Check that no rank is at another barrier of a choice: one that began again answers what others ask.

    Raises:
        MusterError: one is.
    """
    if any(word != expected for word in words):
        raise out_of_step(barrier.prefix, barrier.run_id, "some have begun to load again")


def _none(barrier: GrpcBarrier, look: Find, damaged: Set[Path]) -> bytes:
    """What a rank says where rank 0 has found no checkpoint.

    Raises:
        OSError: it finds one.
    """
    if barrier.rank and (there := look(damaged)) is not None:
        raise OSError(
            f"rank 0 finds no checkpoint, and rank {barrier.rank} finds {there}: they do not see the same "
            "folder. Mount it on rank 0's host, and start the job again."
        )
    return NONE


def _found(find_name: Find, damaged: Mapping[Path, Damage]) -> bytes:
    """Return rank 0's word about the checkpoint that it has found.

    Raises:
        UncommittedError: it was not committed.
        OSError: that cannot be read.
    """
    try:
        name = find_name(damaged.keys())
        if name is not None and (path := read_whole(name)[0]) not in damaged:
            return os.fsencode(path.name)
    except CorruptCheckpointError as error:
        return CORRUPT + cut(str(error)).encode()
    except UncommittedError:
        if not damaged:
            raise
    if not damaged:
        return NONE
    path, damage = list(damaged.items())[-1]
    return CORRUPT + cut(str(corrupt(path, damage))).encode()


def _seen(barrier: GrpcBarrier, folder: Path, name: str, *, verify: bool) -> bytes:
    """Return a rank's word about a checkpoint that it will load.

    Raises:
        ValueError: the name leads out of the folder.
        ReplacedError: another one has its name now.
        UncommittedError: it was not committed.
        OSError: it cannot be read.
    """
    path = path_in(folder, name)
    marker = read(path)[1]
    damage = verify_share(path, marker.manifest, barrier.rank, barrier.world_size) if verify else None
    if verify and marker.manifest is None and barrier.rank == 0:
        logger.warning("%s has no digests: it is loaded unverified", path)
    if damage is None:
        return repr(marker).encode()
    if read(path)[1] != marker:
        raise ReplacedError(path)
    return repr(marker).encode() + SEPARATOR + json.dumps(asdict(damage)).encode()


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
