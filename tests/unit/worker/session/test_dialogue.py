"""What a process says in its session, and what follows from the answers; no thread and no connection."""

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import any_pb2
from google.rpc.error_details_pb2 import ErrorInfo

from muster.v1 import common_pb2
from muster.v1 import session_pb2 as pb
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MusterError, RefusedError
from muster.worker.groups.group import Group, Shape
from muster.worker.groups.pending import Pending, pending
from muster.worker.session.dialogue import SessionConfig, SessionDialogue

CONFIG = SessionConfig(endpoint="h:1", run_id="job", generation=2, rank=3, host="node-0")
NOW = 100.0
WELCOME = pb.Welcome(ordinals=[7], max_payload_bytes=1000)


@pytest.fixture
def dialogue() -> SessionDialogue:
    return SessionDialogue(CONFIG)


def arriving(dialogue: SessionDialogue, prefix: str = "save", sequence: int = 4) -> Pending:
    """A group that the process has joined, with an arrival at one of its barriers."""
    arrival = pending(prefix, sequence, 9.0, CONFIG.rank, b"", None, None)
    dialogue.groups[prefix] = Group(prefix, Shape(8), sequence, pending=arrival)
    return arrival


def refusal(reason: str, **scope: object) -> pb.ConnectResponse:
    info = any_pb2.Any()
    info.Pack(ErrorInfo(reason=reason, metadata={"next_sequence": "9"}))
    return pb.ConnectResponse(refusal=pb.Refusal(message="no", error_info=info, **scope))  # type: ignore[arg-type]


def kinds(messages: list[pb.ConnectRequest]) -> list[str | None]:
    return [message.WhichOneof("message") for message in messages]


def test_hello_names_the_process_and_its_number_once_it_is_known(dialogue: SessionDialogue):
    process = dialogue.hello().hello.processes[0]
    assert (process.rank, process.host, process.ordinal) == (3, "node-0", 0)
    dialogue.welcomed(WELCOME)
    again = dialogue.hello().hello.processes[0]
    assert (again.incarnation, again.ordinal) == (process.incarnation, 7)


@pytest.mark.parametrize(("name", "sent"), [("", ""), ("node-0", ""), ("ip-10-0-0-1.ec2", "ip-10-0-0-1.ec2")])
def test_hello_has_a_node_name_if_it_differs_from_the_host(name: str, sent: str):
    dialogue = SessionDialogue(replace(CONFIG, node_name=name))
    assert dialogue.hello().hello.processes[0].node_name == sent


def test_node_name_does_not_tell_sessions_apart():
    assert replace(CONFIG, node_name="a") == CONFIG


def announcement(number: int = 1, deadline_ms: int | None = None, **more: Any) -> pb.ConnectResponse:
    return pb.ConnectResponse(save_asked=pb.SaveAsked(number=number, deadline_ms=deadline_ms, **more))


def test_deadline_of_a_save_counts_from_its_announcement(dialogue: SessionDialogue):
    for number, deadline_ms, deadline in ((1, None, None), (2, 87_500, NOW + 87.5), (3, 0, NOW)):
        dialogue.handle(announcement(number, deadline_ms), NOW)
        assert dialogue.save_asked is not None
        assert dialogue.save_asked.deadline == deadline


def test_repeated_announcement_without_news_changes_nothing(dialogue: SessionDialogue):
    dialogue.handle(announcement(deadline_ms=87_500), NOW)
    asked = dialogue.save_asked
    for again in (announcement(deadline_ms=90_000), announcement()):
        dialogue.handle(again, NOW)
        assert dialogue.save_asked is asked
    dialogue.handle(announcement(withdrawn=True), NOW)
    assert dialogue.save_asked is not None
    assert dialogue.save_asked.withdrawn


