"""The processes of the ranks of a run, in its newest generation."""

from collections import Counter
from collections.abc import Iterator

from muster.service.core.membership.process import Process


class Roster:
    """The processes of a run's newest generation, by rank, in the order of their first hello."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._by_rank: dict[int, list[Process]] = {}
        self._living: set[Process] = set()
        """Its living processes, so that a hello need not look at every rank."""
        self._nodes: Counter[str] = Counter()
        """How many living processes each node has, by its name."""

    def __iter__(self) -> Iterator[Process]:
        for rank in sorted(self._by_rank):
            yield from self._by_rank[rank]

    def __len__(self) -> int:
        return len(self._by_rank)

    def of_rank(self, rank: int) -> list[Process]:
        """Return the processes of a rank, oldest first."""
        return self._by_rank.get(rank, [])

    def find(self, rank: int, incarnation: str) -> Process | None:
        """Return the process of this rank and incarnation."""
        for process in self._by_rank.get(rank, ()):
            if process.incarnation == incarnation:
                return process
        return None

    def newest(self, rank: int) -> Process | None:
        """Return the rank's newest process."""
        processes = self._by_rank.get(rank)
        return processes[-1] if processes else None

    def add(self, process: Process) -> None:
        """Add a process, and forget the dead processes of its rank that own it in no group."""
        kept = [p for p in self.of_rank(process.rank) if p.state.living or p.prefixes]
        kept.append(process)
        kept.sort(key=lambda p: p.ordinal)
        self._by_rank[process.rank] = kept
        self.refresh(process)

    def refresh(self, process: Process) -> None:
        """Update whether a process counts as living, after its state changed."""
        was_living = process in self._living
        if process.state.living and not was_living:
            self._living.add(process)
            self._nodes[process.node_name] += 1
        elif was_living and not process.state.living:
            self._living.remove(process)
            self._nodes[process.node_name] -= 1
            if not self._nodes[process.node_name]:
                del self._nodes[process.node_name]

    def clear(self) -> None:
        """Remove all processes."""
        self._by_rank.clear()
        self._living.clear()
        self._nodes.clear()

    def mark_past(self, begun: float | None) -> None:
        """Mark the processes that may belong to an earlier start of the job, when a newcomer finds all gone.

        A process that was last seen after the newcomer started belongs to the same start.

        Args:
            begun: when the newcomer started, on the monotonic clock; None: in the same start of the job.
        """
        for process in self:
            process.past = begun is not None and process.last_seen <= begun

    def is_on_node(self, node_name: str) -> bool:
        """Whether a living process is on a node."""
        return node_name in self._nodes

    @property
    def deserted(self) -> bool:
        """Whether no process is living."""
        return not self._living

    def is_gone(self, rank: int, owner: Process | None) -> bool:
        """Whether a rank has no process left: invariant 6 (a barrier does not wait for the dead).

        Args:
            rank: the rank.
            owner: the process that owns the rank in the group in question, if any.
        """
        if owner is not None:
            return owner.state.gone and self.successor(owner) is None
        processes = self.of_rank(rank)
        return all(p.state.gone for p in processes) and not all(p.past for p in processes)

    def successor(self, dead: Process) -> Process | None:
        """Return the newest living process that may take the place of a dead one.

        It is newer. Either it took over another group from the dead process, or from a successor of that, or
        its ``SUCCESSION_WINDOW`` has not ended.
        """
        for process in reversed(self.of_rank(dead.rank)):
            if process.ordinal <= dead.ordinal:
                break
            if not process.state.gone and (
                process.lineage == dead.lineage or process.successor_until is not None
            ):
                return process
        return None
