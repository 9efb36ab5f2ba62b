"""Which messages a relay accepts from a worker and from another relay, and how it answers."""

import pytest

from muster.relay.refusals import Refused, info_of
from muster.v1 import session_pb2 as pb
from tests.support.world.relay_bench import DownstreamEnd, RelayBench, hello, process


@pytest.fixture
def bench() -> RelayBench:
    return RelayBench()


def refused(below: DownstreamEnd, **message: object) -> tuple[str, str]:
    with pytest.raises(Refused) as caught:
        below.say(**message)
    return str(info_of(caught.value.refusal).reason), str(caught.value)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xff" * 50, b'\x0a\x02\x0a"'], ids=["empty", "0", "ff", "cut"]
)
def test_garbage_is_refused_in_a_sentence(bench: RelayBench, data: bytes):
    with pytest.raises(Refused, match=r"not a muster\.v1\.ConnectRequest"):
        bench.stream().stream.receive(data)


@pytest.mark.parametrize(
    "kind", ["arrive", "join_group", "goodbye", "add_processes", "remove_processes", "inspected", "steps"]
)
def test_first_message_must_be_a_hello(bench: RelayBench, kind: str):
    reason, sentence = refused(bench.stream(), **{kind: {}})
    assert reason == "HELLO_REQUIRED"
    assert "say Hello first" in sentence


def test_second_hello_is_refused(bench: RelayBench):
    worker = bench.worker(0)
    assert refused(worker, hello=hello(0))[0] == "HELLO_REPEATED"


def test_refusal_of_another_protocol_names_the_supported_version(bench: RelayBench):
    reason, sentence = refused(bench.stream(), hello=hello(0, version=2))
    assert reason == "PROTOCOL_VERSION"
    assert "protocol_version = 2: this relay (test) speaks version 1" in sentence


@pytest.mark.parametrize("processes", [[], [process(3), process(3, "twin")]], ids=["none", "a rank twice"])
def test_hello_with_bad_ranks_is_refused_without_the_coordinator(
    bench: RelayBench, processes: list[pb.Process]
):
    said = pb.Hello(run_id="job", processes=processes, protocol_version=1)
    assert refused(bench.stream(), hello=said)[0] == "INVALID_ARGUMENT"
    assert not bench.upstreams, "nobody is asked for it"


def test_relays_hello_with_processes_is_refused(bench: RelayBench):
    assert refused(bench.stream(), hello=hello(0, relay="node-9:1"))[0] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("kind", ["add_processes", "remove_processes"])
def test_worker_may_not_add_or_remove_processes(bench: RelayBench, kind: str):
    assert refused(bench.worker(0), **{kind: {}})[0] == "INVALID_ARGUMENT"


def test_list_too_long_for_the_coordinator_ends_its_sender(bench: RelayBench):
    (worker,) = bench.workers(0)
    group = pb.JoinGroup(prefix="checkpoint", world_size=2, participants=range(65_537))
    reason, sentence = refused(worker, join_group=group)
    assert reason == "INVALID_ARGUMENT"
    assert "65,537 entries" in sentence


def test_message_too_large_for_the_coordinator_ends_its_sender(bench: RelayBench):
    first, second = bench.workers(0, 1)
    arrivals = [pb.Arrival(rank=0, payload=b"x" * 2_000_000)]
    said = pb.Arrive(prefix="checkpoint", timeout_ms=1, arrivals=arrivals)
    reason, sentence = refused(first, arrive=said)
    assert reason == "LIMIT_EXCEEDED"
    assert "max_payload_bytes" in sentence
    assert not second.over


@pytest.mark.parametrize("kind", ["arrive", "join_group"])
def test_message_without_a_prefix_ends_its_sender_alone(bench: RelayBench, kind: str):
    first, second = bench.workers(0, 1)
    reason, sentence = refused(first, **{kind: {}})
    assert reason == "INVALID_ARGUMENT"
    assert 'prefix = ""' in sentence
    assert not second.over


def test_message_that_names_a_rank_twice_ends_its_sender(bench: RelayBench):
    (worker,) = bench.workers(0)
    twice = pb.Arrive(prefix="checkpoint", arrivals=[pb.Arrival(rank=0), pb.Arrival(rank=0)])
    assert refused(worker, arrive=twice)[0] == "INVALID_ARGUMENT"


