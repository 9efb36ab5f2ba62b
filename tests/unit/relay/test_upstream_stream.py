"""Which messages an upstream stream folds, and which ranks get an answer."""

import pytest

from muster.relay.refusals import info_of
from muster.relay.upstream_stream import FOLD_WINDOW, STEPS_WINDOW
from muster.v1 import common_pb2 as pb_common
from muster.v1 import session_pb2 as pb
from muster.v1.insight_pb2 import Inspect, Inspected, Report
from tests.support.world.relay_bench import WELCOME, DownstreamEnd, RelayBench, decision


@pytest.fixture
def bench() -> RelayBench:
    return RelayBench()


def ranks_of(request: pb.ConnectRequest) -> list[int]:
    return [arrival.rank for arrival in request.arrive.arrivals]


def reason(below: DownstreamEnd) -> str:
    assert below.over
    assert below.ending is not None
    return str(info_of(below.ending).reason)


# ---------------------------------------------------------------------- arrivals


def test_arrivals_of_a_node_are_one_message_after_the_last_arrival(bench: RelayBench):
    workers = bench.workers(0, 1, 2)
    for rank, worker in enumerate(workers):
        assert bench.upstream.take() == []
        worker.arrive(rank)
    (said,) = bench.upstream.take()
    assert ranks_of(said) == [0, 1, 2]
    assert (bench.stats.arrivals, bench.stats.messages) == (3, 1)


def test_arrivals_wait_for_a_straggler_only_for_the_fold_window(bench: RelayBench):
    workers = bench.workers(0, 1, 2)
    workers[2].arrive(2)
    workers[0].arrive(0)
    ((seconds, _),) = bench.timers.waiting
    assert seconds == FOLD_WINDOW
    bench.timers.fire()
    (said,) = bench.upstream.take()
    assert ranks_of(said) == [2, 0]
    workers[1].arrive(1)
    (said,) = bench.upstream.take()
    assert ranks_of(said) == [1], "the last rank waits for no other"
    assert not bench.timers.waiting


def test_vote_to_fail_is_sent_at_once_with_earlier_arrivals(bench: RelayBench):
    workers = bench.workers(0, 1, 2)
    workers[1].arrive(1)
    workers[0].arrive(0, failure="disk full")
    (said,) = bench.upstream.take()
    assert ranks_of(said) == [1, 0]
    assert said.arrive.arrivals[1].failure == "disk full"


def test_report_of_each_rank_is_sent_with_its_arrival(bench: RelayBench):
    workers = bench.workers(0, 1, 2)
    report = pb_common.WriteReport(step=7, bytes=10, write_ms=1_500, commits=True)
    workers[0].arrive(0, write=report)
    workers[1].arrive(1)
    workers[2].arrive(2, write=pb_common.WriteReport(step=8))
    (said,) = bench.upstream.take()
    reports = [arrival.write if arrival.HasField("write") else None for arrival in said.arrive.arrivals]
    assert reports == [report, None, pb_common.WriteReport(step=8)]


def test_reports_too_large_for_one_message_are_split(bench: RelayBench):
    report = pb_common.WriteReport(step=2**63 - 1, bytes=2**47, write_ms=1_000)
    in_one = WELCOME.max_payload_bytes // report.ByteSize()
    ranks = list(range(in_one + 1))
    for rank, worker in enumerate(bench.workers(*ranks)):
        worker.arrive(rank, write=report)
    assert [ranks_of(said) for said in bench.upstream.take()] == [ranks[:-1], ranks[-1:]]


def test_repeated_arrival_is_sent_at_once_with_its_own_times(bench: RelayBench):
    workers = bench.workers(0, 1, 2)
    workers[0].arrive(0, waited_ms=5_000)
    (said,) = bench.upstream.take()
    assert (ranks_of(said), said.arrive.waited_ms) == ([0], 5_000)


def test_arrivals_with_other_timeouts_or_barriers_are_not_folded(bench: RelayBench):
    workers = bench.workers(0, 1, 2)
    workers[0].arrive(0, timeout_ms=1_000)
    workers[1].arrive(1, timeout_ms=2_000)
    workers[2].arrive(2, sequence=1)
    bench.timers.fire()
    said = bench.upstream.take()
    assert [(one.arrive.sequence, one.arrive.timeout_ms, ranks_of(one)) for one in said] == [
        (0, 1_000, [0]),
        (0, 2_000, [1]),
        (1, 1_000, [2]),
    ]


