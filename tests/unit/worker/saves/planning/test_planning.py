"""When the ranks of a job plan a save together: several ranks in one process, and no coordinator."""

import gc
import threading
import weakref
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from lab.patience import PATIENCE, until
from muster.checkpoint.committed import SaveAttempt
from muster.worker.decision import Outcome
from muster.worker.errors import (
    BarrierAbortedError,
    ConnectError,
    MemberLostError,
    MusterError,
    OutcomeUnknownError,
    RefusedError,
)
from muster.worker.saves.planning import planning as module
from muster.worker.saves.planning.planning import PlanNegotiation, Planning
from muster.worker.saves.queue.groups import Group
from muster.worker.saves.storage.folder_storage import FolderStorage, PendingFolder
from tests.support.expect import raising
from tests.support.handler import Handler
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.fake_group import FakeGroup, Member

PLAN = "save/plan"
AWAY = OutcomeUnknownError("the coordinator is away", PLAN, 0, Outcome.UNKNOWN)


def plan_of(names: str) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner({name: torch.zeros(4) for name in names})
    return planner.create_local_plan()


def named(plan: SavePlan) -> str:
    return "".join(sorted(item.index.fqn for item in plan.items))


class Job:
    """Ranks that save.

    Args:
        folder: that they share.
        world_size: how many they are.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self.storage = FolderStorage(folder)
        self.group = FakeGroup(world_size)
        self.members = [self.group.member(rank) for rank in range(world_size)]
        self.plannings = [self.planning(member) for member in self.members]

    @staticmethod
    def planning(member: Member) -> Planning:
        as_barrier: Any = member
        return Planning(as_barrier, 60.0)

    def pending(self, save: int) -> PendingFolder:
        return self.storage.pending(save, SaveAttempt(0, save))

    def begin(self, rank: int, save: int, names: str) -> PlanNegotiation:
        pending = self.pending(save)
        pending.begin()
        return self.plannings[rank].begin(f"save {save}", pending, plan_of(names))

    def share(self, rank: int, save: int, names: str) -> "Future[str]":
        negotiation = self.begin(rank, save, names)
        return in_thread(lambda: named(negotiation.share()))

    def all_save(self, save: int, names: list[str]) -> list[str]:
        """What each rank writes of what it has."""
        negotiations = [self.begin(rank, save, some) for rank, some in enumerate(names)]
        shares = [named(negotiation.share()) for negotiation in negotiations]
        assert "".join(sorted(negotiations[0].metadata().state_dict_metadata)) == "".join(
            sorted(set("".join(names)))
        )
        return shares

    def try_to_save(self, names: list[str]) -> None:
        """As :meth:`all_save`, whether they can or not; it is over on all ranks then."""
        negotiations = [self.begin(rank, -1, some) for rank, some in enumerate(names)]
        for negotiation in negotiations:
            with suppress(BarrierAbortedError, OutcomeUnknownError):
                negotiation.share()
        until(lambda: all(negotiation.over for negotiation in negotiations))

    def close(self) -> None:
        for planning in self.plannings:
            planning.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, 2)
    yield made
    for rank in range(2):
        made.group.lose(rank)  # After a failed test, no thread keeps waiting.
    made.close()


def test_the_first_save_is_planned_together(job: Job):
    one = job.share(0, 0, "ab")
    until(lambda: job.group.has_arrived(0, PLAN, 0))
    assert not one.done()
    other = job.share(1, 0, "ab")
    assert sorted([one.result(), other.result()]) == ["a", "b"]
    (early,) = [one for one in job.members[0].siblings[PLAN].early if one is not None]
    assert "each must make the same saves" in early.hint


def test_rank_with_an_unchanged_state_waits_for_no_other_rank(job: Job):
    first = job.all_save(0, ["ab", "ab"])
    for save in (1, 2, 3):
        assert named(job.begin(0, save, "ab").share()) == first[0]
    for save in (1, 2, 3):
        assert named(job.begin(1, save, "ab").share()) == first[1]


def test_only_a_rank_with_a_changed_state_waits_for_the_other_ranks(job: Job):
    first = job.all_save(0, ["ab", "ab"])
    changed = job.share(1, 1, "abc")
    until(lambda: job.group.has_arrived(1, PLAN, 2))
    assert not changed.done()
    negotiation = job.begin(0, 1, "ab")
    assert named(negotiation.share()) == first[0]
    assert changed.result() == "".join(sorted(set("abc") - set(first[0])))
    assert set(negotiation.metadata().state_dict_metadata) == set("abc")


def test_after_that_the_shares_are_made_even_again(job: Job):
    job.all_save(0, ["abcd", "abcd"])
    job.all_save(1, ["abcd", "abcdefgh"])
    shares = job.all_save(2, ["abcdefgh", "abcdefgh"])
    assert [len(share) for share in shares] == [4, 4]
    assert job.all_save(3, ["abcdefgh", "abcdefgh"]) == shares


def test_item_that_no_rank_would_write_fails_the_save_and_the_next_is_planned_from_scratch(job: Job):
    _, of_1 = job.all_save(0, ["ab", "ab"])
    negotiations = [job.begin(0, 1, "ab"), job.begin(1, 1, "c")]
    with pytest.raises(
        BarrierAbortedError, match=f"rank 0 failed: ValueError: rank 0 has {of_1} in its state"
    ):
        negotiations[1].share()
    with pytest.raises(BarrierAbortedError):
        negotiations[0].metadata()
    assert sorted(job.all_save(2, ["ab", "c"])) == ["ab", "c"]


def test_rank_that_cannot_begin_fails_the_save_for_waiting_ranks(job: Job):
    job.plannings[1].refuse("save 0", job.pending(0), "its memory is full")
    with pytest.raises(BarrierAbortedError, match="rank 1 failed: its memory is full"):
        job.begin(0, 0, "ab").share()
    job.all_save(1, ["ab", "ab"])
    job.plannings[1].refuse("save 2", job.pending(2), "its memory is full")
    assert named(job.begin(0, 2, "ab").share()), "who does not wait hears of it when it has written"
    job.all_save(3, ["ab", "ab"])


def test_a_rank_that_cannot_leave_its_plan_fails_it(job: Job):
    negotiation = job.begin(0, 0, "a")
    taken = job.pending(9)
    taken._unfinished.write_text("a file where its folder goes")
    other = job.plannings[1].begin("save 0", taken, plan_of("a"))
    for one in (negotiation, other):
        with pytest.raises(BarrierAbortedError, match="rank 1 failed: NotADirectoryError"):
            one.share()


def test_a_folder_that_is_not_shared_is_an_error_of_all(job: Job, tmp_path: Path):
    negotiation = job.begin(0, 0, "a")
    elsewhere = FolderStorage(tmp_path / "elsewhere").pending(0, SaveAttempt(0, 0))
    elsewhere.begin()
    other = job.plannings[1].begin("save 0", elsewhere, plan_of("a"))
    for one in (negotiation, other):
        with pytest.raises(BarrierAbortedError, match=r"proposed-1, which .* in one folder that they share"):
            one.share()


def test_a_share_that_is_not_there_is_one_ranks_error(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zlib, "decompress", _Fails(zlib.decompress, at=3))
    negotiations = [job.begin(0, 0, "a"), job.begin(1, 0, "b")]
    failed = []
    for negotiation in negotiations:
        try:
            negotiation.share()
        except EOFError:
            failed.append(negotiation)
    assert len(failed) == 1
    monkeypatch.undo()
    assert job.all_save(1, ["a", "b"]) == ["a", "b"], "it says that it has to be planned for"


class _Fails:
    """A function that fails at one of its calls."""

    def __init__(self, theirs: Any, at: int) -> None:
        self._theirs = theirs
        self._left = at
        self._lock = threading.Lock()

    def __call__(self, data: bytes) -> Any:
        with self._lock:
            self._left -= 1
            if not self._left:
                raise EOFError("Ran out of input")
        return self._theirs(data)


def test_lost_rank_is_named_to_a_waiting_rank_and_delays_no_later_save(job: Job):
    job.all_save(0, ["ab", "ab"])
    waits = job.begin(0, 1, "abc")
    job.group.lose(1)
    with pytest.raises(MemberLostError, match="lost rank 1"):
        waits.share()
    negotiation = job.begin(0, 2, "abc")
    with pytest.raises(MemberLostError):
        negotiation.share()


def test_waiting_rank_is_told_that_the_coordinator_is_away_and_planning_continues(job: Job):
    job.members[0].sibling(PLAN).raises = {0: [AWAY]}
    negotiation = job.begin(0, 0, "ab")
    with pytest.raises(OutcomeUnknownError):
        negotiation.share()
    other = job.begin(1, 0, "ab")
    assert named(other.share()) in ("a", "b")
    assert negotiation.metadata().state_dict_metadata.keys() == {"a", "b"}
    assert sorted(job.all_save(1, ["ab", "ab"])) == ["a", "b"]


def test_save_that_begins_while_another_is_planned_is_another_save(job: Job):
    """The plan before may be over by then, and rank 0 has another one."""
    job.all_save(0, ["ab", "ab"])
    job.members[1].sibling(PLAN).raises = {3: [AWAY]}
    given_up = job.begin(1, 1, "abc")
    with pytest.raises(OutcomeUnknownError):
        given_up.share()
    as_before = job.share(1, 2, "ab")
    assert named(job.begin(0, 1, "ab").share())
    of_0 = named(job.begin(0, 2, "ab").share())
    assert set(as_before.result()) | set(of_0) == set("ab")


def test_a_refusal_is_told(job: Job):
    job.members[0].sibling(PLAN).raises = {0: [RefusedError("rank 0 was evicted", "EVICTED")]}
    with pytest.raises(RefusedError, match="evicted"):
        job.begin(0, 0, "ab").share()
    job.begin(1, 0, "ab")
    job.group.lose(0)


def test_a_plan_that_comes_late_is_not_that_of_what_was_begun_since(job: Job):
    """Rank 1 gives up two saves, and has at the third what it had at the first: rank 0 knows the second's."""
    job.members[1].sibling(PLAN).raises = {0: [AWAY], 3: [AWAY]}
    with pytest.raises(OutcomeUnknownError):
        job.begin(1, 0, "abc").share()
    second = job.begin(1, 1, "ba")
    assert set(named(job.begin(0, 0, "abc").share())) < set("abc")
    with pytest.raises(OutcomeUnknownError):
        second.share()
    third = job.share(1, 2, "abc")
    job.begin(0, 1, "ba").share()
    negotiation = job.begin(0, 2, "abc")
    assert sorted(named(negotiation.share()) + third.result()) == ["a", "b", "c"]


