"""Commits in shared storage: the coordinator permits them, and a recovery knows which may have been made."""

import pytest

from muster.service.core.vocabulary.effects import Refused
from muster.service.core.vocabulary.events import Tick
from muster.service.core.vocabulary.local import (
    Attempt,
    CommitLocal,
    Level,
    LocalCheckpoint,
    LocalCommitted,
    Permit,
    Permitted,
    Recover,
    Recovered,
    RequestPermit,
)
from muster.service.core.vocabulary.model import SessionId
from muster.service.core.vocabulary.refusal import Reason
from tests.support.keepers.scripted_job import RUN, Job, chosen, digest, refused

FIRST, SECOND, THIRD = Attempt(1, 0), Attempt(1, 1), Attempt(1, 2)


def new_job() -> Job:
    return Job(replicas=0).connect_all()


def save(job: Job, attempt: Attempt, step: int, *, persisted: bool = True) -> None:
    """Save a checkpoint that is whole, with all parts in shared storage."""
    job.commit(attempt, step, persist_to="/shared")
    for node in range(3):
        job.report(node, attempt, {node})
    if persisted:
        for node in range(3):
            job.report(node, attempt, {node}, persisted_ranks=frozenset({node}))


def permit(job: Job, attempt: Attempt) -> SessionId:
    session = job.session()
    job.step(RequestPermit(session, RUN, "k0", attempt))
    return session


def save_shared(job: Job, attempt: Attempt, step: int, persisted_as: str = "") -> object:
    """What rank 0 says of a checkpoint that all ranks write to shared storage."""
    session = job.session()
    checkpoint = LocalCheckpoint(attempt, step, 3, 100, digest(attempt), 0, "/shared")
    job.step(CommitLocal(session, RUN, checkpoint, "", persisted_as=persisted_as))
    return job.answer(session)


def recover(job: Job, generation: int, number: int = 0, **more: object) -> SessionId:
    """A decision that waits for nothing."""
    session = job.session()
    job.step(Recover(session, RUN, generation, number, 3, **more))  # type: ignore[arg-type]
    job.now += 6
    job.step(Tick())
    return session


def unsettled(job: Job, session: SessionId) -> list[Attempt]:
    answer = job.answer(session)
    assert isinstance(answer, Recovered | Permitted | LocalCommitted)
    return [one.attempt for one in answer.unsettled]


def lose(job: Job, attempt: Attempt) -> None:
    """A part of it is lost, and a new generation begins."""
    job.report(2, attempt, set())
    for node in range(3):
        holdings = job.core.run(RUN).local.keepers.find(f"k{node}").holdings  # type: ignore[union-attr]
        job.connect(node, *holdings.values(), generation=2)


@pytest.fixture
def permitted() -> Job:
    """A job with a permit for its newest checkpoint, which has lost a part."""
    job = new_job()
    save(job, FIRST, 10, persisted=False)
    job.report(0, FIRST, {0}, persisted_ranks=frozenset(range(3)), persisted_as="/shared/10")
    save(job, SECOND, 20)
    assert job.answer(permit(job, SECOND)) == Permitted(())
    lose(job, SECOND)
    return job


@pytest.mark.parametrize("restarts", [False, True])
def test_checkpoint_that_may_be_in_shared_storage_is_looked_for(permitted: Job, restarts: bool):
    job = permitted
    if restarts:
        held = {n: job.core.run(RUN).local.keepers.find(f"k{n}").holdings for n in range(3)}  # type: ignore[union-attr]
        job.restart()
        for node in range(3):
            job.connect(node, *held[node].values(), generation=2)
    asked = recover(job, 2)
    assert chosen(job, asked) is None
    assert unsettled(job, asked) == [SECOND]
    assert refused(job, permit(job, SECOND)) is Reason.ATTEMPT_SUPERSEDED, "the ranks look there now"


def test_next_decision_goes_back_if_it_is_not_there(permitted: Job):
    job = permitted
    assert chosen(job, recover(job, 2)) is None
    again = recover(job, 2, 1, absent=(SECOND,))
    assert chosen(job, again) == FIRST
    assert job.level(SECOND) is None
    assert refused(job, permit(job, SECOND)) is Reason.ATTEMPT_SUPERSEDED


def test_all_ranks_of_a_later_generation_look_again_if_the_answer_was_lost(permitted: Job):
    job = permitted
    recover(job, 2)
    lose(job, THIRD)
    for node in range(3):
        holdings = job.core.run(RUN).local.keepers.find(f"k{node}").holdings  # type: ignore[union-attr]
        job.connect(node, *holdings.values(), generation=3)
    asked = recover(job, 3)
    assert (chosen(job, asked), unsettled(job, asked)) == (None, [SECOND])


