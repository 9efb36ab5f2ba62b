"""What is folded, what is not, and to whom the coordinator's words go."""

import pytest

from muster.relay.line import PATIENCE, STEPS_PATIENCE
from muster.relay.refusals import info_of
from muster.v1 import common_pb2 as pb_common
from muster.v1 import session_pb2 as pb
from muster.v1.insight_pb2 import Inspect, Inspected, Report
from tests.support.world.relay_bench import WELCOME, Below, House, decision


@pytest.fixture
def house() -> House:
    return House()


def ranks_of(request: pb.ConnectRequest) -> list[int]:
    return [arrival.rank for arrival in request.arrive.arrivals]


def reason(below: Below) -> str:
    assert below.over
    assert below.ending is not None
    return str(info_of(below.ending).reason)


# ---------------------------------------------------------------------- arrivals


def test_the_arrivals_of_a_node_are_one_message_when_the_last_has_come(house: House):
    workers = house.workers(0, 1, 2)
    for rank, worker in enumerate(workers):
        assert house.above.take() == []
        worker.arrive(rank)
    (said,) = house.above.take()
    assert ranks_of(said) == [0, 1, 2]
    assert (house.counts.arrivals, house.counts.messages) == (3, 1)


def test_those_who_are_there_do_not_wait_for_a_straggler_longer_than_the_patience(house: House):
    workers = house.workers(0, 1, 2)
    workers[2].arrive(2)
    workers[0].arrive(0)
    ((seconds, _),) = house.timers.waiting
    assert seconds == PATIENCE
    house.timers.fire()
    (said,) = house.above.take()
    assert ranks_of(said) == [2, 0]
    workers[1].arrive(1)
    (said,) = house.above.take()
    assert ranks_of(said) == [1], "it is the last, and nobody is left to wait for"
    assert not house.timers.waiting


def test_a_vote_goes_at_once_with_what_came_before_it(house: House):
    workers = house.workers(0, 1, 2)
    workers[1].arrive(1)
    workers[0].arrive(0, failure="disk full")
    (said,) = house.above.take()
    assert ranks_of(said) == [1, 0]
    assert said.arrive.arrivals[1].failure == "disk full"


def test_report_of_each_rank_goes_on_with_its_arrival(house: House):
    workers = house.workers(0, 1, 2)
    told = pb_common.WriteReport(step=7, bytes=10, write_ms=1_500, commits=True)
    workers[0].arrive(0, write=told)
    workers[1].arrive(1)
    workers[2].arrive(2, write=pb_common.WriteReport(step=8))
    (said,) = house.above.take()
    reports = [arrival.write if arrival.HasField("write") else None for arrival in said.arrive.arrivals]
    assert reports == [told, None, pb_common.WriteReport(step=8)]


def test_reports_of_a_node_that_are_too_much_for_one_message_are_several(house: House):
    told = pb_common.WriteReport(step=2**63 - 1, bytes=2**47, write_ms=1_000)
    in_one = WELCOME.max_payload_bytes // told.ByteSize()
    ranks = list(range(in_one + 1))
    for rank, worker in enumerate(house.workers(*ranks)):
        worker.arrive(rank, write=told)
    assert [ranks_of(said) for said in house.above.take()] == [ranks[:-1], ranks[-1:]]


def test_what_is_said_again_goes_at_once_and_with_its_own_times(house: House):
    workers = house.workers(0, 1, 2)
    workers[0].arrive(0, waited_ms=5_000)
    (said,) = house.above.take()
    assert (ranks_of(said), said.arrive.waited_ms) == ([0], 5_000)


def test_arrivals_with_other_timeouts_or_at_other_barriers_are_messages_of_their_own(house: House):
    workers = house.workers(0, 1, 2)
    workers[0].arrive(0, timeout_ms=1_000)
    workers[1].arrive(1, timeout_ms=2_000)
    workers[2].arrive(2, sequence=1)
    house.timers.fire()
    said = house.above.take()
    assert [(one.arrive.sequence, one.arrive.timeout_ms, ranks_of(one)) for one in said] == [
        (0, 1_000, [0]),
        (0, 2_000, [1]),
        (1, 1_000, [2]),
    ]


def test_who_arrives_again_is_named_once_in_a_message_and_both_times(house: House):
    workers = house.workers(0, 1)
    workers[0].arrive(0)
    workers[0].arrive(0, failure="after all")
    said = house.above.take()
    assert [ranks_of(one) for one in said] == [[0], [0]]
    assert said[1].arrive.arrivals[0].failure == "after all"


