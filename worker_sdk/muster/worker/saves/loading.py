"""Loads a checkpoint in agreement of all ranks: all load the same bytes, or all step down together.

Rank 0 chooses a checkpoint, and tells all ranks at a barrier. They load it as :mod:`.agreement` says. If a
rank finds damage, rank 0 marks the checkpoint and chooses the one before it. That load overwrites what was
loaded.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.committed import Committed, committed_from, seal, unseal
from muster.checkpoint.damage import CorruptCheckpointError, Damage, DamageError
from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision
from muster.worker.saves.load_agreement import Agreement, Load
from muster.worker.saves.storage.checkpoint_storage import CheckpointStorage
from muster.worker.saves.storage.reading import Opened, open_checkpoint

logger = logging.getLogger(__name__)

MAX_NAMED = 8
"""Number of damaged checkpoints that rank 0 names to the others, at most."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The checkpoint that rank 0 tells all ranks to load."""

    made: Committed | None
    """None: there is nothing to load."""
    damaged: tuple[str, ...] = ()
    """Newer checkpoints that are damaged, with the reason."""

    def encode(self) -> str:
        """Return it as text."""
        marker = None if self.made is None else seal(self.made.fields()).decode()
        name = "" if self.made is None else str(self.made.path).rpartition("/")[2]
        return json.dumps({"name": name, "marker": marker, "damaged": self.damaged[:MAX_NAMED]})

    @classmethod
    def decode(cls, text: str, locate: Callable[[str], Path | str]) -> "Chosen":
        """Read what rank 0 said.

        Args:
            text: its word.
            locate: returns the path of the name in it, in the place that this rank chose itself.

        Raises:
            ValueError: the name leads out of that place.
        """
        said = json.loads(text)
        damaged = tuple(said["damaged"])
        if said["marker"] is None:
            return cls(None, damaged)
        return cls(committed_from(unseal(said["marker"].encode()), locate(said["name"])), damaged)