def test_rank_that_arrives_twice_is_sent_in_two_messages(bench: RelayBench):
    workers = bench.workers(0, 1)
    workers[0].arrive(0)
    workers[0].arrive(0, failure="after all")
    said = bench.upstream.take()
    assert [ranks_of(one) for one in said] == [[0], [0]]
    assert said[1].arrive.arrivals[0].failure == "after all"


def test_folded_message_names_each_rank_once(bench: RelayBench):
    """The coordinator refuses a message that names a rank twice, for all its ranks."""
    workers = bench.workers(0, 1)
    for sequence in (5, 6, 5):
        workers[0].arrive(0, sequence=sequence)
    workers[1].arrive(1, sequence=5)
    bench.timers.fire()
    for said in bench.upstream.take():
        assert len(set(ranks_of(said))) == len(ranks_of(said))


def test_next_process_of_a_rank_inherits_no_unsent_messages(bench: RelayBench):
    """Invariant 12 (the coordinator assigns the sequence): it has not arrived, so no release reaches it."""
    first = bench.worker(0)
    first.say(join_group=pb.JoinGroup(prefix="checkpoint", world_size=2))
    first.arrive(0)
    bench.worker(1)
    first.stream.connection_lost()
    bench.worker(0, "the next")
    bench.upstream.welcome()
    assert bench.upstream.kinds() == ["add_processes"]


def test_unsent_messages_of_an_evicted_process_are_dropped(bench: RelayBench):
    workers = bench.workers(0, 1)
    workers[0].arrive(0)
    bench.upstream.answer(refusal=pb.Refusal(code=7, message="evicted", rank=0))
    bench.worker(0, "the next")
    bench.timers.fire()
    assert bench.upstream.kinds() == ["add_processes"]


def test_many_newcomers_are_split_into_messages_of_limited_size(bench: RelayBench):
    for rank in range(600):
        below = bench.stream()
        one = pb.Process(rank=rank, incarnation="i" * 1_000, host="h" * 1_000)
        below.say(hello=pb.Hello(run_id="job", processes=[one], protocol_version=1))
    bench.upstream.welcome()
    said = bench.upstream.take()
    assert [request.WhichOneof("message") for request in said] == ["add_processes"] * 3
    assert max(request.ByteSize() for request in said) < 2**19 + 10_000
    bench.upstream.admit(*range(1, 1 + len(said[0].add_processes.processes)))
    assert bench.stats.processes == len(said[0].add_processes.processes)


def test_payloads_too_large_for_one_message_are_split(bench: RelayBench):
    workers = bench.workers(0, 1, 2)
    for rank, worker in enumerate(workers):
        worker.arrive(rank, payload=b"x" * 60)
    assert [ranks_of(one) for one in bench.upstream.take()] == [[0], [1], [2]]


def test_arrival_waits_only_for_ranks_that_joined_its_group(bench: RelayBench):
    workers = bench.workers(0, 1)
    workers[0].say(join_group=pb.JoinGroup(prefix="eval", world_size=1))
    bench.timers.fire()
    bench.upstream.answer(
        group_joined=pb.GroupJoined(prefix="eval", positions=[pb.Position(rank=0, sequence=4)])
    )
    bench.upstream.take()
    workers[0].arrive(0, sequence=4, prefix="eval")
    assert [ranks_of(one) for one in bench.upstream.take()] == [[0]]


# ---------------------------------------------------------------------- questions


def test_question_reaches_named_ranks_and_answer_is_sent_at_once(bench: RelayBench):
    workers = bench.workers(0, 1, 2)
    workers[2].arrive(2)
    bench.upstream.answer(inspect=Inspect(question=7), ranks=[0, 1])
    assert [[one.inspect.question for one in worker.take()] for worker in workers] == [[7], [7], []]
    workers[1].say(inspected=Inspected(question=7, rank=1, report=Report(cpu_ms=3)))
    (said,) = bench.upstream.take()
    assert (said.inspected.question, said.inspected.rank, said.inspected.report.cpu_ms) == (7, 1, 3)
    assert bench.timers.waiting, "the arrival still waits for the others"