def test_who_leaps_between_barriers_spoils_nobodys_message(house: House):
    """A message that names a rank twice is refused for all whom it names."""
    workers = house.workers(0, 1)
    for sequence in (5, 6, 5):
        workers[0].arrive(0, sequence=sequence)
    workers[1].arrive(1, sequence=5)
    house.timers.fire()
    for said in house.above.take():
        assert len(set(ranks_of(said))) == len(ranks_of(said))


def test_the_next_process_of_a_rank_inherits_no_words(house: House):
    """Invariant 12 (the coordinator assigns the sequence): it was not there, and must not be released."""
    first = house.worker(0)
    first.say(join_group=pb.JoinGroup(prefix="checkpoint", world_size=2))
    first.arrive(0)
    house.worker(1)
    first.guest.lost()
    house.worker(0, "the next")
    house.above.welcome()
    assert house.above.kinds() == ["enter"]


def test_the_words_of_who_is_sent_away_go_nowhere(house: House):
    workers = house.workers(0, 1)
    workers[0].arrive(0)
    house.above.hear(refusal=pb.Refusal(code=7, message="evicted", rank=0))
    house.worker(0, "the next")
    house.timers.fire()
    assert house.above.kinds() == ["enter"]


def test_many_newcomers_are_named_in_messages_of_a_size(house: House):
    for rank in range(600):
        below = house.stream()
        one = pb.Process(rank=rank, incarnation="i" * 1_000, host="h" * 1_000)
        below.say(hello=pb.Hello(run_id="job", processes=[one], protocol_version=1))
    house.above.welcome()
    said = house.above.take()
    assert [request.WhichOneof("message") for request in said] == ["enter"] * 3
    assert max(request.ByteSize() for request in said) < 2**19 + 10_000
    house.above.let_in(*range(1, 1 + len(said[0].enter.processes)))
    assert house.counts.processes == len(said[0].enter.processes)


def test_payloads_of_a_node_that_are_too_much_for_one_message_are_several(house: House):
    workers = house.workers(0, 1, 2)
    for rank, worker in enumerate(workers):
        worker.arrive(rank, payload=b"x" * 60)
    assert [ranks_of(one) for one in house.above.take()] == [[0], [1], [2]]


def test_a_group_that_only_some_have_joined_waits_for_no_others(house: House):
    workers = house.workers(0, 1)
    workers[0].say(join_group=pb.JoinGroup(prefix="eval", world_size=1))
    house.timers.fire()
    house.above.hear(group_joined=pb.GroupJoined(prefix="eval", positions=[pb.Position(rank=0, sequence=4)]))
    house.above.take()
    workers[0].arrive(0, sequence=4, prefix="eval")
    assert [ranks_of(one) for one in house.above.take()] == [[0]]


# ---------------------------------------------------------------------- questions


def test_a_question_goes_to_those_whom_it_names_and_an_answer_goes_on_at_once(house: House):
    workers = house.workers(0, 1, 2)
    workers[2].arrive(2)
    house.above.hear(inspect=Inspect(question=7), ranks=[0, 1])
    assert [[one.inspect.question for one in worker.take()] for worker in workers] == [[7], [7], []]
    workers[1].say(inspected=Inspected(question=7, rank=1, report=Report(cpu_ms=3)))
    (said,) = house.above.take()
    assert (said.inspected.question, said.inspected.rank, said.inspected.report.cpu_ms) == (7, 1, 3)
    assert house.timers.waiting, "the arrival still waits for the others"


def test_the_steps_of_a_node_are_told_together_a_moment_later(house: House):
    workers = house.workers(0, 1)
    for number in (7, 8):
        for rank, worker in enumerate(workers):
            worker.say(steps=pb.Steps(steps=[pb.RankStep(rank=rank, step=number)]))
    workers[0].say(steps=pb.Steps(steps=[pb.RankStep(rank=1, step=99), pb.RankStep(rank=5, step=99)]))
    ((seconds, _),) = house.timers.waiting
    assert seconds == STEPS_PATIENCE
    assert house.above.take() == []
    house.timers.fire()
    (said,) = house.above.take()
    assert [(one.rank, one.step) for one in said.steps.steps] == [(0, 8), (1, 8)]


def test_a_step_is_not_told_of_the_next_process_of_its_rank(house: House):
    zero, _ = house.workers(0, 1)
    zero.say(steps=pb.Steps(steps=[pb.RankStep(rank=0, step=7)]))
    zero.guest.lost()
    house.above.take()
    house.timers.fire()
    assert house.above.take() == []


def test_nobody_answers_for_another_rank(house: House):
    zero, _ = house.workers(0, 1)
    zero.say(inspected=Inspected(question=7, rank=1))
    zero.say(inspected=Inspected(question=7, rank=99))
    assert house.above.take() == []


# ---------------------------------------------------------------------- entering and joining


