"""Which keepers of a run the coordinator remembers."""

from muster.service.core.vocabulary.events import Disconnected
from muster.service.core.vocabulary.local import Attachment, Attempt, ConnectKeeper, Disk, KeeperInfo, Level
from tests.support.keepers.scripted_job import RUN, Job


def remembered(job: Job) -> list[str]:
    (run,) = job.core.runs.values()
    return [keeper.info.id for keeper in run.local.keepers]


def visit(job: Job, name: str, attachment: Attachment | None) -> None:
    """Connect a keeper, and disconnect it."""
    session = job.session()
    keeper = KeeperInfo(name, f"http://{name}")
    job.step(ConnectKeeper(session, RUN, keeper, (), Disk(), "secret", attachment))
    job.step(Disconnected(session))


def test_disconnected_keeper_without_ranks_is_forgotten():
    job = Job()
    job.connect_all(generation=2)
    for number in range(20):
        visit(job, f"stranger-{number}", None)
        visit(job, f"outdated-{number}", Attachment(1, 3, frozenset({0}), 1))
    assert remembered(job) == ["k0", "k1", "k2"]


def test_disconnected_keeper_with_ranks_of_the_generation_is_remembered():
    job = Job().connect_all()
    job.lose(1)
    assert remembered(job) == ["k0", "k1", "k2"]


def test_disconnected_keeper_is_forgotten_when_another_one_takes_its_ranks():
    job = Job().connect_all()
    first = Attempt(1, 0)
    job.save(first, 10)
    assert job.level(first) is Level.REPLICATED
    for number in range(20):
        visit(job, f"successor-{number}", Attachment(1, 3, frozenset({1}), 1))
        job.lose(*({1} if number == 0 else ()))
    assert remembered(job) == ["k0", "k2", "successor-19"]
    job.connect(1)
    second = Attempt(1, 1)
    job.save(second, 20)
    assert job.level(second) is Level.REPLICATED
