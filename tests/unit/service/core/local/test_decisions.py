"""What a job with local checkpoints resumes from, through the core's events alone."""

from muster.service.core.vocabulary.effects import Refused
from muster.service.core.vocabulary.events import Disconnected, Tick
from muster.service.core.vocabulary.local import Attempt, Holding, Level, Recover
from muster.service.core.vocabulary.refusal import Reason
from tests.support.keepers.scripted_job import RUN, Job, chosen, digest, refused

FIRST, SECOND = Attempt(1, 0), Attempt(1, 1)


def job_after_first() -> Job:
    """A job without copies that has saved once."""
    return Job(replicas=0).connect_all().save(FIRST, 10)


def part(attempt: Attempt, rank: int) -> Holding:
    """The part of a rank, as a keeper reports it."""
    return Holding(attempt, digest(attempt), frozenset({rank}))


def test_decision_waits_for_keepers_with_the_missing_parts():
    job = job_after_first()
    job.save(Attempt(1, 1), 20, copies=False)
    job.lose(2)
    job.connect(2, Holding(Attempt(1, 0), digest(Attempt(1, 0)), frozenset({2})), generation=1)
    asked = job.recover(1)
    assert job.answer(asked) is None
    job.now += 4
    job.step(Tick())
    assert job.answer(asked) is None
    job.now += 2
    job.step(Tick())
    assert chosen(job, asked) == Attempt(1, 0)
    assert job.level(Attempt(1, 1)) is None, "it was abandoned"
    session = job.commit(Attempt(1, 1), 20)
    assert refused(job, session) is Reason.ATTEMPT_SUPERSEDED


def test_decision_waits_longer_for_keepers_that_verify():
    job = Job().connect_all().save(Attempt(1, 0), 10)
    job.restart()
    job.verifying = {"k2"}
    job.connect_all(generation=2)
    asked = job.recover(2)
    job.now += 100
    job.step(Tick())
    assert job.answer(asked) is None
    for node in range(3):
        job.report(node, Attempt(1, 0), {node})
    assert chosen(job, asked) == Attempt(1, 0)


def test_decision_waits_for_keepers_that_verify_with_a_manifest_that_has_just_come():
    job = job_after_first()
    job.save(SECOND, 20)
    job.lose(0, 1, 2)
    for node in range(3):
        job.connect(node, part(FIRST, node))
    job.verifying = {"k3"}
    job.connect(3, generation=None)
    asked = job.recover(1)
    job.now += 10
    job.verifying = {"k1", "k2"}
    job.report(3, SECOND, {0})
    assert "http://k3" in [one.url for one in job.orders("k1").checkpoints[-1].sources]
    job.now += 60
    job.step(Tick())
    assert job.answer(asked) is None, "k1 and k2 have not confirmed the orders that name k3"
    job.report(1, SECOND, {1})
    job.report(2, SECOND, {2})
    assert chosen(job, asked) == SECOND


def test_decision_waits_for_keepers_that_could_not_get_the_manifest_from_a_slow_keeper():
    """Their source is the same as before, so their orders would not change."""
    job = job_after_first()
    job.commit(SECOND, 20)
    for node in (1, 2):
        job.connect(node, part(FIRST, node))
    job.verifying = {"k0"}
    asked = job.recover(1)
    job.now += 10
    job.verifying = {"k1", "k2"}
    job.report(0, SECOND, {0})
    assert job.answer(asked) is None, "k1 and k2 have confirmed that k0 did not give it"
    job.report(1, SECOND, {1})
    job.report(2, SECOND, {2})
    assert chosen(job, asked) == SECOND


def test_decision_waits_for_a_keeper_without_ranks_after_its_stream_has_ended():
    job = job_after_first()
    job.save(SECOND, 20)
    job.lose(2)
    job.connect(2, part(FIRST, 2))
    job.verifying = {"k3"}
    job.connect(3, generation=None)
    asked = job.recover(1)
    job.now += 60
    job.lose(3)
    job.now += 4
    job.step(Tick())
    assert job.answer(asked) is None
    job.verifying = set()
    job.connect(3, part(SECOND, 2), generation=None)
    assert chosen(job, asked) == SECOND


def test_all_ranks_hear_one_decision_also_after_a_restart():
    job = Job().connect_all().save(Attempt(1, 0), 10)
    first = job.recover(1)
    job.restart()
    late = job.recover(1)
    assert chosen(job, first) == chosen(job, late) == Attempt(1, 0)


def test_next_decision_does_without_the_copies_that_were_damaged():
    job = job_after_first()
    job.save(Attempt(1, 1), 20)
    assert chosen(job, job.recover(1)) == Attempt(1, 1)
    job.report(1, Attempt(1, 1), set())
    asked = job.recover(1, 1)
    job.now += 6
    job.step(Tick())
    assert chosen(job, asked) == Attempt(1, 0)
    assert refused(job, job.recover(1, 0)) is Reason.RECOVERY_SUPERSEDED


def test_job_without_local_checkpoints_resumes_from_shared_storage():
    job = Job(replicas=0).connect_all()
    assert chosen(job, job.recover(1)) is None


def test_newer_checkpoint_in_shared_storage_is_preferred():
    job = job_after_first()
    job.commit(Attempt(1, 1), 20, persist_to="/shared")
    for node in range(3):
        job.report(node, Attempt(1, 1), {node}, persisted_ranks=frozenset({node}))
    (order,) = [one for one in job.orders("k0").checkpoints if one.commit]
    assert order.checkpoint.step == 20
    assert not any(one.commit for one in job.orders("k1").checkpoints)
    job.report(0, Attempt(1, 1), {0}, persisted_ranks=frozenset({0}), persisted_as="/shared/step-20")
    assert job.level(Attempt(1, 1)) is Level.PERSISTED
    job.lose(2)
    job.connect(2, Holding(Attempt(1, 0), digest(Attempt(1, 0)), frozenset({2})))
    asked = job.recover(1)
    job.now += 6
    job.step(Tick())
    assert chosen(job, asked) is None


def test_decision_waits_no_longer_when_all_calls_ended_and_came_back():
    job = job_after_first()
    job.commit(Attempt(1, 1), 20)
    first = job.recover(1)
    job.now += 4
    job.step(Disconnected(first))
    again = job.recover(1)
    job.now += 2
    job.step(Tick())
    assert chosen(job, again) == Attempt(1, 0)


def test_recovery_with_different_world_sizes_is_refused_for_all():
    job = Job()
    job.connect(0)
    waiting = job.recover(1)
    other = job.session()
    job.step(Recover(other, RUN, 1, 0, 4))
    for session in (waiting, other):
        answer = job.answer(session)
        assert isinstance(answer, Refused)
        assert answer.refusal.reason is Reason.RECOVERY_MISMATCHED
        assert "world sizes 3 and 4" in answer.refusal.message


def test_rank_with_another_world_size_does_not_hear_a_decision():
    job = Job().connect_all().save(Attempt(1, 0), 10)
    assert chosen(job, job.recover(1)) == Attempt(1, 0)
    other = job.session()
    job.step(Recover(other, RUN, 1, 0, 4))
    answer = job.answer(other)
    assert isinstance(answer, Refused)
    assert answer.refusal.reason is Reason.RECOVERY_MISMATCHED