def test_who_comes_while_the_coordinator_is_searched_enters_with_the_others(house: House):
    house.worker(0)
    house.worker(1)
    assert house.above.take() == []
    house.above.welcome()
    (said,) = house.above.take()
    assert [one.rank for one in said.enter.processes] == [0, 1]


def test_the_joins_of_a_node_are_one_message_and_each_hears_its_own_position(house: House):
    workers = [house.worker(rank) for rank in range(2)]
    house.above.welcome()
    house.above.let_in(7, 8)
    house.above.take()
    for worker in workers:
        worker.take()
        worker.say(join_group=pb.JoinGroup(prefix="checkpoint", world_size=2))
    house.timers.fire()
    (said,) = house.above.take()
    assert sorted(said.join_group.ranks) == [0, 1]
    positions = [pb.Position(rank=0, sequence=3), pb.Position(rank=1, sequence=5)]
    house.above.hear(group_joined=pb.GroupJoined(prefix="checkpoint", positions=positions))
    for worker, sequence in zip(workers, (3, 5), strict=True):
        (told,) = worker.take()
        assert [one.sequence for one in told.group_joined.positions] == [sequence]


def test_a_join_is_said_before_the_arrival_that_follows_it_unanswered(house: House):
    """As a session does that has connected again."""
    worker = house.worker(0)
    house.above.welcome()
    house.above.let_in(7)
    house.above.take()
    worker.say(join_group=pb.JoinGroup(prefix="checkpoint", world_size=2))
    worker.arrive(0, waited_ms=3)
    assert house.above.kinds() == ["join_group", "arrive"]


def test_a_process_that_is_refused_ends_no_place_but_its_own(house: House):
    first, second = house.worker(0), house.worker(1)
    house.above.welcome()
    refusal = pb.Refusal(code=7, message="evicted", rank=0)
    house.above.hear(entered=pb.Entered(entries=[pb.Entry(refusal=refusal), pb.Entry(ordinal=9)]))
    assert first.over
    assert first.ending is not None
    assert first.ending.message == "evicted"
    assert not first.ending.HasField("rank"), "a worker's own stream is meant as a whole"
    (told,) = second.take()
    assert list(told.welcome.ordinals) == [9]
    assert house.counts.processes == 1


def test_a_worker_that_comes_back_takes_its_own_place_and_ends_its_old_stream(house: House):
    (old,) = house.workers(0)
    new = house.worker(0)
    assert reason(old) == "SESSION_REPLACED"
    house.timers.fire()
    (said,) = house.above.take()
    assert [one.incarnation for one in said.enter.processes] == ["life-0"]
    house.above.let_in(100)
    assert new.kinds() == ["welcome"]
    assert len(house.aboves) == 1


def test_a_second_process_of_a_rank_has_a_line_of_its_own(house: House):
    house.workers(0, 1)
    house.worker(0, "its checkpoint's process")
    assert len(house.aboves) == 2
    house.worker(1, "its checkpoint's process")
    assert len(house.aboves) == 2


def test_runs_have_lines_of_their_own(house: House):
    house.worker(0)
    house.worker(0, run_id="another")
    assert [above.line.run_id for above in house.aboves] == ["job", "another"]


# ---------------------------------------------------------------------- what the coordinator says


def test_a_decision_goes_to_those_whom_it_names_in_its_own_bytes(house: House):
    workers = house.workers(0, 1, 2)
    house.above.hear(**decision(), ranks=[0, 2])
    assert [worker.kinds() for worker in workers] == [["decision"], [], ["decision"]]


def test_a_closing_that_names_nobody_goes_to_all(house: House):
    workers = house.workers(0, 1)
    house.above.hear(closed={"by": "an operator"})
    assert [worker.kinds() for worker in workers] == [["closed"], ["closed"]]


def test_what_was_meant_for_the_process_before_does_not_reach_the_next_of_its_rank(house: House):
    """Invariant 12 (the coordinator assigns the sequence): a release is for those who arrived themselves."""
    workers = house.workers(0, 1)
    workers[0].guest.lost()
    newcomer = house.worker(0, "another life")
    house.timers.fire()
    house.above.hear(**decision(), ranks=[0, 1])
    position = pb.Position(rank=0, sequence=0)
    house.above.hear(group_joined=pb.GroupJoined(prefix="checkpoint", positions=[position]))
    refusal = pb.Refusal(code=3, message="too late", rank=0, prefix="checkpoint")
    house.above.hear(refusal=refusal)
    assert newcomer.take() == []
    house.above.let_in(500)
    assert newcomer.kinds() == ["welcome"]


def test_an_eviction_ends_one_place(house: House):
    workers = house.workers(0, 1)
    house.above.hear(refusal=pb.Refusal(code=7, message="rank 0 was evicted", rank=0))
    assert workers[0].over
    assert workers[0].kinds() == ["refusal"]
    workers[1].arrive(1)
    assert [ranks_of(one) for one in house.above.take()] == [[1]]


