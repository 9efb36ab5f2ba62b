"""What a node says to get a place, and what follows from the answers; no thread, no clock, no connection."""

from dataclasses import replace

import pytest

from muster.v1 import common_pb2
from muster.v1 import rendezvous_pb2 as pb
from muster.worker.errors import ConnectError, MusterError, RefusedError
from muster.worker.node.dialogue import JoinDialogue, Place
from tests.unit.worker.node.joined_node import CONFIG

WAITS = pb.JoinResponse(standing=pb.Standing(standing=pb.NODE_STANDING_WAITING, message="waits"))
STANDS_BY = pb.JoinResponse(standing=pb.Standing(standing=pb.NODE_STANDING_REDUNDANT, message="stands by"))
COMPLETE = pb.JoinResponse(round_complete=pb.RoundComplete(round=5, rank=1, world_size=3))


def joining(*heard: pb.JoinResponse) -> JoinDialogue:
    """A dialogue whose first attempt has heard some messages at time 100."""
    dialogue = JoinDialogue(CONFIG)
    dialogue.join()
    for response in heard:
        dialogue.handle(response, 100.0)
    return dialogue


def refused(dialogue: JoinDialogue, reason: str) -> JoinDialogue:
    dialogue.refused(RefusedError("refused", reason), 0.0)
    return dialogue


def test_request_names_the_round_only_while_the_node_has_a_place():
    dialogue = joining(COMPLETE)
    assert dialogue.place == Place(5, 1, 3)
    assert (dialogue.request(0.0).attempt, dialogue.request(0.0).round) == (1, 5)
    dialogue.join()
    assert (dialogue.request(0.0).attempt, dialogue.request(0.0).HasField("round")) == (2, False)


@pytest.mark.parametrize(("name", "sent"), [("", ""), ("node-0", ""), ("gpu-7", "gpu-7")])
def test_request_has_a_node_name_if_it_differs_from_the_address(name: str, sent: str):
    assert JoinDialogue(replace(CONFIG, name=name)).request(0.0).node.name == sent


def test_request_states_how_long_the_node_has_waited():
    dialogue = joining()
    assert dialogue.request(500.0).waited_ms == 0, "no coordinator has admitted it yet"
    dialogue.handle(WAITS, 100.0)
    dialogue.handle(WAITS, 104.0)
    assert dialogue.request(107.5).waited_ms == 7_500
    dialogue.handle(COMPLETE, 108.0)
    assert dialogue.request(109.0).waited_ms == 0, "it has its place"
    dialogue.join()
    assert dialogue.request(110.0).waited_ms == 0, "another attempt"


def test_standby_node_waits_from_its_admission():
    dialogue = joining(WAITS, STANDS_BY)
    assert dialogue.request(600.0).waited_ms == 0
    dialogue.handle(WAITS, 600.0)
    assert dialogue.request(603.0).waited_ms == 3_000


@pytest.mark.parametrize(
    ("heard", "reason", "transient"),
    [
        ([], "SESSION_REPLACED", True),
        ([], "LIMIT_EXCEEDED", False),
        ([WAITS], "LIMIT_EXCEEDED", True),
        ([WAITS], "RUN_CLOSED", False),
        ([COMPLETE], "PROTOCOL_VERSION", True),
        ([COMPLETE], "SUPERSEDED", False),
        ([COMPLETE], "NODE_REMOVED", False),
        ([COMPLETE], "NODE_EVICTED", False),
    ],
)
def test_only_some_refusals_end_an_attempt(heard: list[pb.JoinResponse], reason: str, transient: bool):
    assert joining(*heard).is_transient(reason) is transient


def test_removed_node_returns_under_another_incarnation():
    dialogue = joining(COMPLETE)
    before = dialogue.node.incarnation
    refused(dialogue, "NODE_REMOVED")
    assert (dialogue.done, dialogue.fenced, dialogue.error) == (True, True, None)
    assert dialogue.node.incarnation != before
    dialogue.join()
    assert (dialogue.done, dialogue.fenced) == (False, False)


def test_standby_node_of_a_closed_run_was_not_needed():
    error = refused(joining(STANDS_BY), "RUN_CLOSED").error
    assert isinstance(error, RefusedError)
    assert error.reason == "NODE_NOT_NEEDED"


def test_closed_state_is_known_while_the_coordinator_tells_it():
    assert joining().knows_closed is None
    dialogue = joining(WAITS)
    assert dialogue.knows_closed is False
    assert refused(dialogue, "RENDEZVOUS_TIMED_OUT").knows_closed is None
    assert refused(joining(WAITS), "RUN_CLOSED").knows_closed is True
    dialogue.join()
    dialogue.handle(pb.JoinResponse(closed=common_pb2.Closed(by="ops")), 0.0)
    assert dialogue.knows_closed is True


def test_only_a_known_node_with_a_place_owes_a_goodbye():
    assert not JoinDialogue(CONFIG).leave()
    assert not joining().leave(), "the coordinator never answered"
    assert not refused(joining(WAITS), "RENDEZVOUS_TIMED_OUT").leave()
    dialogue = joining(WAITS)
    assert dialogue.leave()
    assert not dialogue.leave()
    assert isinstance(dialogue.error, MusterError)


def test_first_error_of_an_attempt_stays_when_the_node_leaves():
    dialogue = joining(WAITS)
    dialogue.error = error = ConnectError("away")
    dialogue.leave()
    assert dialogue.error is error