class AgreedLoad(Agreement):
    """Loads a job's checkpoints on one rank, in agreement with all others.

    Args:
        barrier: decides the job's saves; loads use a sibling of it.
        storage: where the checkpoints are.
        timeout: seconds that the slowest rank may take to read.
        verify: whether digests are checked.
    """

    def __init__(
        self, barrier: GrpcBarrier, storage: CheckpointStorage, timeout: float, *, verify: bool
    ) -> None:
        super().__init__(barrier.sibling(f"{barrier.prefix}/load"), timeout)
        self._storage = storage
        self._verify = verify
        self.excluded: frozenset[str] = frozenset()
        """On rank 0: damaged checkpoints that could not be marked. Retention must not count them."""
        self.used: tuple[Path | str, ...] = ()
        """The checkpoint that is being loaded, which retention must leave."""

    def newest(self, load: Load, *, overwrites: bool = True) -> Committed | None:
        """Load the newest whole checkpoint.

        Args:
            load: loads into the state, through a reader; it is called again after damage.
            overwrites: whether each call overwrites all that an earlier one loaded. If not, damage that is
                found while loading ends the load: else the state would mix two checkpoints.

        Returns:
            The checkpoint, the same on all ranks; None before the first commit.

        Raises:
            CorruptCheckpointError: there are checkpoints, and all are damaged; or one is, and the state
                must be built again before an older one can be loaded.
            BarrierError: a rank failed to load, was lost or did not come; the message names it.
            Exception: what this rank's load raised.
        """
        found: list[Damage] = []
        while True:
            chosen = self._choose(self._look, self._storage.resolve_name)
            if chosen.made is None:
                if not chosen.damaged and not found:
                    self._check_none()
                    return None
                raise self._corrupt(chosen.damaged, found)
            damage = self._attempt(chosen.made, load)
            if damage is None:
                logger.info("loaded step %d from %s", chosen.made.step, chosen.made.path)
                return chosen.made
            found.append(damage)
            if self._filled and not overwrites:
                raise CorruptCheckpointError(
                    f"{chosen.made.path} is damaged: {damage}. The state is partly filled from it, and the "
                    "planner need not overwrite that. Build the state again, and call resume() again: it "
                    "passes over the damaged checkpoint.",
                    tuple(found),
                )
            logger.error("%s is damaged; all ranks load the one before: %s", chosen.made.path, damage)

    def named(self, path: Path | str, load: Load) -> Committed:
        """Load the checkpoint that all ranks name.

        Raises:
            UncommittedError: it was not committed.
            CorruptCheckpointError: it is damaged.
            ValueError: the ranks name different ones.
            BarrierError: as :meth:`newest`.
        """

        def read() -> Chosen:
            try:
                return Chosen(self._storage.read(path))
            except DamageError as error:
                return Chosen(None, (f"{path}: {error.damage}",))

        self.used = (path,)
        chosen = self._choose(read, lambda name: self._storage.resolve_name(name, beside=path), str(path))
        if chosen.made is None:
            raise self._corrupt(chosen.damaged, [])
        damage = self._attempt(chosen.made, load)
        if damage is not None:
            raise self._corrupt((), [damage])
        return chosen.made

    # ------------------------------------------------------------------ what rank 0 chooses

    def _look(self) -> Chosen:
        found = self._storage.newest(self.excluded)
        for damaged in found.damaged:
            logger.warning("passed over as damaged: %s", damaged)
        return Chosen(found.newest, found.damaged)

    def _choose(
        self, look: Callable[[], Chosen], locate: Callable[[str], Path | str], named: str = ""
    ) -> Chosen:
        """Return what rank 0 tells all ranks to load.

        Args:
            look: finds it, on rank 0.
            locate: returns where this rank finds the name that rank 0 tells.
            named: the path that the script names, on all ranks; empty: the newest checkpoint.

        Raises:
            MusterError: the last load ended before this rank heard how it ends.
        """
        self._check_in_step()
        payload, error, mine = named.encode(), None, None
        if self._barrier.rank == 0:
            try:
                mine = look()
                payload = json.dumps([named, mine.encode()]).encode()
            except BaseException as failed:  # The others wait for this rank, whatever happens to it.
                error = failed
        # Who does not hear of this barrier can call again: the next load begins with the same one.
        decision = self._meet(error, payload, begins=True)
        said, chosen = json.loads(decision.payloads[0])
        for rank in range(1, self._barrier.world_size):
            if (word := decision.payloads.get(rank, b"").decode()) != said:
                raise ValueError(
                    f"rank 0 loads {said or 'the newest checkpoint'}, and rank {rank} "
                    f"{word or 'the newest checkpoint'}. Load the same checkpoint on all ranks."
                )
        heard = Chosen.decode(chosen, locate)  # Rank 0 decodes it, too: if the name is refused, all raise.
        return mine or heard

    def _check_none(self) -> None:
        """See that no rank finds a checkpoint. Where a share is not mounted, its folder is there, and empty.

        Raises:
            OSError: this rank finds one.
            BarrierError: another rank does, or cannot look.
        """
        error: BaseException | None = None
        try:
            # Rank 0 has looked.
            found = self._storage.newest(()) if self._barrier.rank else None
            if found is not None and (found.newest is not None or found.damaged):
                there = found.damaged[0] if found.newest is None else found.newest.path
                error = OSError(
                    f"rank 0 finds no checkpoint, and rank {self._barrier.rank} finds {there}: they do not "
                    "see the same place. Mount it on rank 0's host, and start the job again."
                )
        except BaseException as failed:
            error = failed
        self._meet(error, b"")

    # ------------------------------------------------------------------ one attempt

    def _attempt(self, made: Committed, load: Load) -> Damage | None:
        self.used = (made.path,)
        try:
            return super()._attempt(made, load)
        finally:
            self.used = ()

    def _read_first(self, made: Committed) -> Opened:
        if self._barrier.rank:
            self._check_same(made)
        source = self._storage.source(made)
        opened = open_checkpoint(made, source, verify=self._verify, sizes=self._barrier.rank == 0)
        if self._verify and opened.manifest is None:
            logger.warning("%s has no digests: it is loaded unverified", made.path)
        return opened

    def _check_same(self, made: Committed) -> None:
        """Check that this rank finds the same checkpoint as rank 0."""
        mine = self._storage.read(made.path)
        if mine != made:
            raise OSError(
                f"{made.path} is not the same checkpoint to all ranks: rank 0 sees "
                f"{made}, and this rank {mine}. Give all ranks the same shared folder or bucket."
            )

    # ------------------------------------------------------------------ damage

    def _judge(self, made: Committed, decision: Decision) -> Damage | None:
        """Return the damage that a rank found, if any; rank 0 records it."""
        found = super()._judge(made, decision)
        if found is not None and self._barrier.rank == 0:
            try:
                self._storage.mark_damaged(made, found)
            except OSError as error:
                self.excluded |= {str(made.path)}
                logger.warning("%s cannot be marked as damaged: %s", made.path, error)
        return found

    def _corrupt(self, damaged: tuple[str, ...], found: list[Damage]) -> CorruptCheckpointError:
        what = "; ".join(damaged) or "; ".join(map(str, found))
        return CorruptCheckpointError(
            f"no whole checkpoint can be loaded: {what}. The state may hold parts of a damaged one: build it "
            "again before training. Restore the files, or save to another place.",
            tuple(found),
        )
