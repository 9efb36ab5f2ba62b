import dataclasses
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.error_details_pb2 import ErrorInfo
from hypothesis import given
from hypothesis import strategies as st

from lab import records
from muster.client.protocol import PROTOCOL_VERSION
from muster.service.core import views
from muster.service.core.rendezvous.nodes import Departed
from muster.service.core.vocabulary import events
from muster.service.core.vocabulary.effects import (
    Entry,
    GroupJoined,
    Inspect,
    NodesWaiting,
    ProcessesAdded,
    ProcessesRemoved,
    Progress,
    Refused,
    RoundComplete,
    Standing,
    Welcome,
)
from muster.service.core.vocabulary.model import (
    Closed,
    MemberState,
    MissingRank,
    MissingState,
    NodeInfo,
    NodeStanding,
    RendezvousSettings,
)
from muster.service.core.vocabulary.records import RoundRecord
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc import codec
from muster.service.version import VERSION
from muster.service.wire import decision_from_pb, members_to_pb, rendezvous_to_pb
from muster.v1 import common_pb2, rendezvous_pb2, session_pb2
from muster.v1 import insight_pb2 as insight
from tests.support.expect import of_kind

SESSION = 5
MISSING = MissingRank(3, MissingState.CONNECTION_LOST, "node-0", 4121, 41.5, 6)
MISSING_PB = common_pb2.MissingRank(
    rank=3,
    host="node-0",
    pid=4121,
    state=common_pb2.MISSING_STATE_CONNECTION_LOST,
    gone_ms=41_500,
    last_sequence=6,
)


def parse(**message: object) -> events.Event | insight.Inspected:
    data = session_pb2.ConnectRequest(**message).SerializeToString()  # type: ignore[arg-type]
    return codec.parse_session_message(SESSION, data)


