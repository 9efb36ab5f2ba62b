"""The deadline of a requested save: the earliest counts, all ranks hear it, and the late ranks are named."""

import pytest

from muster.client.save_votes import PREFIX
from muster.service.core.vocabulary.effects import SaveAsked, SaveRequested
from muster.service.core.vocabulary.events import ProbeResult, ProbeResults, RequestSave
from muster.service.core.vocabulary.model import SaveState
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN, World
from tests.unit.service.core.saves.answers import newest, say


def request(deadline: float | None = None, *, stop: bool = True, session: int = 900) -> RequestSave:
    return RequestSave(session, RUN, stop, "ann", "a drain", deadline=deadline)


def ask(world: World, deadline: float | None = None, *, stop: bool = True) -> SaveRequested:
    (answer,) = world.ask(request(deadline, stop=stop))
    assert isinstance(answer, SaveRequested)
    return answer


def late_notices(world: World) -> list[str]:
    return [notice.message for notice in world.last.notices if notice.event == "save.late"]


def test_ranks_and_newcomers_hear_how_much_time_is_left(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world, 120.0)
    assert [some(client.save_asked).seconds_left for client in clients] == [120.0, 120.0]
    world.wait(50.0)
    assert some(world.start(0).save_asked).seconds_left == pytest.approx(70.0)
    assert newest(world).deadline == pytest.approx(newest(world).asked_at + 120.0)


def test_request_without_deadline_has_none(world: World):
    (client, _) = world.ranks(prefix=PREFIX)
    ask(world)
    assert some(client.save_asked).seconds_left is None
    assert newest(world).deadline is None


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [(120.0, 30.0, 30.0), (30.0, 120.0, 30.0), (None, 30.0, 30.0), (30.0, None, 30.0)],
)
def test_earlier_of_two_deadlines_counts(
    world: World, first: float | None, second: float | None, counts: float
):
    clients = world.ranks(prefix=PREFIX)
    ask(world, first)
    answer = ask(world, second)
    assert answer.was_asked
    assert answer.save.number == 1
    assert some(answer.save.deadline) - answer.save.asked_at == pytest.approx(counts)
    heard = [some(client.save_asked) for client in clients]
    assert [(one.number, one.seconds_left) for one in heard] == [(1, counts), (1, counts)]


def test_hardly_earlier_deadline_is_not_announced_again(world: World):
    world.ranks(prefix=PREFIX)
    ask(world, 30.0)
    world.wait(0.5)
    answer = ask(world, 29.0)
    assert some(answer.save.deadline) - answer.save.asked_at == pytest.approx(30.0)
    assert [message for _, message in world.last.deliveries if isinstance(message, SaveAsked)] == []


def test_request_to_stop_keeps_the_deadline_of_the_plain_one_that_it_replaces(world: World):
    world.ranks(prefix=PREFIX)
    ask(world, 30.0, stop=False)
    answer = ask(world, 120.0)
    assert answer.save.number == 2
    assert some(answer.save.deadline) - answer.save.asked_at == pytest.approx(30.0)


def test_ranks_that_have_not_answered_are_named_at_the_deadline(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world, 60.0)
    say(clients[:1], "agree 7 1 1")
    world.wait(59.0)
    assert not newest(world).late
    world.wait(1.0)
    save = newest(world)
    assert save.state is SaveState.ASKED
    assert "had not agreed on a step: rank 1 (" in save.late
    assert "rank 0" not in save.late
    (message,) = late_notices(world)
    assert message.startswith("save 1 of run job1 was not done at its deadline: rank that had not agreed")
    assert message.endswith("; next: muster stack --missing muster/save job1")


def test_ranks_that_have_not_saved_are_named_at_the_deadline(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world, 60.0)
    say(clients, "agree 7 1 1", "agree 8 1 1")
    say(clients[1:], "done 8 1 1")
    world.wait(60.0)
    assert "rank that had not saved: rank 0 (" in newest(world).late
    say(clients[:1], "done 8 1 1")
    assert newest(world).state is SaveState.DONE
    assert newest(world).late


def test_all_ranks_are_named_where_none_has_a_save_point(world: World):
    world.ranks()
    ask(world, 60.0)
    world.wait(60.0)
    assert "rank 0 (" in newest(world).late
    assert "rank 1 (" in newest(world).late
    (message,) = late_notices(world)
    assert message.endswith("; next: muster stack job1")


def test_late_ranks_are_probed_first_and_named_with_what_they_do(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world, 60.0)
    say(clients[:1], "agree 7 1 1")
    world.tick()
    (probe,) = world.last.probes
    assert [target.rank for target in probe.processes] == [1]
    world.do(ProbeResults(RUN, (ProbeResult(1, clients[1].incarnation, "all_reduce (train.py:12)"),)))
    world.wait(2.0)
    assert "all_reduce (train.py:12)" in newest(world).late


def test_save_done_in_time_is_not_late(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world, 60.0)
    say(clients, "agree 7 1 1", "agree 8 1 1")
    say(clients, "done 8 1 1", "done 8 1 1")
    world.wait(120.0)
    assert (newest(world).state, newest(world).late) == (SaveState.DONE, "")


def test_late_ranks_are_named_once(world: World):
    world.ranks(prefix=PREFIX)
    ask(world, 10.0)
    world.wait(10.0)
    assert late_notices(world)
    first = newest(world).late
    ask(world, 5.0)
    world.wait(60.0)
    assert newest(world).late == first


@pytest.mark.parametrize("crash", list(Crash))
def test_deadline_survives_a_coordinator(world: World, crash: Crash):
    clients = world.ranks(prefix=PREFIX)
    ask(world, 60.0)
    before = newest(world)
    world.crash_next = crash
    ask(world, 60.0)
    assert newest(world) == before
    for client in clients:
        client.connect()
    world.wait(60.0)
    assert "rank 0 (" in newest(world).late


def test_ranks_may_connect_again_before_they_are_named(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world, 60.0)
    world.now += 61.0
    world.crash()
    world.wait(1.0)
    assert not newest(world).late
    for client in clients:
        client.connect()
    world.wait(5.0)
    assert "connection lost" not in newest(world).late
    assert "rank 0 (" in newest(world).late


@pytest.mark.parametrize("deadline", [-1.0, 0.0, 1e9, float("nan")])
def test_unusable_deadline_is_refused(world: World, deadline: float):
    world.ranks(prefix=PREFIX)
    refused = world.refused(request(deadline))
    assert refused.refusal.reason is Reason.INVALID_ARGUMENT
    assert "deadline" in refused.refusal.message
    assert world.coordinator.runs[RUN].saving.save is None


def test_plain_request_goes_on_when_the_request_to_stop_that_covers_it_lapses(world: World):
    world.ranks(prefix=PREFIX)
    ask(world, 60.0)
    assert ask(world, stop=False).was_asked
    world.ranks(prefix=PREFIX, generation=1)
    save = newest(world)
    assert (save.state, save.stop, save.number, save.deadline) == (SaveState.ASKED, False, 2, None)


def test_plain_request_goes_on_when_the_request_to_stop_that_replaced_it_lapses(world: World):
    world.ranks(prefix=PREFIX)
    ask(world, stop=False)
    ask(world, stop=True)
    world.ranks(prefix=PREFIX, generation=1)
    assert (newest(world).state, newest(world).stop) == (SaveState.ASKED, False)
