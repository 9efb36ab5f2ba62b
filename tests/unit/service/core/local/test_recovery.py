"""Recoveries that the oracle found to go wrong, and levels that no checkpoint can have."""

from itertools import count

import pytest

from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.effects import Effects, Refused
from muster.service.core.vocabulary.local import (
    Attempt,
    CommitLocal,
    ConnectKeeper,
    Disk,
    KeeperInfo,
    Level,
    LocalCheckpoint,
)
from muster.service.core.vocabulary.model import Instant
from muster.service.core.vocabulary.refusal import Reason
from tests.support.keepers.job import Job
from tests.support.keepers.settling import settle

NOW = Instant(0.0, 1e9)


def new_job(domains: list[str], replicas: int) -> Job:
    """A job with one rank on each node, which trains and has a checkpoint."""
    job = Job(domains, replicas, "")
    for node in job.nodes.values():
        job.connect(node)
        job.verify_all(node)
    job.start([(node, 1) for node in job.nodes.values()], job.nodes.values())
    settle(job)
    return job


def test_repeated_calls_do_not_restart_the_wait():
    job = new_job(["", "", ""], replicas=0)
    job.nodes["k0"].disk.clear()
    job.start([(node, 1) for node in job.nodes.values()], job.nodes.values())
    job.verify_all(job.nodes["k0"])
    job.recover()
    assert job.resumed is None


@pytest.mark.parametrize("begins", [3.3, 3.7, 124.1, 125.3, 252.6, 253.9])
def test_wait_for_keepers_ends_although_the_sum_of_its_times_is_rounded(begins: float):
    """Beyond a power of two, the end of the wait has one bit less than its beginning."""
    job = new_job(["", "", ""], replicas=0)
    job.wait(begins)
    job.nodes["k0"].disk.clear()
    job.start([(node, 1) for node in job.nodes.values()], job.nodes.values())
    job.verify_all(job.nodes["k0"])
    job.recover()
    assert job.resumed is None


def test_attempt_0_0_is_abandoned_like_any_other():
    job = new_job(["", "", ""], replicas=0)
    (attempt,) = job.rules.known
    assert attempt == Attempt(0, 0)
    part = job.nodes["k0"].disk.pop(attempt)
    job.report(job.nodes["k0"])
    job.start([(node, 1) for node in job.nodes.values()], job.nodes.values())
    job.recover()
    job.nodes["k0"].disk[attempt] = part
    job.report(job.nodes["k0"])
    assert not job.rules.known


def test_checkpoint_is_replicated_where_the_even_load_leaves_a_copy_in_its_own_domain():
    job = new_job(["", "rack", "rack"], replicas=1)
    assert [record.level for record in job.rules.known.values()] == [Level.REPLICATED]


def test_source_that_comes_back_is_named_to_ranks_that_reshard():
    job = new_job(["", "", ""], replicas=0)
    job.start([(job.nodes["k0"], 1)], [job.nodes["k0"]])
    job.recover()
    job.disconnect(job.nodes["k1"])
    job.connect(job.nodes["k1"])
    assert job.load()


@pytest.mark.parametrize(("wanted", "replicas"), [(Level.REPLICATED, 0), (Level.PERSISTED, 1)])
def test_commit_that_waits_for_an_unreachable_level_is_refused(wanted: Level, replicas: int):
    core, effects, sessions = Coordinator(), Effects(), count(1)
    keeper = KeeperInfo("k0", "http://k0")
    core.step(ConnectKeeper(next(sessions), "job", keeper, (), Disk(), "secret"), NOW, effects)
    checkpoint = LocalCheckpoint(Attempt(0, 0), 1, 1, 100, bytes(16), replicas)
    effects = Effects()
    core.step(CommitLocal(next(sessions), "job", checkpoint, "k0", wanted), NOW, effects)
    (delivery,) = effects.deliveries
    assert isinstance(delivery.message, Refused)
    assert delivery.message.refusal.reason is Reason.INVALID_ARGUMENT
