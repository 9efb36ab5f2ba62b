"""A save that all ranks are asked for: counted once, kept, told to all, and ended by all."""

from collections.abc import Callable

import pytest

from muster.client.save_votes import PREFIX
from muster.service.core.vocabulary.effects import Effects, SaveAsked, SaveRequested
from muster.service.core.vocabulary.events import Arrival, Arrive, CancelSave, Goodbye, Hello, RequestSave
from muster.service.core.vocabulary.model import Outcome, SaveState
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_client import Client
from tests.support.world.core_world import RUN, World
from tests.unit.service.core.saves.answers import newest, say


def ask(world: World, *, stop: bool = False, reason: str = "", by: str = "ann") -> SaveRequested:
    (answer,) = world.ask(RequestSave(world.new_session(), RUN, stop, by, reason))
    assert isinstance(answer, SaveRequested)
    return answer


def cancel(world: World, reason: str = "") -> object:
    (answer,) = world.ask(CancelSave(world.new_session(), RUN, reason))
    return answer


def outcomes(client: Client) -> list[Outcome]:
    return [decision.outcome for decision in client.memberships[PREFIX].heard]


def test_pending_save_is_announced_to_all_and_to_newcomers(world: World):
    zero, _ = world.ranks()
    answer = ask(world, stop=True, reason="a drain")
    assert (answer.was_asked, answer.save.state, answer.save.number) == (False, SaveState.ASKED, 1)
    expected = SaveAsked(1, 0, stop=True, reason="asked for by ann: a drain")
    assert [client.save_asked for client in world.clients] == [expected, expected]
    heard = [client.save_asked for client in [world.start(0), zero]]
    assert heard == [expected, expected]
    stream = world.open_relay_stream(world.start(2, connect=False))
    assert stream.clients[2].save_asked == expected


def test_it_is_counted_once_however_often_it_is_asked_for(world: World):
    world.ranks()
    first = ask(world)
    again = ask(world, by="bob")
    assert (again.was_asked, again.save) == (True, first.save)
    # Training is to end as well: that is more than was asked for.
    stop = ask(world, stop=True)
    assert (stop.was_asked, stop.save.number, stop.save.stop) == (False, 2, True)
    assert ask(world).was_asked


def test_greatest_step_is_agreed_on_and_all_end_it(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world)
    say(clients, "agree 9 1 0", "agree 12 1 0")
    assert (newest(world).state, newest(world).step) == (SaveState.AGREED, 12)
    say(clients, "done 12 1 0", "done 12 1 0")
    done = newest(world)
    assert (done.state, done.step, done.ended_at) == (SaveState.DONE, 12, world.instant.wall)
    zero = clients[0]
    zero.reconnect()
    assert some(zero.save_asked).withdrawn
    assert ask(world).save.number == 2


def test_agreement_on_an_older_save_request_ends_only_that_request(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world)
    say(clients, "agree 9 1 0", "agree 12 1 0")
    ask(world, stop=True)
    say(clients, "done 12 1 0", "done 12 1 0")
    assert (newest(world).number, newest(world).state) == (2, SaveState.ASKED)
    say(clients, "agree 20 2 1", "agree 20 1 0")
    say(clients, "done 20 2 1", "done 20 2 1")
    assert newest(world).state is SaveState.DONE


@pytest.mark.parametrize(
    "junk", ["", "agree", "agree x 1 0", "leave 9 1 0", "done 9 1 0", "agree -1 1 0", f"agree {2**63} 1 0"]
)
def test_save_stays_pending_after_an_invalid_vote_and_can_be_requested_again(world: World, junk: str):
    clients = world.ranks(prefix=PREFIX)
    ask(world)
    say(clients, "agree 9 1 0", junk)
    assert newest(world).state is SaveState.ASKED
    assert not ask(world).was_asked
    assert newest(world).since == 1


def test_rank_death_fails_the_vote_and_keeps_the_save_pending_for_the_next_generation(world: World):
    zero, one = world.ranks(prefix=PREFIX)
    ask(world)
    say([zero], "agree 9 1 0")
    one.die()
    world.wait(11)
    assert outcomes(zero) == [Outcome.MEMBER_LOST]
    assert newest(world).state is SaveState.ASKED
    again = world.ranks(prefix=PREFIX, generation=1)
    assert [some(client.save_asked).number for client in again] == [1, 1]
    say(again, "agree 5 1 0", "agree 4 1 0")
    assert newest(world).step == 5


@pytest.mark.parametrize("restart", [lambda world: world.ranks(generation=1), lambda world: world.ranks()])
def test_new_processes_must_agree_again(world: World, restart: Callable[[World], object]):
    clients = world.ranks(prefix=PREFIX)
    ask(world)
    say(clients, "agree 9 1 0", "agree 9 1 0")
    for client in clients:
        world.do(Goodbye(some(client.session)))
    restart(world)
    assert (newest(world).state, newest(world).step) == (SaveState.ASKED, None)


def test_withdrawn_save_ends_its_barrier(world: World):
    zero, one = world.ranks(prefix=PREFIX)
    ask(world)
    say([zero], "agree 9 1 0")
    answer = cancel(world, "the drain is off")
    assert isinstance(answer, SaveRequested)
    assert answer.save.state is SaveState.WITHDRAWN
    assert outcomes(zero) == [Outcome.ABORTED]
    assert some(one.save_asked).withdrawn
    # Its word was under way.
    say([one], "agree 9 1 0")
    say([one], "agree 9 1 0")
    assert outcomes(one) == [Outcome.ABORTED, Outcome.ABORTED]