def test_nothing_is_left_in_the_folder_before_all_have_begun(job: Job):
    """Rank 0 may make its checkpointer last, and sweeps then."""
    share = job.share(1, 0, "ab")
    until(lambda: job.group.has_arrived(1, PLAN, 0))
    assert list(job.pending(0)._unfinished.iterdir()) == []
    job.begin(0, 0, "ab")
    assert share.result()


def test_a_save_that_is_begun_is_not_refused(job: Job):
    negotiation = job.begin(0, 0, "ab")
    job.plannings[0].refuse("save 0", negotiation.pending, "interrupted")
    assert job.begin(1, 0, "ab").share()
    assert job.all_save(1, ["ab", "ab"])


class Away(list[Exception]):
    """Whatever is asked, and however often."""

    def __init__(self) -> None:
        super().__init__([AWAY])
        self.asked = 0

    def pop(self, index: Any = -1) -> Exception:
        self.asked += 1
        return AWAY


def test_closing_while_the_coordinator_is_away_gives_up_all_that_waits(job: Job):
    job.all_save(0, ["ab", "ab"])
    member = job.members[0].sibling(PLAN)
    away = Away()
    member.raises = {member.sequence: away}
    negotiations = [job.begin(0, save, "ab") for save in range(1, 20)]
    until(lambda: away.asked > 0)
    job.plannings[0].end()
    asked = away.asked
    job.plannings[0].close()
    assert away.asked <= asked + 2, "not once more for each save"
    for negotiation in negotiations:
        with pytest.raises(OutcomeUnknownError):
            negotiation.metadata()
    with pytest.raises(MusterError, match="the outcome of save 1 is not known"):
        Group("job", 0, 0, "save").take()