def refusal_of(data: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        codec.parse_session_message(SESSION, data)
    return caught.value


def encode(message: object) -> session_pb2.ConnectResponse:
    return session_pb2.ConnectResponse.FromString(codec.encode_session_message(message))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- in


class TestParse:
    def test_hello(self):
        said = session_pb2.Hello(
            run_id="job1",
            generation=4,
            processes=[
                session_pb2.Process(rank=3, incarnation="a", host="node-0", pid=4121, ordinal=1 << 40),
                session_pb2.Process(rank=4, incarnation="b", host="node-0", pid=4122),
            ],
            sdk_version="9.9",
            protocol_version=PROTOCOL_VERSION,
        )
        infos = (
            events.ProcessInfo(3, "a", "node-0", 4121, 1 << 40),
            events.ProcessInfo(4, "b", "node-0", 4122),
        )
        assert parse(hello=said) == events.Hello(SESSION, "job1", 4, infos)

    @pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
    def test_hello_of_another_protocol_is_refused(self, version: int):
        hello = session_pb2.Hello(run_id="job1", protocol_version=version)
        refusal = refusal_of(session_pb2.ConnectRequest(hello=hello).SerializeToString())
        assert refusal.reason is Reason.PROTOCOL_VERSION
        assert f"protocol_version = {version}" in refusal.message
        assert refusal.metadata == {"supported": "1"}

    def test_join(self):
        said = session_pb2.JoinGroup(prefix="ckpt", world_size=16, participants=[0, 3], ranks=[3])
        assert parse(join_group=said) == events.JoinGroup(SESSION, "ckpt", 16, (0, 3), (3,))
        bare = session_pb2.JoinGroup(prefix="ckpt", world_size=16)
        assert parse(join_group=bare) == events.JoinGroup(SESSION, "ckpt", 16)

    def test_report_of_a_write_has_only_given_fields(self):
        encoded = common_pb2.WriteReport(step=7, bytes=1_024, write_ms=1_500, commits=True, gives_up=True)
        arrivals = [
            session_pb2.Arrival(rank=0, write=encoded),
            session_pb2.Arrival(rank=1, write=common_pb2.WriteReport()),
            session_pb2.Arrival(rank=2),
        ]
        arrive = of_kind(events.Arrive, parse(arrive=session_pb2.Arrive(prefix="save", arrivals=arrivals)))
        assert [arrival.report for arrival in arrive.arrivals] == [
            events.WriteReport(step=7, bytes=1_024, seconds=1.5, commits=True, gives_up=True),
            events.WriteReport(),
            None,
        ]

    def test_arrival_with_a_payload_one_with_a_vote_and_one_bare(self):
        arrivals = [
            session_pb2.Arrival(rank=0, payload=b"\0\xff"),
            session_pb2.Arrival(rank=1, failure="disk full"),
            session_pb2.Arrival(rank=2),
        ]
        said = session_pb2.Arrive(prefix="ckpt", sequence=7, timeout_ms=1_500, arrivals=arrivals)
        said.progress_after_ms, said.waited_ms = 250, 4_500
        assert parse(arrive=said) == events.Arrive(
            SESSION,
            "ckpt",
            7,
            1.5,
            (events.Arrival(0, b"\0\xff"), events.Arrival(1, b"", "disk full"), events.Arrival(2)),
            0.25,
            4.5,
        )

    def test_vote_without_a_reason_is_still_a_vote(self):
        said = session_pb2.Arrive(arrivals=[session_pb2.Arrival(rank=1, failure="")])
        assert of_kind(events.Arrive, parse(arrive=said)).arrivals[0].failure == ""

    def test_sequence_that_is_not_set_is_the_first(self):
        assert of_kind(events.Arrive, parse(arrive=session_pb2.Arrive(prefix="ckpt"))).sequence == 0

    def test_relays_hello(self):
        said = session_pb2.Hello(run_id="job1", generation=4, relay="node-0 (pid 7)", protocol_version=1)
        assert parse(hello=said) == events.Hello(SESSION, "job1", 4, (), "node-0 (pid 7)")

    def test_added_processes(self):
        process = session_pb2.Process(
            rank=3, incarnation="a", host="node-0", pid=4121, ordinal=9, node_rank=0, age_ms=1_500
        )
        said = session_pb2.AddProcesses(processes=[process, session_pb2.Process(rank=4, incarnation="b")])
        assert parse(add_processes=said) == events.AddProcesses(
            SESSION,
            (
                events.ProcessInfo(3, "a", "node-0", 4121, 9, 0, 1.5),
                events.ProcessInfo(4, "b", "", 0),
            ),
        )
        assert parse(add_processes=session_pb2.AddProcesses()) == events.AddProcesses(SESSION, ())

    def test_ranks_are_removed_with_or_without_a_goodbye(self):
        goodbye = session_pb2.Goodbye(reason="done")
        assert parse(
            remove_processes=session_pb2.RemoveProcesses(ranks=[3, -1], goodbye=goodbye)
        ) == events.RemoveProcesses(SESSION, (3, -1), "done")
        mute = session_pb2.RemoveProcesses(ranks=[3], goodbye=session_pb2.Goodbye())
        assert parse(remove_processes=mute) == events.RemoveProcesses(SESSION, (3,), "")
        assert parse(remove_processes=session_pb2.RemoveProcesses(ranks=[3])) == events.RemoveProcesses(
            SESSION, (3,)
        )

    @pytest.mark.parametrize("kind", ["add_processes", "remove_processes"])
    def test_more_processes_than_there_can_be_ranks_are_refused(self, kind: str):
        if kind == "add_processes":
            said: Any = session_pb2.AddProcesses(processes=[session_pb2.Process(rank=0)] * 70_000)
        else:
            said = session_pb2.RemoveProcesses(ranks=range(70_000))
        refusal = refusal_of(session_pb2.ConnectRequest(**{kind: said}).SerializeToString())
        assert refusal.reason is Reason.INVALID_ARGUMENT
        assert "= 70,000 entries: a message may have 65,536" in refusal.message

    def test_answer_to_an_inspection_is_not_an_event(self):
        answer = insight.Inspected(question=7, rank=3, report=insight.Report(cpu_ms=2))
        assert parse(inspected=answer) == answer

    def test_steps(self):
        steps = [session_pb2.RankStep(rank=3, step=2**63), session_pb2.RankStep(rank=-1)]
        assert parse(steps=session_pb2.Steps(steps=steps)) == events.Stepped(SESSION, ((3, 2**63), (-1, 0)))

    def test_goodbye(self):
        assert parse(goodbye=session_pb2.Goodbye(reason="done")) == events.Goodbye(SESSION, "done")

    @pytest.mark.parametrize("data", [b"", b"\x7a\x00"], ids=["empty", "a field of the future"])
    def test_message_that_says_nothing_known_is_refused(self, data: bytes):
        refusal = refusal_of(data)
        assert refusal.reason is Reason.INVALID_ARGUMENT
        assert f"(it is version {VERSION})" in refusal.message

    @pytest.mark.parametrize(
        "data",
        [b"\xff\xfe", b"\x0a\x10short", b"\x0a\x04\x0a\x02\xff\xfe"],
        ids=["tag", "cut off", "not UTF-8"],
    )
    def test_bytes_that_are_no_message_are_refused_and_counted(self, data: bytes):
        refusal = refusal_of(data)
        assert refusal.reason is Reason.INVALID_ARGUMENT
        assert f"{len(data)} bytes that are not a muster.v1.ConnectRequest" in refusal.message

    @given(st.binary(max_size=60))
    def test_any_bytes_are_an_event_or_a_refusal(self, data: bytes):
        assert_event_or_refusal(data)

    @given(
        kind=st.sampled_from([b"\x0a", b"\x12", b"\x1a", b"\x22", b"\x2a", b"\x32"]),
        body=st.binary(max_size=60),
    )
    def test_message_with_any_body_is_an_event_or_a_refusal(self, kind: bytes, body: bytes):
        assert_event_or_refusal(kind + bytes([len(body)]) + body)


def assert_event_or_refusal(data: bytes) -> None:
    try:
        event = codec.parse_session_message(SESSION, data)
    except Refusal:
        return
    worker = events.Hello | events.JoinGroup | events.Arrive | events.Goodbye
    assert isinstance(event, worker | events.AddProcesses | events.RemoveProcesses)


# ---------------------------------------------------------------------- out


class TestEncode:
    def test_decision(self):
        decision = records.decision()
        encoded = encode(decision).decision
        assert decision_from_pb(encoded) == decision
        assert encoded.outcome == common_pb2.OUTCOME_TIMED_OUT
        assert list(encoded.missing) == [MISSING_PB]

    def test_decision_without_an_arrival_has_no_straggler(self):
        assert not encode(records.decision(last_arrival_rank=None)).decision.HasField("last_arrival_rank")
        assert encode(records.decision(last_arrival_rank=0)).decision.HasField("last_arrival_rank")

    def test_welcome(self):
        assert encode(Welcome(3, 2.5, 1 << 20, (7, 1 << 40))).welcome == session_pb2.Welcome(
            coordinator_version=VERSION,
            epoch=3,
            session_ttl_ms=2_500,
            max_payload_bytes=1 << 20,
            ordinals=[7, 1 << 40],
            steps_interval_ms=codec.STEPS_INTERVAL_MS,
        )

    def test_welcome_of_one_of_several_replicas(self):
        data = codec.encode_welcome(Welcome(3, 2.5, 1, (7,)), ["a:1", "b:1"], 900)
        welcome = session_pb2.ConnectResponse.FromString(data).welcome
        assert (welcome.epoch, list(welcome.ordinals)) == (3, [7])
        assert (list(welcome.replicas), welcome.keepalive_ms) == (["a:1", "b:1"], 900)

    def test_joined_group(self):
        positions = [session_pb2.Position(rank=0, sequence=0), session_pb2.Position(rank=3, sequence=7)]
        assert encode(GroupJoined("ckpt", ((0, 0), (3, 7)))).group_joined == session_pb2.GroupJoined(
            prefix="ckpt", positions=positions
        )

    def test_entered_message_has_ordinals_and_refusals(self):
        refusal = Refusal(Reason.EVICTED, "it was evicted.")
        encoded = encode(ProcessesAdded((Entry(7), Entry(refusal=refusal)))).processes_added.entries
        assert (encoded[0].ordinal, encoded[0].HasField("refusal")) == (7, False)
        assert (encoded[1].ordinal, encoded[1].refusal.code, encoded[1].refusal.message) == (
            0,
            7,
            "it was evicted.",
        )
        info = ErrorInfo()
        assert encoded[1].refusal.error_info.Unpack(info)
        assert info.reason == "EVICTED"

    @pytest.mark.parametrize(
        ("message", "kind"),
        [(ProcessesAdded(()), "processes_added"), (ProcessesRemoved(()), "processes_removed")],
    )
    def test_answer_without_entries_has_its_kind(self, message: object, kind: str):
        assert encode(message).WhichOneof("message") == kind

    def test_question(self):
        assert encode(Inspect(7, all_threads=True)).inspect == insight.Inspect(question=7, all_threads=True)

    def test_removed_ranks(self):
        encoded = encode(ProcessesRemoved((3, 3, 1)))
        assert encoded.processes_removed == session_pb2.ProcessesRemoved(ranks=[3, 3, 1])

    @pytest.mark.parametrize("message", [records.decision(), Closed("ann", "done", 1.0)])
    def test_ranks_are_put_behind_the_bytes_that_are_the_same_for_all(self, message: object):
        shared = codec.encode_session_message(message)  # type: ignore[arg-type]
        encoded = session_pb2.ConnectResponse.FromString(shared + codec.encode_ranks((5, 65_535)))
        assert list(encoded.ranks) == [5, 65_535]
        encoded.ClearField("ranks")
        assert encoded == encode(message)

    def test_progress(self):
        encoded = encode(Progress("ckpt", 7, 14, 16, (MISSING,), "14 of 16"))
        assert encoded.progress == session_pb2.Progress(
            prefix="ckpt", sequence=7, arrived=14, required=16, missing=[MISSING_PB], message="14 of 16"
        )

    def test_rank_that_was_never_seen_has_no_last_sequence(self):
        message = Progress("ckpt", 7, 0, 1, (MissingRank(3, MissingState.NEVER_JOINED),), "")
        assert not encode(message).progress.missing[0].HasField("last_sequence")

    def test_refusal_of_an_arrival(self):
        refusal = Refusal(Reason.SEQUENCE_AHEAD, "#9 is ahead.", next_sequence=7)
        encoded = encode(Refused(refusal, "ckpt", 9, 3)).refusal
        assert (encoded.prefix, encoded.sequence, encoded.rank) == ("ckpt", 9, 3)
        assert (encoded.code, encoded.message) == (11, "#9 is ahead.")
        info = ErrorInfo()
        assert encoded.error_info.Unpack(info)
        assert (info.reason, dict(info.metadata)) == ("SEQUENCE_AHEAD", {"next_sequence": "7"})

    def test_refusal_of_the_session_names_no_group(self):
        encoded = encode(Refused(Refusal(Reason.HELLO_REPEATED, "again."), final=True)).refusal
        assert (encoded.prefix, encoded.HasField("sequence"), encoded.HasField("rank")) == ("", False, False)

    def test_drain_says_when_to_come_back(self):
        assert session_pb2.ConnectResponse.FromString(codec.DRAIN).drain.retry_after_ms == 500


# ---------------------------------------------------------------------- for people


def test_members_are_shown_with_their_groups():
    view = views.MemberView(
        rank=3,
        incarnation="a",
        ordinal=9,
        host="node-0",
        pid=4121,
        node_name="node-0",
        state=MemberState.DISCONNECTED,
        since=1.25,
        generation=2,
        node_rank=1,
        relay="node-0 (pid 70)",
        groups=(("ckpt", 6), ("eval", None)),
        step=1200,
        step_age=0.25,
    )
    (shown,) = members_to_pb([view])
    assert (shown.rank, shown.pid, shown.since_ms, shown.generation) == (3, 4121, 1_250, 2)
    assert shown.relay == "node-0 (pid 70)"
    assert (shown.step, shown.step_ms) == (1200, 250)
    assert shown.state == common_pb2.MEMBER_STATE_DISCONNECTED
    assert shown.node_rank == 1
    assert [(g.prefix, g.HasField("last_sequence")) for g in shown.groups] == [
        ("ckpt", True),
        ("eval", False),
    ]


# ---------------------------------------------------------------------- nodes

NODE = NodeInfo("decaf", "node-0", 4100)
NODE_PB = rendezvous_pb2.Node(incarnation="decaf", address="node-0", pid=4100)
SETTINGS = RendezvousSettings(
    min_nodes=2, max_nodes=4, join_timeout=600.0, last_call_timeout=30.0, keep_alive_timeout=0.5
)
CLOSED = Closed("me", "done", 1_700_000_000.25)
CLOSED_PB = common_pb2.Closed(
    by="me", reason="done", closed_at=Timestamp(seconds=1_700_000_000, nanos=250_000_000)
)


def a_join(**changed) -> rendezvous_pb2.JoinRequest:
    fields = {
        "run_id": "job1",
        "node": NODE_PB,
        "attempt": 3,
        "min_nodes": 2,
        "max_nodes": 4,
        "join_timeout_ms": 600_000,
        "last_call_timeout_ms": 30_000,
        "keep_alive_timeout_ms": 500,
        "sdk_version": "9.9",
        "protocol_version": PROTOCOL_VERSION,
    }
    return rendezvous_pb2.JoinRequest(**{**fields, **changed})


class TestNodes:
    def test_join_with_a_round_and_one_without(self):
        asked = events.JoinRendezvous(SESSION, "job1", NODE, 3, SETTINGS)
        assert codec.join_rendezvous(SESSION, a_join()) == asked
        waited = dataclasses.replace(asked, waited=4.5)
        assert codec.join_rendezvous(SESSION, a_join(waited_ms=4_500)) == waited
        assert codec.join_rendezvous(SESSION, a_join(round=0)) == dataclasses.replace(asked, round=0)

    def test_empty_join_is_for_the_core_to_refuse(self):
        asked = codec.join_rendezvous(SESSION, rendezvous_pb2.JoinRequest(protocol_version=PROTOCOL_VERSION))
        assert (asked.run_id, asked.node, asked.attempt, asked.round) == ("", NodeInfo("", "", 0), 0, None)

    @pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
    def test_join_of_another_protocol_is_refused(self, version: int):
        with pytest.raises(Refusal) as caught:
            codec.join_rendezvous(SESSION, a_join(protocol_version=version))
        assert caught.value.reason is Reason.PROTOCOL_VERSION

    @pytest.mark.parametrize(
        ("message", "encoded"),
        [
            (
                Standing(NodeStanding.WAITING, 7, "wait"),
                {
                    "standing": rendezvous_pb2.Standing(
                        standing=rendezvous_pb2.NODE_STANDING_WAITING, round=7, message="wait"
                    )
                },
            ),
            (
                RoundComplete(0, 0, 2),
                {"round_complete": rendezvous_pb2.RoundComplete(round=0, rank=0, world_size=2)},
            ),
            (NodesWaiting(0), {"nodes_waiting": rendezvous_pb2.NodesWaiting(count=0)}),
            (CLOSED, {"closed": CLOSED_PB}),
        ],
    )
    def test_messages_to_a_node_are_converted(self, message: object, encoded: dict[str, Any]):
        response = codec.join_response(message)  # type: ignore[arg-type]
        assert response == rendezvous_pb2.JoinResponse(**encoded)
        assert response.WhichOneof("message") == next(iter(encoded))

    def test_every_standing_has_its_word_on_the_wire(self):
        for standing in NodeStanding:
            encoded = codec.join_response(Standing(standing, 0, "")).standing.standing
            assert rendezvous_pb2.NodeStanding.Name(encoded) == f"NODE_STANDING_{standing.name}"

    def test_message_that_is_not_for_nodes_is_an_error(self):
        with pytest.raises(TypeError, match="not for a node"):
            codec.join_response(Welcome(1, 10, 1, ()))

    def test_session_hears_that_its_run_is_closed(self):
        assert encode(CLOSED).closed == CLOSED_PB

    def test_rendezvous_as_people_see_it(self):
        view = views.RendezvousView(
            run_id="job1",
            round=7,
            complete=True,
            settings=SETTINGS,
            nodes=(
                views.NodeView(
                    info=NODE, standing=NodeStanding.PARTICIPANT, rank=0, connected=False, since=2.5
                ),
                views.NodeView(
                    info=NODE, standing=NodeStanding.WAITING, rank=None, connected=True, since=0.0
                ),
            ),
            departed=(Departed(NODE, 6, "left", 95.0),),
            now=100.0,
            rounds=(RoundRecord("job1", 7, 2, 1_700_000_000.25, 31.25),),
            closed=CLOSED,
            stopped=None,
            message="complete",
        )
        shown = rendezvous_to_pb(view)
        assert (shown.run_id, shown.round, shown.complete, shown.message) == ("job1", 7, True, "complete")
        assert (shown.min_nodes, shown.max_nodes, shown.closed) == (2, 4, CLOSED_PB)
        first, second = shown.nodes
        assert (first.node, first.rank, first.connected, first.since_ms) == (NODE_PB, 0, False, 2_500)
        assert (first.HasField("rank"), second.HasField("rank")) == (True, False)
        assert (second.standing, second.connected) == (rendezvous_pb2.NODE_STANDING_WAITING, True)
        assert list(shown.departed) == [
            rendezvous_pb2.DepartedNode(node=NODE_PB, round=6, reason="left", since_ms=5_000)
        ]
        (one,) = shown.rounds
        assert (one.round, one.world_size, one.join_ms) == (7, 2, 31_250)
        assert one.completed_at == CLOSED_PB.closed_at

    def test_rendezvous_without_nodes(self):
        view = views.RendezvousView(
            run_id="job1",
            round=0,
            complete=False,
            settings=None,
            nodes=(),
            departed=(),
            now=0.0,
            rounds=(),
            closed=None,
            stopped=None,
            message="nobody",
        )
        shown = rendezvous_to_pb(view)
        assert shown == rendezvous_pb2.Rendezvous(run_id="job1", message="nobody")
        assert not shown.HasField("closed")