def test_worker_cannot_speak_for_another_workers_rank(bench: RelayBench):
    mine, other = bench.workers(0, 1)
    mine.arrive(1)
    (message,) = mine.take()
    assert info_of(message.refusal).reason == "RANK_NOT_IN_SESSION"
    assert (message.refusal.rank, message.refusal.prefix, message.refusal.sequence) == (1, "checkpoint", 0)
    mine.say(join_group=pb.JoinGroup(prefix="eval", world_size=2, ranks=[1]))
    assert mine.kinds() == ["refusal"]
    bench.timers.fire()
    assert bench.upstream.take() == []
    assert other.take() == []


def test_run_without_access_is_refused_before_a_stream_is_opened(bench: RelayBench):
    below = bench.stream(refused_runs=("job",))
    assert refused(below, hello=hello(0))[0] == "INVALID_ARGUMENT"
    assert not bench.upstreams


def test_too_many_bytes_before_the_welcome_are_refused(bench: RelayBench):
    worker = bench.worker(0)
    for number in range(4):
        worker.arrive(0, sequence=number, payload=b"x" * 1_000_000)
    reason, sentence = refused(worker, goodbye=pb.Goodbye(reason="x" * 300_000))
    assert reason == "INVALID_ARGUMENT"
    assert "wait for the Welcome" in sentence


@pytest.mark.parametrize("name", ["host", "incarnation", "node_name"])
def test_name_too_long_for_a_shared_message_is_refused(bench: RelayBench, name: str):
    huge = pb.Process(rank=0, incarnation="life", host="node-0")
    setattr(huge, name, "x" * 1_025)
    said = pb.Hello(run_id="job", processes=[huge], protocol_version=1)
    reason, sentence = refused(bench.stream(), hello=said)
    assert reason == "INVALID_ARGUMENT"
    assert f"{name} = 1,025 letters" in sentence


def test_goodbye_with_too_long_a_reason_is_refused(bench: RelayBench):
    (worker,) = bench.workers(0)
    assert refused(worker, goodbye=pb.Goodbye(reason="x" * 65_537))[0] == "INVALID_ARGUMENT"


# ---------------------------------------------------------------------- a worker


def test_welcome_is_the_coordinators_with_its_addresses_added(bench: RelayBench):
    worker = bench.worker(3)
    bench.upstream.welcome()
    bench.upstream.admit(42)
    (message,) = worker.take()
    assert list(message.welcome.ordinals) == [42]
    assert message.welcome.session_ttl_ms == 10_000
    assert list(message.welcome.replicas) == ["coordinator:7550"]


def test_replicas_in_the_welcome_are_forwarded_unchanged(bench: RelayBench):
    worker = bench.worker(3)
    bench.upstream.answer(welcome=pb.Welcome(replicas=["a:1", "b:1"], max_payload_bytes=1))
    bench.upstream.admit(42)
    (message,) = worker.take()
    assert list(message.welcome.replicas) == ["a:1", "b:1"]


def test_stream_of_several_processes_is_welcomed_when_all_are_admitted(bench: RelayBench):
    below = bench.stream()
    below.say(hello=hello(0, 1))
    bench.upstream.welcome()
    bench.upstream.admit(7, 8)
    (message,) = below.take()
    assert list(message.welcome.ordinals) == [7, 8]


def test_refusal_of_one_process_in_a_hello_ends_the_stream_for_all(bench: RelayBench):
    below = bench.stream()
    below.say(hello=hello(0, 1))
    bench.upstream.welcome()
    bench.upstream.take()
    refusal = pb.Refusal(code=7, message="evicted", rank=1)
    bench.upstream.answer(
        processes_added=pb.ProcessesAdded(entries=[pb.Entry(ordinal=7), pb.Entry(refusal=refusal)])
    )
    assert below.over
    part, *_ = bench.upstream.take()
    assert list(part.remove_processes.ranks) == [0]