def test_a_refused_arrival_is_told_to_its_rank_alone(house: House):
    workers = house.workers(0, 1)
    house.above.hear(refusal=pb.Refusal(code=3, message="ahead", rank=1, prefix="checkpoint", sequence=9))
    assert [worker.kinds() for worker in workers] == [[], ["refusal"]]
    assert not workers[1].over


def test_what_is_refused_to_all_ends_all_with_its_words(house: House):
    workers = house.workers(0, 1)
    house.above.hear(refusal=pb.Refusal(code=10, message="the run was forgotten"))
    for worker in workers:
        assert worker.kinds() == ["refusal"]
        assert worker.ending is not None
        assert worker.ending.message == "the run was forgotten"
    assert house.counts.processes == 0


# ---------------------------------------------------------------------- parting


def test_who_is_lost_parts_alone_and_what_it_said_before_counts(house: House):
    workers = house.workers(0, 1, 2)
    workers[0].arrive(0)
    workers[0].guest.lost()
    arrive, part = house.above.take()
    assert ranks_of(arrive) == [0]
    assert list(part.part.ranks) == [0]
    assert not part.part.HasField("goodbye")
    assert not workers[1].over


def test_nobody_waits_for_who_has_parted(house: House):
    workers = house.workers(0, 1)
    workers[1].guest.lost()
    house.above.take()
    workers[0].arrive(0)
    assert [ranks_of(one) for one in house.above.take()] == [[0]]


def test_a_goodbye_ends_its_stream_when_the_coordinator_has_heard_it(house: House):
    workers = house.workers(0, 1)
    workers[0].say(goodbye=pb.Goodbye(reason="done"))
    (said,) = house.above.take()
    assert said.part.goodbye.reason == "done"
    assert not workers[0].over, "it is not durable yet"
    house.above.hear(parted=pb.Parted(ranks=[0]))
    assert (workers[0].over, workers[0].ending) == (True, None)


def test_a_goodbye_that_the_coordinator_may_not_have_heard_is_to_be_said_again(house: House):
    (worker,) = house.workers(0)
    worker.say(goodbye=pb.Goodbye(reason="done"))
    house.above.line.end(pb.Refusal(code=14, message="lost"))
    assert worker.over
    assert worker.ending is not None


def test_the_last_goodbye_ends_the_line_after_it_was_heard(house: House):
    (worker,) = house.workers(0)
    worker.say(goodbye=pb.Goodbye())
    assert house.above.kinds() == ["part", "goodbye"]
    house.above.hear(parted=pb.Parted(ranks=[0]))
    assert worker.over
    house.worker(0, "the next")
    assert len(house.aboves) == 2, "nobody enters where the goodbye was said"


def test_who_gives_up_before_the_coordinator_is_found_leaves_nothing(house: House):
    worker = house.worker(0)
    worker.guest.lost()
    assert house.above.line.ended
    assert house.above.take() == []


def test_who_is_lost_before_it_was_let_in_has_entered_and_parted(house: House):
    house.workers(1)
    worker = house.worker(0)
    house.timers.fire()
    worker.guest.lost()
    assert house.above.kinds() == ["enter", "part"]
    house.above.let_in(7)
    house.above.hear(parted=pb.Parted(ranks=[0]))
    assert house.counts.processes == 1


def test_a_line_that_breaks_ends_all_its_streams_and_nothing_is_kept(house: House):
    workers = house.workers(0, 1)
    workers[0].arrive(0)
    above = house.above
    above.line.end(pb.Refusal(code=14, message="lost"))
    assert all(worker.over for worker in workers)
    assert [one.WhichOneof("message") for one in workers[0].take()] == [], "only the status says it"
    house.timers.fire()
    assert above.take() == []
    house.worker(0)
    assert len(house.aboves) == 2


@pytest.mark.parametrize(
    "nonsense",
    [
        {"entered": pb.Entered(entries=[pb.Entry(ordinal=1)])},
        {"parted": pb.Parted(ranks=[0])},
        {"drain": pb.Drain(retry_after_ms=1)},
    ],
)
def test_answers_that_ignore_answer_for_end_the_line_and_not_the_relay(
    house: House, nonsense: dict[str, object]
):
    workers = house.workers(0, 1)
    house.above.hear(**nonsense)
    assert [reason(worker) for worker in workers] == ["UPSTREAM_LOST"] * 2


def test_bytes_that_are_no_message_end_the_line(house: House):
    (worker,) = house.workers(0)
    house.above.line.hear(b"\xff\xff")
    assert reason(worker) == "UPSTREAM_LOST"