def test_steps_of_a_node_are_sent_together_after_the_window(bench: RelayBench):
    workers = bench.workers(0, 1)
    for number in (7, 8):
        for rank, worker in enumerate(workers):
            worker.say(steps=pb.Steps(steps=[pb.RankStep(rank=rank, step=number)]))
    workers[0].say(steps=pb.Steps(steps=[pb.RankStep(rank=1, step=99), pb.RankStep(rank=5, step=99)]))
    ((seconds, _),) = bench.timers.waiting
    assert seconds == STEPS_WINDOW
    assert bench.upstream.take() == []
    bench.timers.fire()
    (said,) = bench.upstream.take()
    assert [(one.rank, one.step) for one in said.steps.steps] == [(0, 8), (1, 8)]


def test_step_of_a_lost_process_is_not_sent(bench: RelayBench):
    zero, _ = bench.workers(0, 1)
    zero.say(steps=pb.Steps(steps=[pb.RankStep(rank=0, step=7)]))
    zero.stream.connection_lost()
    bench.upstream.take()
    bench.timers.fire()
    assert bench.upstream.take() == []


def test_answer_for_another_rank_is_dropped(bench: RelayBench):
    zero, _ = bench.workers(0, 1)
    zero.say(inspected=Inspected(question=7, rank=1))
    zero.say(inspected=Inspected(question=7, rank=99))
    assert bench.upstream.take() == []


# ---------------------------------------------------------------------- entering and joining


def test_processes_that_connect_before_the_welcome_enter_together(bench: RelayBench):
    bench.worker(0)
    bench.worker(1)
    assert bench.upstream.take() == []
    bench.upstream.welcome()
    (said,) = bench.upstream.take()
    assert [one.rank for one in said.add_processes.processes] == [0, 1]


def test_process_enters_with_all_that_it_said_of_itself(bench: RelayBench):
    process = pb.Process(
        rank=0, incarnation="life", host="pod-0", pid=7, node_rank=3, node_name="ip-10-0-0-1"
    )
    bench.stream().say(hello=pb.Hello(run_id="job", processes=[process], protocol_version=1))
    bench.upstream.welcome()
    (said,) = bench.upstream.take()
    assert list(said.add_processes.processes) == [process]


def test_joins_of_a_node_are_one_message_with_own_positions_back(bench: RelayBench):
    workers = [bench.worker(rank) for rank in range(2)]
    bench.upstream.welcome()
    bench.upstream.admit(7, 8)
    bench.upstream.take()
    for worker in workers:
        worker.take()
        worker.say(join_group=pb.JoinGroup(prefix="checkpoint", world_size=2))
    bench.timers.fire()
    (said,) = bench.upstream.take()
    assert sorted(said.join_group.ranks) == [0, 1]
    positions = [pb.Position(rank=0, sequence=3), pb.Position(rank=1, sequence=5)]
    bench.upstream.answer(group_joined=pb.GroupJoined(prefix="checkpoint", positions=positions))
    for worker, sequence in zip(workers, (3, 5), strict=True):
        (message,) = worker.take()
        assert [one.sequence for one in message.group_joined.positions] == [sequence]


def test_join_is_sent_before_an_arrival_that_follows_it(bench: RelayBench):
    """As a session does that has connected again."""
    worker = bench.worker(0)
    bench.upstream.welcome()
    bench.upstream.admit(7)
    bench.upstream.take()
    worker.say(join_group=pb.JoinGroup(prefix="checkpoint", world_size=2))
    worker.arrive(0, waited_ms=3)
    assert bench.upstream.kinds() == ["join_group", "arrive"]


