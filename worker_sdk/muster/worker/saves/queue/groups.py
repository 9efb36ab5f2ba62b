"""Which queue of this process decides by which group's barriers: two would take each other's decisions."""

from dataclasses import dataclass
from itertools import count

from muster.worker import environment
from muster.worker.barriers import GrpcBarrier
from muster.worker.errors import MusterError
from muster.worker.saves.job_barrier import job_barrier, job_generation
from muster.worker.saves.request import PREFIX


@dataclass(frozen=True, slots=True)
class Group:
    """The barriers of a queue."""

    run_id: str
    generation: int
    rank: int
    prefix: str

    @staticmethod
    def of(barrier: GrpcBarrier) -> "Group":
        """That of a barrier."""
        return Group(barrier.run_id, barrier.generation, barrier.rank, barrier.prefix)

    def take(self) -> None:
        """Decide by these barriers, alone.

        Raises:
            ValueError: another queue does.
            MusterError: the outcome of one of its saves is not known here.
        """
        if self in _retired:
            raise MusterError(
                f"the outcome of {_retired[self]} is not known to this rank, and the next barrier of group "
                f'"{self.prefix}" would tell it as that of another save. Restart the job, or give the saves '
                "of all ranks a generation or a group of their own, such as "
                f'barrier=GrpcBarrier(barrier_prefix="{self.prefix}-b").'
            )
        if self in _taken:
            raise ValueError(
                f'another queue of saves that is open decides by the barriers of group "{self.prefix}". '
                "Close it first, or give this one a barrier of its own, such as "
                f'barrier=GrpcBarrier(barrier_prefix="{self.prefix}-b"), on all ranks.'
            )
        try:
            _taken.add(self)
            _numbered.add(self)
        except BaseException:  # After an interrupt there is no queue to close.
            self.give_back()
            raise

    def retire(self, save: str) -> None:
        """Refuse it from now on: this rank gives up a save of it whose outcome it was not told."""
        _retired.setdefault(self, save)

    def give_back(self) -> None:
        """Its queue was closed: the group is anybody's."""
        _taken.discard(self)
        _numbered.discard(self)

    def drop(self) -> None:
        """Its queue is gone, at a moment that only the garbage collector knows.

        A queue that is given this group's barrier may have it. The default numbering goes on without it: it
        must be the same on all ranks.
        """
        _taken.discard(self)


_taken: set[Group] = set()
_numbered: set[Group] = set()
"""Those that the default passes over: taken, and not given back by a close."""
_retired: dict[Group, str] = {}


def default_barrier() -> GrpcBarrier:
    """The barrier of a queue that was given none: of a group that no queue that was not closed has.

    Ranks that open and close their queues in the same order get the same.
    """
    life = (environment.run_id(None), job_generation())
    passed = {group.prefix for group in _numbered if (group.run_id, group.generation) == life}
    prefixes = (PREFIX if number == 1 else f"{PREFIX}-{number}" for number in count(1))
    return job_barrier(next(prefix for prefix in prefixes if prefix not in passed))
