"""Who speaks for the ranks of a run, in its newest generation."""

from collections.abc import Iterator

from muster.service.core.membership.process import Process


class Roster:
    """The processes of a run's newest generation, by rank, in the order of their first hello."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._by_rank: dict[int, list[Process]] = {}
        self._living: set[Process] = set()
        """The processes of the roster that live, so that a hello need not look at every rank."""

    def __iter__(self) -> Iterator[Process]:
        for rank in sorted(self._by_rank):
            yield from self._by_rank[rank]

    def __len__(self) -> int:
        return len(self._by_rank)

    def of_rank(self, rank: int) -> list[Process]:
        """The processes of a rank, oldest first."""
        return self._by_rank.get(rank, [])

    def find(self, rank: int, incarnation: str) -> Process | None:
        """The process of this rank and incarnation."""
        for process in self._by_rank.get(rank, ()):
            if process.incarnation == incarnation:
                return process
        return None

    def newest(self, rank: int) -> Process | None:
        """The rank's newest process."""
        processes = self._by_rank.get(rank)
        return processes[-1] if processes else None

    def add(self, process: Process) -> None:
        """Take in a process, and let go of the dead of its rank who speak nowhere."""
        kept = [p for p in self.of_rank(process.rank) if p.state.living or p.prefixes]
        kept.append(process)
        kept.sort(key=lambda p: p.ordinal)
        self._by_rank[process.rank] = kept
        self.refresh(process)

    def refresh(self, process: Process) -> None:
        """Count a process of the roster as living, or no more, after its state changed."""
        if process.state.living:
            self._living.add(process)
        else:
            self._living.discard(process)

    def clear(self) -> None:
        """Forget everyone."""
        self._by_rank.clear()
        self._living.clear()

    def mark_past(self, begun: float | None) -> None:
        """Everyone has gone, and a newcomer comes that may be of the same life of the job, or of its next.

        All stay known. Who was there still when the newcomer was running already is of the same life.

        Args:
            begun: when the newcomer began to run, on the monotonic clock; None: in this life.
        """
        for process in self:
            process.past = begun is not None and process.last_seen <= begun

    @property
    def deserted(self) -> bool:
        """Whether nobody lives any more."""
        return not self._living

    def is_gone(self, rank: int, owner: Process | None) -> bool:
        """Whether nobody is left to arrive for a rank: invariant 6 (a barrier does not wait for the dead).

        Args:
            rank: the rank.
            owner: the process that spoke for the rank in the group in question, if any.
        """
        if owner is not None:
            return owner.state.gone and self.successor(owner) is None
        processes = self.of_rank(rank)
        return all(p.state.gone for p in processes) and not all(p.past for p in processes)

    def successor(self, dead: Process) -> Process | None:
        """The newest living process that may take the place of a dead one.

        It is newer. It took over another group from the dead one, or from its successor; or it came not long
        ago and may do so.
        """
        for process in reversed(self.of_rank(dead.rank)):
            if process.ordinal <= dead.ordinal:
                break
            if not process.state.gone and (
                process.lineage == dead.lineage or process.successor_until is not None
            ):
                return process
        return None
