"""The protocol on a store without rename, between any two requests: kills, lost answers, two generations."""

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from greenlet import getcurrent, greenlet
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint.bucket.attempts import Attempt
from muster.checkpoint.bucket.protocol import CheckpointBucket
from muster.checkpoint.committed import Committed, SaveAttempt, UncommittedError
from tests.support.saves.model_bucket import Fate, ModelBucket

RANKS = 2
SAVES = 3
FAULTS = (Fate.LOST, Fate.FAILED, Fate.TWICE, None)
"""None: the process is killed before the request."""


@dataclass(eq=False)
class Job:
    """One generation: rank 0's thread, which commits and sweeps, and a child for each rank and save."""

    world: "World"
    generation: int
    run: str
    keep_last: int | None
    bucket: CheckpointBucket = field(init=False)
    first: int = -1
    """The step of its first save; -1: it has not begun."""
    written: list[set[int]] = field(default_factory=lambda: [set() for _ in range(SAVES)])
    ended: list[set[int]] = field(default_factory=lambda: [set() for _ in range(SAVES)])

    def __post_init__(self) -> None:
        self.bucket = CheckpointBucket(self.world.objects, "s3://b/job", self.run)

    def attempt(self, save: int) -> Attempt:
        return self.bucket.attempt(self.first + save, SaveAttempt(self.generation, save))

    def lead(self) -> None:
        self.bucket.sweep(self.keep_last)
        last = self.world.look(self.bucket)
        self.first = last.step + 1 if last is not None else 1
        for save in range(SAVES):
            self.world.wait_until(functools.partial(self._is_over, save))
            attempt = self.attempt(save)
            if len(self.written[save]) == RANKS:
                self._commit(attempt)
            try:
                self.bucket.sweep(self.keep_last, attempt.save)
            except OSError:
                continue  # It is logged; the next one goes on.

    def _is_over(self, save: int) -> bool:
        return len(self.ended[save]) == RANKS

    def _commit(self, attempt: Attempt) -> None:
        made = Committed(
            attempt.step, RANKS, self.run, "save", attempt.save.number, self.bucket.path(attempt)
        )
        data = content(attempt)
        self.world.unclear.add(attempt)
        try:
            files = {f"__{rank}_0": len(data) for rank in range(RANKS)}
            entered = {f".entered-{rank}": 0 for rank in range(RANKS)}
            self.bucket.commit(attempt, made, files | entered)
            self.world.promise(attempt)
        except OSError:
            return
        except UncommittedError:
            assert not self.world.is_committed(attempt), (
                f"{attempt.name} is a checkpoint, and said to be none"
            )
        self.world.unclear.discard(attempt)

    def write(self, rank: int) -> None:
        """This rank's children, one after the other: the next save does not wait for the last's commit."""
        self.world.wait_until(lambda: self.first >= 0)
        for save in range(SAVES):
            attempt = self.attempt(save)
            try:
                self.world.objects.put(f"{attempt.name}/.entered-{rank}", b"")
                self.world.objects.put(f"{attempt.name}/.ranks/proposed-{rank}", b"what it has")
                self.world.objects.upload(f"{attempt.name}/__{rank}_0", content(attempt))
                self.written[save].add(rank)
            except OSError:
                pass
            finally:
                self.ended[save].add(rank)


def content(attempt: Attempt) -> bytes:
    return f"of {attempt.name}".encode()