def test_keeper_that_says_it_has_committed_ends_the_doubt(permitted: Job):
    job = permitted
    job.report(0, SECOND, {0}, persisted_as="/shared/20")
    asked = recover(job, 2)
    assert (chosen(job, asked), unsettled(job, asked)) == (None, [])
    assert job.level(SECOND) is Level.PERSISTED


def test_checkpoint_that_is_whole_is_resumed_from_without_a_look():
    job = new_job()
    save(job, FIRST, 10)
    permit(job, FIRST)
    assert chosen(job, recover(job, 1)) == FIRST
    assert isinstance(job.answer(permit(job, FIRST)), Permitted)


def test_checkpoint_is_not_permitted_out_of_its_turn():
    job = new_job()
    save(job, FIRST, 10)
    save(job, SECOND, 20)
    assert refused(job, permit(job, SECOND)) is Reason.ATTEMPT_SUPERSEDED
    assert refused(job, permit(job, THIRD)) is Reason.ATTEMPT_SUPERSEDED


def test_permit_is_of_a_keeper_with_a_stream():
    job = new_job()
    save(job, FIRST, 10)
    job.lose(0)
    assert refused(job, permit(job, FIRST)) is Reason.KEEPER_NOT_CONNECTED


# ---------------------------------------------------------------------- without room on a node


def test_save_in_shared_storage_is_resumed_from_before_an_older_local_one():
    job = new_job()
    save(job, FIRST, 10)
    assert save_shared(job, SECOND, 20) == LocalCommitted(Level.LOCAL)
    assert save_shared(job, SECOND, 20, "/shared/20") == LocalCommitted(Level.PERSISTED)
    assert job.level(SECOND) is Level.PERSISTED
    began = job.now
    session = job.session()
    job.step(Recover(session, RUN, 1, 0, 3))
    assert (chosen(job, session), job.now) == (None, began), "no node can have its parts"
    assert "had no room" in job.answer(session).reason  # type: ignore[union-attr]


def test_newer_local_checkpoint_is_resumed_from_after_one_in_shared_storage():
    job = new_job()
    save_shared(job, FIRST, 10)
    save_shared(job, FIRST, 10, "/shared/10")
    save(job, SECOND, 20, persisted=False)
    assert chosen(job, recover(job, 1)) == SECOND


def test_save_in_shared_storage_that_rank_0_did_not_finish_is_looked_for():
    job = new_job()
    save(job, FIRST, 10, persisted=False)
    save_shared(job, SECOND, 20)
    asked = recover(job, 1)
    assert (chosen(job, asked), unsettled(job, asked)) == (None, [SECOND])
    assert chosen(job, recover(job, 1, 1, absent=(SECOND,))) == FIRST


def test_save_in_shared_storage_names_older_commits_that_may_still_come():
    job = new_job()
    save(job, FIRST, 10)
    permit(job, FIRST)
    answer = save_shared(job, SECOND, 20)
    assert isinstance(answer, LocalCommitted)
    assert [one.attempt for one in answer.unsettled] == [FIRST]
    assert refused(job, permit(job, FIRST)) is Reason.ATTEMPT_SUPERSEDED, "an older one after a newer one"


def test_keepers_are_told_of_it_and_have_nothing_to_do():
    job = new_job()
    save_shared(job, FIRST, 10)
    assert job.orders("k0").checkpoints == ()
    save_shared(job, FIRST, 10, "/shared/10")
    (order,) = job.orders("k0").checkpoints
    assert (order.level, order.ranks, order.sources, order.persist) == (Level.PERSISTED, (), (), ())


def test_saves_in_shared_storage_make_room_on_the_nodes():
    job = new_job()
    for number in range(2):
        save(job, Attempt(1, number), number, persisted=False)
    for number in range(2, 5):
        save_shared(job, Attempt(1, number), number)
        save_shared(job, Attempt(1, number), number, f"/shared/{number}")
    kept = [one.attempt.number for one in job.core.run(RUN).local.copies]
    assert kept == [1, 3, 4], "the newest whole one on the nodes, and the two newest"


def test_attempt_of_a_past_life_is_not_permitted():
    job = new_job()
    save(job, FIRST, 10)
    lose(job, FIRST)
    assert isinstance(save_shared(job, SECOND, 20), Refused)


def test_permit_survives_a_restart():
    job = new_job()
    save_shared(job, FIRST, 10)
    job.restart()
    (one,) = job.core.run(RUN).local.copies
    assert one.record.permit is Permit.GIVEN
    assert one.is_in_shared_storage_alone


# ---------------------------------------------------------------------- ranks that could not load


def test_ranks_that_could_not_load_get_a_decision_without_local_checkpoints():
    job = new_job()
    save(job, FIRST, 10, persisted=False)
    assert chosen(job, recover(job, 1)) == FIRST
    asked = recover(job, 1, 1, without_local=True)
    assert chosen(job, asked) is None
    assert chosen(job, job.recover(1, 1)) is None, "one decision for all"
    assert job.level(FIRST) is None