def test_eviction_leaves_the_other_ranks_of_a_stream_connected(bench: RelayBench):
    below = bench.stream()
    below.say(hello=hello(0, 1))
    bench.upstream.welcome()
    bench.upstream.admit(7, 8)
    below.take()
    bench.upstream.answer(refusal=pb.Refusal(code=7, message="rank 0 was evicted", rank=0))
    (message,) = below.take()
    assert message.refusal.rank == 0
    assert not below.over


# ---------------------------------------------------------------------- another relay


def lower(bench: RelayBench) -> DownstreamEnd:
    """Another relay, which was welcomed."""
    below = bench.stream()
    below.say(hello=hello(relay="node-1:77"))
    bench.upstream.welcome()
    return below


def lower_with_4_and_5(bench: RelayBench) -> DownstreamEnd:
    """Another relay, which was welcomed. Its ranks 4 and 5 were admitted."""
    below = lower(bench)
    below.say(add_processes=pb.AddProcesses(processes=[process(4), process(5)]))
    bench.timers.fire()
    bench.upstream.admit(4, 5)
    return below


def test_another_relay_is_welcomed_without_processes(bench: RelayBench):
    below = lower(bench)
    (message,) = below.take()
    assert message.WhichOneof("message") == "welcome"
    assert list(message.welcome.ordinals) == []


def test_processes_of_another_relay_are_answered_in_its_order(bench: RelayBench):
    below = lower(bench)
    below.take()
    below.say(add_processes=pb.AddProcesses(processes=[process(5), process(4)]))
    bench.timers.fire()
    (said,) = bench.upstream.take()
    assert [one.rank for one in said.add_processes.processes] == [5, 4]
    refusal = pb.Refusal(code=7, message="evicted")
    bench.upstream.answer(
        processes_added=pb.ProcessesAdded(entries=[pb.Entry(refusal=refusal), pb.Entry(ordinal=4)])
    )
    (message,) = below.take()
    assert [one.ordinal for one in message.processes_added.entries] == [0, 4]
    assert not below.over, "one was refused, and the others go on"


def test_answers_of_two_upstreams_keep_the_order_of_requests(bench: RelayBench):
    bench.workers(0)
    below = bench.stream()
    below.say(hello=hello(relay="node-1:77"))
    below.take()
    below.say(add_processes=pb.AddProcesses(processes=[process(0, "another life")]))
    below.say(add_processes=pb.AddProcesses(processes=[process(1)]))
    first, second = bench.upstreams
    bench.timers.fire()
    first.admit(11)
    assert below.take() == [], "the answer before it is still to come"
    second.welcome()
    second.admit(10)
    assert [one.processes_added.entries[0].ordinal for one in below.take()] == [10, 11]


def test_process_of_another_relay_leaves_alone(bench: RelayBench):
    below = lower_with_4_and_5(bench)
    bench.upstream.take()
    below.take()
    below.say(remove_processes=pb.RemoveProcesses(ranks=[5], goodbye=pb.Goodbye(reason="done")))
    (said,) = bench.upstream.take()
    assert (list(said.remove_processes.ranks), said.remove_processes.goodbye.reason) == ([5], "done")
    bench.upstream.answer(processes_removed=pb.ProcessesRemoved(ranks=[5]))
    (message,) = below.take()
    assert list(message.processes_removed.ranks) == [5]


def test_removal_of_an_unknown_rank_is_answered(bench: RelayBench):
    below = lower(bench)
    below.take()
    below.say(remove_processes=pb.RemoveProcesses(ranks=[9]))
    assert below.kinds() == ["processes_removed"]


def test_eviction_names_the_rank_and_another_relays_stream_continues(bench: RelayBench):
    below = lower_with_4_and_5(bench)
    below.take()
    bench.upstream.answer(refusal=pb.Refusal(code=7, message="rank 4 was evicted", rank=4))
    (message,) = below.take()
    assert (message.refusal.rank, message.refusal.prefix) == (4, "")
    assert not below.over


def test_decision_reaches_another_relay_once_for_all_its_ranks(bench: RelayBench):
    below = lower_with_4_and_5(bench)
    below.take()
    bench.upstream.answer(decision={"prefix": "checkpoint"}, ranks=[4, 5])
    (message,) = below.take()
    assert list(message.ranks) == [4, 5]