class World:
    """All that ask, one request at a time, in an order that Hypothesis draws."""

    def __init__(self, *, exclusive: bool, keep_last: int | None) -> None:
        self.objects = ModelBucket(exclusive=exclusive)
        self.keep_last = keep_last
        self.promised: set[Attempt] = set()
        """What somebody was told is a checkpoint."""
        self.committed: set[Attempt] = set()
        """What was a checkpoint at any time."""
        self.unclear: set[Attempt] = set()
        """Attempts whose commit is uncertain: rank 0 was killed, or got no answer."""
        self._orders: dict[Attempt, int] = {}
        self._asking: list[greenlet] = []
        self._waiting: dict[greenlet, Callable[[], bool]] = {}

    def begin(self, *programs: Callable[[], None]) -> None:
        for program in programs:
            self._asking.append(greenlet(_surviving(program)))

    def wait_until(self, there: Callable[[], bool]) -> None:
        me = getcurrent()
        while not there():
            self._waiting[me] = there
            assert me.parent is not None
            me.parent.switch()
        self._waiting.pop(me, None)

    def look(self, bucket: CheckpointBucket) -> Committed | None:
        known = max(self.promised, key=self.age, default=None)
        made = bucket.latest()
        found = named(str(made.path)) if made is not None else None
        assert known is None or (found is not None and self.age(found) >= self.age(known)), (
            f"{found} is found, after {known}"
        )
        if found is not None:
            self.promise(found)
        return made

    def age(self, attempt: Attempt) -> tuple[int, Attempt]:
        """The order of commits."""
        if attempt not in self._orders:
            self._orders[attempt] = json.loads(self.objects.held[attempt.verdict])["order"]
        return self._orders[attempt], attempt

    def promise(self, attempt: Attempt) -> None:
        assert self.is_whole(attempt), f"{attempt.name} is said to be a checkpoint"
        self.promised.add(attempt)

    def is_committed(self, attempt: Attempt) -> bool:
        return b'"committed"' in self.objects.held.get(attempt.verdict, b"") and self.is_whole(attempt)

    def is_whole(self, attempt: Attempt) -> bool:
        files = [f"{attempt.name}/__{rank}_0" for rank in range(RANKS)]
        return all(self.objects.held.get(file) == content(attempt) for file in files)

    def run(self, chance: random.Random, faults: float) -> None:
        """Let them ask, one after the other as chance has it, until all have ended.

        Args:
            chance: draws who is next, and what becomes of what it asks.
            faults: how often something does.
        """
        while ready := [one for one in self._asking if self._may_go_on(one)]:
            one = chance.choice(ready)
            # Someone may stand still for long, and find that the world has changed.
            for _ in range(chance.choice((1, 1, 3, 10, 30))):
                fate = chance.choice(FAULTS) if chance.random() < faults else Fate.DONE
                if fate is None:
                    one.throw()
                else:
                    one.switch(fate)
                self.check()
                if one.dead or not self._may_go_on(one):
                    break
            self._asking = [one for one in self._asking if not one.dead]
        for one in self._asking:  # They wait for the dead.
            one.throw()
        self._asking = []

    def _may_go_on(self, one: greenlet) -> bool:
        return one not in self._waiting or self._waiting[one]()

    def check(self) -> None:
        """What was a checkpoint is one, unless there are so many newer ones that it need not be kept."""
        judged = {named(name.removesuffix(".json")) for name in self.objects.held if name.endswith(".json")}
        self.committed |= set(filter(self.is_committed, judged))
        ages = {attempt: self.age(attempt) for attempt in self.committed}
        for attempt in self.promised:
            newer = sum(ages[other] > ages[attempt] for other in self.committed)
            if self.keep_last is None or newer < self.keep_last:
                assert self.is_whole(attempt), f"{attempt.name} was a checkpoint"


def _surviving(program: Callable[[], None]) -> Callable[..., None]:
    def run(*_: object) -> None:
        try:
            program()
        except OSError:
            return  # A generation that cannot begin ends here.

    return run


def named(path: str) -> Attempt:
    attempt = Attempt.parse(path.rpartition("/")[2])
    assert attempt is not None
    return attempt


def begin(world: World, generation: int, run: str) -> Job:
    job = Job(world, generation, run, world.keep_last)
    world.begin(job.lead, *(functools.partial(job.write, rank) for rank in range(RANKS)))
    return job


def settle(world: World) -> None:
    """Begin a last generation, in which nothing fails."""
    last = CheckpointBucket(world.objects, "s3://b/job", "the last")

    def sweep() -> None:
        last.sweep(world.keep_last)
        world.look(last)

    world.begin(sweep)
    world.run(random.Random(0), 0.0)
    held = world.objects.held
    kept = {Attempt.parse(name.removesuffix(".json")) for name in held if name.endswith(".json")}
    assert {Attempt.parse(name.partition("/")[0].removesuffix(".json")) for name in held} == kept, "left over"
    assert world.objects.begun == set(), "uploads are left over"
    assert all(attempt is not None for attempt in kept)
    # Nobody else can tell it from a checkpoint of which someone has removed a part by hand.
    assert {attempt for attempt in kept if attempt and not world.is_whole(attempt)} <= world.unclear


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    faults=st.sampled_from([0.0, 0.02, 0.1]),
    keep_last=st.sampled_from([None, 1, 2]),
    runs=st.sampled_from([("job", "job"), ("job-1", "job-2")]),
)
def test_committed_checkpoints_stay_whole_and_no_leftovers_remain_under_faults(
    seed: int, faults: float, keep_last: int | None, runs: tuple[str, str]
):
    world = World(exclusive=True, keep_last=keep_last)
    for generation, run in enumerate(runs, 1):
        begin(world, generation, run)
    reader = CheckpointBucket(world.objects, "s3://b/job", "reads")

    def read() -> None:
        for _ in range(3):
            world.look(reader)

    world.begin(read, read)
    world.run(random.Random(seed), faults)
    settle(world)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), keep_last=st.sampled_from([None, 1, 2]), exclusive=st.booleans())
def test_a_life_alone_to_which_nothing_happens_commits_all(seed: int, keep_last: int | None, exclusive: bool):
    world = World(exclusive=exclusive, keep_last=keep_last)
    job = begin(world, 1, "job")
    world.run(random.Random(seed), 0.0)
    assert world.promised == {job.attempt(save) for save in range(SAVES)}
    settle(world)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), faults=st.sampled_from([0.02, 0.1]), keep_last=st.sampled_from([None, 1]))
def test_without_exclusive_requests_successive_generations_are_as_safe(
    seed: int, faults: float, keep_last: int | None
):
    world = World(exclusive=False, keep_last=keep_last)
    chance = random.Random(seed)
    for generation in (1, 2, 3):
        begin(world, generation, "job")
        world.run(chance, faults)
    settle(world)