def test_refused_process_ends_only_its_own_slot(bench: RelayBench):
    first, second = bench.worker(0), bench.worker(1)
    bench.upstream.welcome()
    refusal = pb.Refusal(code=7, message="evicted", rank=0)
    bench.upstream.answer(
        processes_added=pb.ProcessesAdded(entries=[pb.Entry(refusal=refusal), pb.Entry(ordinal=9)])
    )
    assert first.over
    assert first.ending is not None
    assert first.ending.message == "evicted"
    assert not first.ending.HasField("rank"), "a worker's own stream is meant as a whole"
    (message,) = second.take()
    assert list(message.welcome.ordinals) == [9]
    assert bench.stats.processes == 1


def test_reconnected_worker_keeps_its_slot_and_ends_its_old_stream(bench: RelayBench):
    (old,) = bench.workers(0)
    new = bench.worker(0)
    assert reason(old) == "SESSION_REPLACED"
    bench.timers.fire()
    (said,) = bench.upstream.take()
    assert [one.incarnation for one in said.add_processes.processes] == ["life-0"]
    bench.upstream.admit(100)
    assert new.kinds() == ["welcome"]
    assert len(bench.upstreams) == 1


def test_second_process_of_a_rank_gets_another_upstream_stream(bench: RelayBench):
    bench.workers(0, 1)
    bench.worker(0, "its checkpoint's process")
    assert len(bench.upstreams) == 2
    bench.worker(1, "its checkpoint's process")
    assert len(bench.upstreams) == 2


def test_each_run_has_its_own_upstream_stream(bench: RelayBench):
    bench.worker(0)
    bench.worker(0, run_id="another")
    assert [upstream.stream.run_id for upstream in bench.upstreams] == ["job", "another"]


# ---------------------------------------------------------------------- what the coordinator says


def test_decision_reaches_the_ranks_that_it_names(bench: RelayBench):
    workers = bench.workers(0, 1, 2)
    bench.upstream.answer(**decision(), ranks=[0, 2])
    assert [worker.kinds() for worker in workers] == [["decision"], [], ["decision"]]


def test_closing_without_ranks_reaches_all(bench: RelayBench):
    workers = bench.workers(0, 1)
    bench.upstream.answer(closed={"by": "an operator"})
    assert [worker.kinds() for worker in workers] == [["closed"], ["closed"]]


def test_message_for_a_lost_process_does_not_reach_its_successor(bench: RelayBench):
    """Invariant 12 (the coordinator assigns the sequence): a release is for those who arrived themselves."""
    workers = bench.workers(0, 1)
    workers[0].stream.connection_lost()
    newcomer = bench.worker(0, "another life")
    bench.timers.fire()
    bench.upstream.answer(**decision(), ranks=[0, 1])
    position = pb.Position(rank=0, sequence=0)
    bench.upstream.answer(group_joined=pb.GroupJoined(prefix="checkpoint", positions=[position]))
    refusal = pb.Refusal(code=3, message="too late", rank=0, prefix="checkpoint")
    bench.upstream.answer(refusal=refusal)
    assert newcomer.take() == []
    bench.upstream.admit(500)
    assert newcomer.kinds() == ["welcome"]


def test_eviction_ends_one_slot(bench: RelayBench):
    workers = bench.workers(0, 1)
    bench.upstream.answer(refusal=pb.Refusal(code=7, message="rank 0 was evicted", rank=0))
    assert workers[0].over
    assert workers[0].kinds() == ["refusal"]
    workers[1].arrive(1)
    assert [ranks_of(one) for one in bench.upstream.take()] == [[1]]


def test_refused_arrival_reaches_its_rank_alone(bench: RelayBench):
    workers = bench.workers(0, 1)
    bench.upstream.answer(
        refusal=pb.Refusal(code=3, message="ahead", rank=1, prefix="checkpoint", sequence=9)
    )
    assert [worker.kinds() for worker in workers] == [[], ["refusal"]]
    assert not workers[1].over


def test_refusal_without_a_rank_ends_all_streams_with_its_message(bench: RelayBench):
    workers = bench.workers(0, 1)
    bench.upstream.answer(refusal=pb.Refusal(code=10, message="the run was forgotten"))
    for worker in workers:
        assert worker.kinds() == ["refusal"]
        assert worker.ending is not None
        assert worker.ending.message == "the run was forgotten"
    assert bench.stats.processes == 0


# ---------------------------------------------------------------------- parting