def test_loss_of_another_relay_removes_all_its_processes(bench: RelayBench):
    below = lower_with_4_and_5(bench)
    bench.workers(0)
    below.stream.connection_lost()
    (said,) = bench.upstream.take()
    assert list(said.remove_processes.ranks) == [4, 5]


def test_removal_is_answered_before_the_upstream_is_connected(bench: RelayBench):
    bench.workers(0, 1)
    below = lower_on(bench)
    below.say(add_processes=pb.AddProcesses(processes=[process(0, "another"), process(1, "another")]))
    first, second = bench.upstreams
    below.say(remove_processes=pb.RemoveProcesses(ranks=[1]))
    second.welcome()
    second.admit(10)
    assert below.kinds() == ["processes_added", "processes_removed"]
    below.say(add_processes=pb.AddProcesses(processes=[process(5)]))
    bench.timers.fire()
    first.admit(11)
    assert below.kinds() == ["processes_added"], "what comes after is answered, too"


def test_late_refusal_of_a_process_leaves_its_successor_its_slot(bench: RelayBench):
    below = lower(bench)
    below.take()
    below.say(add_processes=pb.AddProcesses(processes=[process(0)]))
    bench.timers.fire()
    below.say(remove_processes=pb.RemoveProcesses(ranks=[0]))
    # Another worker keeps the upstream stream open.
    bench.worker(7)
    below.say(add_processes=pb.AddProcesses(processes=[process(0, "the next")]))
    bench.timers.fire()
    upstream = bench.upstreams[0]
    upstream.answer(
        processes_added=pb.ProcessesAdded(entries=[pb.Entry(refusal=pb.Refusal(code=7, message="evicted"))])
    )
    upstream.answer(processes_removed=pb.ProcessesRemoved(ranks=[0]))
    bench.upstreams[-1].welcome()
    for other in dict.fromkeys([upstream, bench.upstreams[-1]]):
        other.take()
        if not other.stream.ended:
            other.admit(20, 21)
    below.take()
    below.say(remove_processes=pb.RemoveProcesses(ranks=[0], goodbye=pb.Goodbye()))
    said = [
        request for one in bench.upstreams for request in one.take() if request.HasField("remove_processes")
    ]
    assert [list(request.remove_processes.ranks) for request in said] == [[0]], "its death is not hidden"


def test_decision_for_another_relay_names_only_its_own_ranks(bench: RelayBench):
    bench.workers(8)
    below = lower_on(bench)
    below.say(add_processes=pb.AddProcesses(processes=[process(0), process(8, "another")]))
    bench.timers.fire()
    first, second = bench.upstreams
    first.admit(1)
    second.welcome()
    second.admit(2)
    below.take()
    first.answer(decision={"prefix": "checkpoint"}, ranks=[0, 8])
    (message,) = below.take()
    assert list(message.ranks) == [0], "rank 8 of the decision is a process of another node"


def test_relays_share_the_bytes_of_a_message(bench: RelayBench, monkeypatch: pytest.MonkeyPatch):
    relays = lower(bench), lower_on(bench)
    for below, rank in zip(relays, (4, 5), strict=True):
        below.say(add_processes=pb.AddProcesses(processes=[process(rank)]))
    bench.timers.fire()
    bench.upstream.admit(4, 5)
    sent: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(DownstreamEnd, "send", lambda _, data, own=b"": sent.append((data, own)))
    bench.upstream.answer(closed={"by": "an operator"}, ranks=[4, 5])
    (shared, own), (also_shared, other) = sent
    assert shared is also_shared
    messages = [pb.ConnectResponse.FromString(shared + ranks) for ranks in (own, other)]
    assert [(one.closed.by, list(one.ranks)) for one in messages] == [
        ("an operator", [4]),
        ("an operator", [5]),
    ]


def lower_on(bench: RelayBench) -> DownstreamEnd:
    """Another relay on an upstream stream that is welcomed already."""
    below = bench.stream()
    below.say(hello=hello(relay="node-1:77"))
    assert below.kinds() == ["welcome"]
    return below