def test_agreed_save_is_done_even_if_its_request_is_withdrawn(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world)
    say(clients, "agree 9 1 0", "agree 9 1 0")
    cancel(world)
    say(clients, "done 9 1 0", "done 9 1 0")
    assert outcomes(clients[0]) == [Outcome.RELEASED, Outcome.RELEASED]
    assert newest(world).state is SaveState.DONE


def test_withdrawal_keeps_the_step_that_was_agreed_on(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world)
    say(clients, "agree 9 1 0", "agree 9 1 0")
    ask(world, stop=True)
    cancel(world)
    say(clients, "done 9 1 0", "done 9 1 0")
    assert outcomes(clients[0]) == [Outcome.RELEASED, Outcome.RELEASED]


def test_reconnected_rank_learns_of_a_withdrawal(world: World):
    zero, _ = world.ranks()
    ask(world)
    zero.lose_connection()
    cancel(world)
    assert not some(zero.save_asked).withdrawn
    zero.connect()
    assert some(zero.save_asked).withdrawn


def test_where_all_ranks_have_the_signal_one_asks(world: World):
    clients = world.ranks(prefix=PREFIX)

    def notice() -> SaveRequested:
        (answer,) = world.ask(RequestSave(world.new_session(), RUN, True, "rank", "SIGTERM", known=0))
        assert isinstance(answer, SaveRequested)
        return answer

    assert not notice().was_asked
    say(clients, "agree 9 1 1", "agree 9 1 1")
    say(clients, "done 9 1 1", "done 9 1 1")
    # It comes late, and its rank has saved for the other's.
    assert notice().was_asked
    assert newest(world).state is SaveState.DONE
    # The run has stopped: the save that stopped it covers whatever is asked for now.
    assert ask(world, stop=True).was_asked


def test_save_at_different_steps_is_not_done(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world)
    say(clients, "agree 9 1 0", "agree 9 1 0")
    say(clients, "done 9 1 0", "done 10 1 0")
    assert newest(world).state is SaveState.AGREED
    assert not ask(world).was_asked


def test_arrival_that_is_refused_writes_nothing(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world)
    say(clients, "agree 9 1 0", "agree 9 1 0")
    say(clients, "done 9 1 0", "done 9 1 0")
    for client in clients:
        client.goodbye()
    world.crash()
    # A relay's stream does not count as use of its run. The run may have been forgotten meanwhile.
    stream = world.new_session()
    world.do(Hello(stream, RUN, 0, (), "node-0 (pid 70)"))
    world.do(Arrive(stream, PREFIX, 1, 10.0, (Arrival(0),)))
    assert world.last.records == []


def test_restart_hears_no_release_again(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world)
    say(clients, "agree 9 1 0", "agree 9 1 0")
    say(clients, "done 9 1 0", "done 9 1 0")
    done = newest(world)
    world.crash()
    world.now += 100.0
    for client in clients:
        client.connect()
    membership = clients[0].memberships[PREFIX]
    membership.position = 1
    say(clients[:1], "done 9 1 0")
    assert newest(world) == done


def test_withdrawal_without_a_request_is_refused(world: World):
    world.ranks()
    refused = world.refused(CancelSave(world.new_session(), RUN, ""))
    assert refused.refusal.reason is Reason.NO_SAVE_ASKED
    ask(world)
    cancel(world)
    assert world.refused(CancelSave(world.new_session(), RUN, "")).refusal.reason is Reason.NO_SAVE_ASKED


def test_restarted_coordinator_has_forgotten_nothing(world: World):
    clients = world.ranks(prefix=PREFIX)
    ask(world, stop=True, reason="a drain")
    say(clients, "agree 9 1 1", "agree 12 1 1")
    before = newest(world)
    world.crash()
    assert newest(world) == before
    for client in clients:
        client.connect()
    say(clients, "done 12 1 1", "done 12 1 1")
    assert newest(world).state is SaveState.DONE


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (RequestSave(900, "nobody", False, "ann", ""), Reason.RUN_NOT_FOUND),
        (RequestSave(900, RUN, False, "", ""), Reason.INVALID_ARGUMENT),
        (RequestSave(900, RUN, False, "a\0b", ""), Reason.INVALID_ARGUMENT),
        (RequestSave(900, RUN, False, "ann", "x" * 100_000), Reason.INVALID_ARGUMENT),
        (CancelSave(900, "nobody", ""), Reason.RUN_NOT_FOUND),
    ],
)
def test_invalid_save_request_or_withdrawal_is_refused(world: World, event: RequestSave, reason: Reason):
    world.ranks()
    assert world.refused(event).refusal.reason is reason
    assert world.coordinator.runs[RUN].saving.save is None


def test_log_names_the_requester_and_the_result_of_a_save(world: World):
    clients = world.ranks(prefix=PREFIX)
    said: list[str] = []

    def note(effects: Effects) -> None:
        said.extend(notice.message for notice in effects.notices if notice.event.startswith("save."))

    ask(world, reason="a drain")
    note(world.last)
    for word in ("agree 9 1 0", "done 9 1 0"):
        for client in clients:
            client.arrive(PREFIX, payload=word.encode())
            note(world.last)
        world.now += 2.0
    assert said == [
        f"save 1 of run {RUN} was asked for by ann: a drain",
        f"save 1 of run {RUN} was agreed on: all ranks save at step 9",
        f"save 1 of run {RUN} was done by all ranks at step 9, 2 s after it was asked",
    ]