def test_lost_process_leaves_alone_and_its_arrival_counts(bench: RelayBench):
    workers = bench.workers(0, 1, 2)
    workers[0].arrive(0)
    workers[0].stream.connection_lost()
    arrive, part = bench.upstream.take()
    assert ranks_of(arrive) == [0]
    assert list(part.remove_processes.ranks) == [0]
    assert not part.remove_processes.HasField("goodbye")
    assert not workers[1].over


def test_arrivals_do_not_wait_for_a_lost_process(bench: RelayBench):
    workers = bench.workers(0, 1)
    workers[1].stream.connection_lost()
    bench.upstream.take()
    workers[0].arrive(0)
    assert [ranks_of(one) for one in bench.upstream.take()] == [[0]]


def test_goodbye_ends_its_stream_after_the_coordinators_answer(bench: RelayBench):
    workers = bench.workers(0, 1)
    workers[0].say(goodbye=pb.Goodbye(reason="done"))
    (said,) = bench.upstream.take()
    assert said.remove_processes.goodbye.reason == "done"
    assert not workers[0].over, "it is not durable yet"
    bench.upstream.answer(processes_removed=pb.ProcessesRemoved(ranks=[0]))
    assert (workers[0].over, workers[0].ending) == (True, None)


def test_unanswered_goodbye_ends_with_a_refusal_when_upstream_is_lost(bench: RelayBench):
    (worker,) = bench.workers(0)
    worker.say(goodbye=pb.Goodbye(reason="done"))
    bench.upstream.stream.end(pb.Refusal(code=14, message="lost"))
    assert worker.over
    assert worker.ending is not None


def test_last_goodbye_closes_the_upstream_stream(bench: RelayBench):
    (worker,) = bench.workers(0)
    worker.say(goodbye=pb.Goodbye())
    assert bench.upstream.kinds() == ["remove_processes", "goodbye"]
    bench.upstream.answer(processes_removed=pb.ProcessesRemoved(ranks=[0]))
    assert worker.over
    bench.worker(0, "the next")
    assert len(bench.upstreams) == 2, "nobody enters where the goodbye was said"


def test_worker_lost_before_the_welcome_ends_the_upstream_stream(bench: RelayBench):
    worker = bench.worker(0)
    worker.stream.connection_lost()
    assert bench.upstream.stream.ended
    assert bench.upstream.take() == []


def test_process_lost_before_admission_enters_and_leaves(bench: RelayBench):
    bench.workers(1)
    worker = bench.worker(0)
    bench.timers.fire()
    worker.stream.connection_lost()
    assert bench.upstream.kinds() == ["add_processes", "remove_processes"]
    bench.upstream.admit(7)
    bench.upstream.answer(processes_removed=pb.ProcessesRemoved(ranks=[0]))
    assert bench.stats.processes == 1


def test_lost_upstream_ends_all_streams_and_keeps_nothing(bench: RelayBench):
    workers = bench.workers(0, 1)
    workers[0].arrive(0)
    upstream = bench.upstream
    upstream.stream.end(pb.Refusal(code=14, message="lost"))
    assert all(worker.over for worker in workers)
    assert [one.WhichOneof("message") for one in workers[0].take()] == [], "only the status says it"
    bench.timers.fire()
    assert upstream.take() == []
    bench.worker(0)
    assert len(bench.upstreams) == 2


@pytest.mark.parametrize(
    "nonsense",
    [
        {"processes_added": pb.ProcessesAdded(entries=[pb.Entry(ordinal=1)])},
        {"processes_removed": pb.ProcessesRemoved(ranks=[0])},
        {"drain": pb.Drain(retry_after_ms=1)},
    ],
)
def test_unexpected_answer_ends_the_upstream_stream(bench: RelayBench, nonsense: dict[str, object]):
    workers = bench.workers(0, 1)
    bench.upstream.answer(**nonsense)
    assert [reason(worker) for worker in workers] == ["UPSTREAM_LOST"] * 2


def test_unreadable_answer_ends_the_upstream_stream(bench: RelayBench):
    (worker,) = bench.workers(0)
    bench.upstream.stream.receive(b"\xff\xff")
    assert reason(worker) == "UPSTREAM_LOST"
