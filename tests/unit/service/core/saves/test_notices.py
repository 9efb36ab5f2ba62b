"""A repeated notice is the request that it led to first, and DrainNode asks the runs on its node alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.client.save_votes import PREFIX
from muster.service.core.saves.notices import MAX_NOTICES, moved, request_of, with_notice, without_request
from muster.service.core.vocabulary.effects import DrainedRun, NodeDrained, SaveRequested
from muster.service.core.vocabulary.events import (
    CancelSave,
    DrainNode,
    Hello,
    JoinGroup,
    ProcessInfo,
    RequestSave,
)
from muster.service.core.vocabulary.model import HandledNotice, SaveState
from muster.service.core.vocabulary.refusal import Reason
from tests.support.world.core_world import RUN, TTL, World
from tests.unit.service.core.saves.answers import newest, save


def ask(world: World, notice: str = "", *, stop: bool = True) -> SaveRequested:
    (answer,) = world.ask(RequestSave(900, RUN, stop, "watcher", "spot", notice=notice))
    assert isinstance(answer, SaveRequested)
    return answer


def drain(
    world: World, node: str, *runs: str, notice: str = "n1", stop: bool = True
) -> tuple[DrainedRun, ...]:
    (answer,) = world.ask(DrainNode(900, node, runs or (RUN,), stop, "watcher", "spot", 60.0, notice))
    assert isinstance(answer, NodeDrained)
    return answer.runs


def begin(world: World, run: str, rank: int, node: str = "", host: str = "pod-1") -> None:
    process = ProcessInfo(rank, f"{run}-{rank}", host, 7, node_name=node)
    world.do(Hello(world.new_session(), run, 0, (process,)))


# ---------------------------------------------------------------------- the same notice


def test_repeated_notice_is_the_pending_request(world: World):
    world.ranks(prefix=PREFIX)
    assert not ask(world, "n1").was_asked
    assert [ask(world, "n1").save.number for _ in range(3)] == [1, 1, 1]


def test_several_notices_are_one_save(world: World):
    world.ranks(prefix=PREFIX)
    answers = [ask(world, f"n{number}") for number in range(5)]
    assert [(one.save.number, one.was_asked) for one in answers] == [(1, False), *[(1, True)] * 4]
    assert {one.number for one in newest(world).notices} == {1}


def test_repeated_notice_asks_for_nothing_when_its_save_is_done(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world, "n1", stop=False)
    save(clients, stop=False, number=1)
    answer = ask(world, "n1", stop=False)
    assert (answer.was_asked, answer.save.number, answer.save.state) == (True, 1, SaveState.DONE)
    assert ask(world, "n2", stop=False).save.number == 2
    assert ask(world, "n1", stop=False).was_asked


def test_repeated_notice_asks_for_nothing_when_its_save_was_withdrawn(world: World):
    world.ranks(prefix=PREFIX)
    ask(world, "n1")
    world.do(CancelSave(900, RUN, "the node stays"))
    assert ask(world, "n1").save.state is SaveState.WITHDRAWN
    assert not ask(world, "n2").was_asked


def test_repeated_notice_asks_again_when_its_save_lapsed(world: World):
    world.ranks(prefix=PREFIX)
    ask(world, "n1")
    world.ranks(prefix=PREFIX, generation=1)
    assert newest(world).state is SaveState.LAPSED
    answer = ask(world, "n1")
    assert (answer.was_asked, answer.save.number, answer.save.generation) == (False, 2, 1)


def test_repeated_notice_asks_again_when_the_ranks_failed_to_agree(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world, "n1")
    ask(world, "n2")
    clients[0].arrive(PREFIX, failure="it alone has restarted")
    clients[1].arrive(PREFIX, payload=b"agree 9 1 1")
    answer = ask(world, "n1")
    assert (answer.was_asked, answer.save.number, answer.save.stop) == (False, 2, True)
    assert ask(world, "n2").was_asked


def test_job_that_was_stopped_for_a_notice_is_not_stopped_for_it_again(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world, "n1")
    save(clients, stop=True, number=1)
    world.ranks(prefix=PREFIX, generation=1)
    assert ask(world, "n1").was_asked
    assert not ask(world, "n2").was_asked


def test_notices_survive_a_coordinator(world: World):
    world.ranks(prefix=PREFIX)
    ask(world, "n1")
    before = newest(world)
    world.crash()
    assert newest(world) == before


@pytest.mark.parametrize("notice", ["x" * 100_000, "a\nb"])
def test_unusable_notice_is_refused(world: World, notice: str):
    world.ranks(prefix=PREFIX)
    refused = world.refused(RequestSave(900, RUN, True, "watcher", "", notice=notice))
    assert refused.refusal.reason is Reason.INVALID_ARGUMENT
    assert "notice_id" in refused.refusal.message


@given(st.lists(st.integers(0, 2_000), max_size=3_000))
@settings(max_examples=20)
def test_newest_notices_are_kept(numbers: list[int]):
    notices: tuple[HandledNotice, ...] = ()
    for request, number in enumerate(numbers):
        notices = with_notice(notices, f"n{number}", request)
    assert len(notices) <= MAX_NOTICES
    latest = {f"n{number}": request for request, number in enumerate(numbers)}
    newest_first = sorted(latest, key=lambda one: latest[one], reverse=True)
    assert [one.id for one in reversed(notices)] == newest_first[:MAX_NOTICES]
    assert all(request_of(notices, one.id) == one.number == latest[one.id] for one in notices)


def test_notices_of_a_request_move_or_go_together():
    notices = (HandledNotice("a", 1), HandledNotice("b", 2), HandledNotice("c", 1))
    assert [one.number for one in moved(notices, 1, 3)] == [3, 2, 3]
    assert [one.id for one in without_request(notices, 1)] == ["b"]
    assert with_notice(notices, "", 4) == notices


# ---------------------------------------------------------------------- nodes


def test_drain_asks_the_runs_on_the_node_alone(world: World):
    begin(world, "job1", 0, node="node-1")
    begin(world, "job2", 0, node="node-2")
    begin(world, "job3", 0, node="node-1")
    begin(world, "job4", 0, host="node-1")
    drained = drain(world, "node-1", "job1", "job2", "job4", "unknown")
    assert [(one.run_id, one.was_asked, one.save.stop) for one in drained] == [
        ("job1", False, True),
        ("job4", False, True),
    ]
    assert world.coordinator.runs["job2"].saving.save is None
    assert world.coordinator.runs["job3"].saving.save is None


def test_repeated_drain_changes_nothing(world: World):
    begin(world, RUN, 0, node="node-1")
    (first,) = drain(world, "node-1")
    (second,) = drain(world, "node-1")
    assert second == first._replace(was_asked=True)
    assert not [record for record in world.last.records if "Save" in type(record).__name__]


def test_node_name_counts_and_not_the_host(world: World):
    begin(world, RUN, 0, node="node-1", host="pod-1")
    assert drain(world, "pod-1") == ()
    assert drain(world, "node") == ()
    assert drain(world, "NODE-1") == ()


def test_node_that_all_ranks_have_left_is_not_drained(world: World):
    begin(world, RUN, 0, node="node-1")
    begin(world, RUN, 1, node="node-2")
    world.evict(0)
    assert drain(world, "node-1") == ()
    assert world.coordinator.runs[RUN].saving.save is None


def test_node_name_survives_a_coordinator(world: World):
    session = world.new_session()
    world.do(Hello(session, RUN, 0, (ProcessInfo(0, "a", "pod-1", 7, node_name="node-1"),)))
    world.do(JoinGroup(session, PREFIX, 2))
    world.crash()
    assert len(drain(world, "node-1")) == 1
    refused = world.refused(DrainNode(900, "node-2", (RUN,), True, "ann", ""))
    assert refused.refusal.reason is Reason.RANKS_RECONNECT
    world.wait(TTL)
    assert drain(world, "node-2") == ()


def test_notice_for_one_run_leaves_the_others_on_the_node_alone(world: World):
    begin(world, RUN, 0, node="node-1")
    begin(world, "job2", 0, node="node-1")
    drain = DrainNode(900, "node-1", (RUN, "job2"), True, "watcher", "", notice="n1", only_run="job2")
    (answer,) = world.ask(drain)
    assert isinstance(answer, NodeDrained)
    assert [one.run_id for one in answer.runs] == ["job2"]
    assert world.coordinator.runs[RUN].saving.save is None


def test_unusable_run_of_a_notice_is_refused(world: World):
    refused = world.refused(DrainNode(900, "node-1", (RUN,), True, "ann", "", only_run="a\nb"))
    assert refused.refusal.reason is Reason.INVALID_ARGUMENT
    assert "run_id" in refused.refusal.message


@pytest.mark.parametrize("name", ["", "x" * 100_000, "node\n1"])
def test_unusable_node_name_is_refused(world: World, name: str):
    begin(world, RUN, 0, node="node-1")
    refused = world.refused(DrainNode(900, name, (RUN,), True, "ann", ""))
    assert refused.refusal.reason is Reason.INVALID_ARGUMENT
    assert "node_name" in refused.refusal.message