def test_rank_0_does_not_commit_while_it_is_not_known_what_was_planned(job: Job):
    job.all_save(0, ["ab", "ab"])
    member = job.members[0].sibling(PLAN)
    member.raises = {member.sequence: [AWAY]}
    negotiation = job.begin(0, 1, "ab")
    assert negotiation.share()
    with pytest.raises(OutcomeUnknownError):
        negotiation.metadata()
    job.begin(1, 1, "ab")


def test_an_error_that_was_told_keeps_no_state_alive(job: Job):
    job.plannings[1].refuse("save 0", job.pending(0), "its memory is full")

    def save() -> "weakref.ref[torch.Tensor]":
        state = torch.zeros(4)
        with pytest.raises(BarrierAbortedError):
            job.begin(0, 0, "ab").share()
        return weakref.ref(state)

    gc.disable()
    try:
        state = save()
        job.plannings[0].close()
        assert state() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("what", "name"), [(PendingFolder, "take"), (module, "unpacked")])
def test_whatever_goes_wrong_its_thread_lives(
    job: Job, monkeypatch: pytest.MonkeyPatch, what: Any, name: str
):
    with monkeypatch.context() as patched:
        patched.setattr(what, name, raising(CheckpointException, "torch's, which is no Exception", {}))
        negotiations = [job.begin(0, 0, "ab"), job.begin(1, 0, "ab")]
        for negotiation in negotiations:
            with pytest.raises((CheckpointException, BarrierAbortedError)):
                negotiation.share()
    assert sorted(job.all_save(1, ["ab", "ab"])) == ["a", "b"]