def test_welcome_sends_everything_that_is_open_again(dialogue: SessionDialogue):
    arriving(dialogue)
    dialogue.groups["other"] = Group("other", Shape(8))
    assert kinds(dialogue.welcomed(WELCOME)) == ["join_group", "arrive", "join_group"]
    assert dialogue.max_payload_bytes == 1000


def test_decision_ends_only_the_arrival_at_its_barrier(dialogue: SessionDialogue):
    arrival = arriving(dialogue)
    for sequence, decided in ((3, False), (4, True)):
        decision = common_pb2.Decision(prefix="save", sequence=sequence, outcome=common_pb2.OUTCOME_RELEASED)
        dialogue.handle(pb.ConnectResponse(decision=decision), NOW)
        assert (arrival.result is not None) is decided
    assert isinstance(arrival.result, Decision)
    assert arrival.result.outcome is Outcome.RELEASED


def test_position_of_a_joined_group_is_taken_once(dialogue: SessionDialogue):
    group = dialogue.groups["save"] = Group("save", Shape(8))
    for sequence in (5, 6):
        joined = pb.GroupJoined(prefix="save", positions=[pb.Position(rank=3, sequence=sequence)])
        dialogue.handle(pb.ConnectResponse(group_joined=joined), NOW)
    assert group.position == 5


def test_refusal_of_an_arrival_ends_it_and_moves_the_group_on(dialogue: SessionDialogue):
    arrival = arriving(dialogue)
    dialogue.handle(refusal("SEQUENCE_FORGOTTEN", prefix="save", sequence=4), NOW)
    assert isinstance(arrival.result, RefusedError)
    assert (dialogue.groups["save"].position, dialogue.fatal) == (9, None)


def test_refusal_of_a_group_ends_its_arrival_but_not_the_session(dialogue: SessionDialogue):
    arrival = arriving(dialogue)
    dialogue.handle(refusal("WORLD_SIZE_DIFFERS", prefix="save"), NOW)
    assert arrival.result is dialogue.groups["save"].error is not None
    assert dialogue.fatal is None


@pytest.mark.parametrize(
    ("reason", "welcomed", "ends"),
    [
        ("EVICTED", True, True),
        ("SESSION_REPLACED", False, False),
        ("COORDINATOR_DRAINING", False, False),
        ("LIMIT_EXCEEDED", False, True),
        ("LIMIT_EXCEEDED", True, False),
    ],
)
def test_only_some_refusals_end_a_session(dialogue: SessionDialogue, reason: str, welcomed: bool, ends: bool):
    if welcomed:
        dialogue.welcomed(WELCOME)
    dialogue.handle(refusal(reason), NOW)
    assert dialogue.done is ends


def test_unknown_process_that_closes_without_a_stream_goodbye_settled(dialogue: SessionDialogue):
    dialogue.close("done", connected=False)
    assert (dialogue.goodbye_settled, dialogue.done) == (True, True)


def test_known_process_that_closes_says_goodbye_at_the_next_welcome(dialogue: SessionDialogue):
    dialogue.welcomed(WELCOME)
    arriving(dialogue)
    dialogue.close("done", connected=False)
    assert not dialogue.done
    (message,) = dialogue.welcomed(WELCOME)
    assert message.goodbye.reason == "done"
    dialogue.goodbye_settled = True
    assert dialogue.done


def test_refusal_stays_the_error_of_a_closed_session(dialogue: SessionDialogue):
    dialogue.handle(refusal("EVICTED"), NOW)
    error = dialogue.fatal
    dialogue.close("done", connected=False)
    assert dialogue.fatal is error
    assert isinstance(error, MusterError)


def test_closed_run_is_logged_once(dialogue: SessionDialogue, caplog: pytest.LogCaptureFixture):
    for _ in range(2):
        dialogue.handle(pb.ConnectResponse(closed=common_pb2.Closed(by="ops")), NOW)
    assert str(dialogue.closed) == "ops"
    assert caplog.text.count("run job was closed by ops; barriers go on") == 1