def test_its_thread_keeps_nothing_alive(tmp_path: Path):
    job = Job(tmp_path, 1)
    job.all_save(0, ["ab"])
    thread = job.plannings[0]._thread
    job.plannings.clear()
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


STATES = st.lists(
    st.lists(st.sampled_from(["", "a", "b", "ab"]), min_size=3, max_size=3), min_size=1, max_size=6
)
"""By save, what each of three ranks has."""
OUTAGES = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=6)
"""The ranks that cannot reach the coordinator until they give up, and at which of their barriers."""


@settings(max_examples=60, deadline=None)
@given(states=STATES, outages=OUTAGES)
def test_whatever_changes_each_save_that_all_ranks_can_write_is_whole(
    tmp_path_factory: pytest.TempPathFactory, states: list[list[str]], outages: set[tuple[int, int]]
):
    """Ranks save as fast as they can, each for itself; then their states stay as they are."""
    job = Job(tmp_path_factory.mktemp("job"), 3)
    for rank, sequence in outages:
        job.members[rank].sibling(PLAN).raises[sequence] = [AWAY]
    # Each rank has something of its own as well: 0, 1 and 2.
    states = [[f"{some}{rank}" for rank, some in enumerate(one)] for one in states]

    def saves(rank: int) -> list[str | None]:
        written: list[str | None] = []
        for save, names in enumerate(states):
            negotiation = job.begin(rank, save, names[rank])
            try:
                share = named(negotiation.share())
                if rank == 0:
                    metadata = negotiation.metadata()
                    assert set(metadata.state_dict_metadata) == set("".join(names))
                written.append(share)
            except (BarrierAbortedError, OutcomeUnknownError):
                written.append(None)
        return written

    ranks = [in_thread(lambda rank=rank: saves(rank)) for rank in range(3)]  # type: ignore[misc]
    written = list(zip(*[one.result() for one in ranks], strict=True))
    for names, shares in zip(states, written, strict=True):
        if all(share is not None for share in shares):
            assert set("".join(shares)) == set("".join(names))
            assert all(set(share) <= set(some) for share, some in zip(shares, names, strict=True))
    for member in job.members:
        member.sibling(PLAN).raises.clear()
    try:
        for _ in range(2):
            job.try_to_save(states[-1])
        assert sorted("".join(job.all_save(-1, states[-1]))) == sorted(set("".join(states[-1]))), "each once"
    finally:
        job.close()


def test_one_that_could_not_be_made_is_collected_quietly(monkeypatch: pytest.MonkeyPatch):
    member = FakeGroup(1).member(0)
    monkeypatch.setattr(member, "sibling", raising(ConnectError, "nobody answers"))
    with pytest.raises(ConnectError):
        Job.planning(member)
    gc.collect()


@pytest.mark.parametrize("names", ["ab", "abc"], ids=["as before", "something else"])
def test_handler_that_interrupts_a_save_anywhere_can_wait_for_all_others(tmp_path: Path, names: str):
    """It may close the Checkpointer, and so wait until the saves before are committed."""

    def interrupt(line: int) -> bool:
        job = Job(tmp_path / str(line), 1)
        job.all_save(0, ["ab"])
        earlier = job.begin(0, 1, "abcd")

        def close() -> None:
            assert in_thread(earlier.metadata).result(PATIENCE)
            job.close()

        def save() -> None:
            with suppress(MusterError):  # It is closed.
                job.begin(0, 2, names).share()

        handler = Handler(module, line, close)
        in_thread(lambda: handler.interrupt(save)).result(PATIENCE)
        job.close()
        return handler.called

    lines = 0
    while interrupt(lines):
        lines += 1
    assert lines > 10


def test_save_that_is_begun_after_the_end_fails(job: Job):
    job.plannings[0].close()
    with pytest.raises(MusterError, match="closed"):
        job.begin(0, 0, "ab").share()
