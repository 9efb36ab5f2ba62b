"""``muster replace``: its steps, what it says, and how it ends."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from lab.patience import PATIENCE
from muster.service.cli.actions import replace as module
from muster.service.cli.failure import Exit
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc.errors import grpc_status
from muster.v1 import common_pb2, rendezvous_pb2, run_pb2
from muster.v1.rendezvous_pb2_grpc import (
    RendezvousServiceServicer,
    add_RendezvousServiceServicer_to_server,
)
from muster.v1.run_pb2_grpc import RunServiceServicer, add_RunServiceServicer_to_server
from tests.support.grpc_server import serving
from tests.unit.service.cli.test_main import invoke

PARTICIPANT = rendezvous_pb2.NODE_STANDING_PARTICIPANT
WAITING = rendezvous_pb2.NODE_STANDING_WAITING
REDUNDANT = rendezvous_pb2.NODE_STANDING_REDUNDANT
ASKED, DONE = run_pb2.SAVE_STATE_ASKED, run_pb2.SAVE_STATE_DONE


def node(name: str, standing: int, **more: Any) -> rendezvous_pb2.NodeView:
    view = rendezvous_pb2.NodeView(
        node=rendezvous_pb2.Node(address=f"10.0.0.{name}", name=f"node-{name}", pid=7)
    )
    view.standing = rendezvous_pb2.NodeStanding.ValueType(standing)
    view.connected = more.get("connected", True)
    return view


def meeting(round: int, *nodes: rendezvous_pb2.NodeView, **more: Any) -> rendezvous_pb2.Rendezvous:
    shown = rendezvous_pb2.Rendezvous(
        run_id="job1", round=round, complete=True, min_nodes=2, max_nodes=2, nodes=nodes, message="it is so"
    )
    shown.rounds.add(round=round, world_size=2)
    shown.MergeFrom(rendezvous_pb2.Rendezvous(**more))
    return shown


A, B, C = (node(name, PARTICIPANT) for name in "123")
SPARE = node("3", REDUNDANT)
BEFORE = meeting(0, A, B, SPARE)
BETWEEN = meeting(0, B, node("3", WAITING))
AFTER = meeting(1, C, B)


class Coordinator(RendezvousServiceServicer, RunServiceServicer):
    """A coordinator that shows what the test wants, at each look the next."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.meetings = [BEFORE]
        """The looks before the eviction."""
        self.later = [BETWEEN, AFTER]
        """The looks after it."""
        self.saves: list[tuple[int, int]] = [(ASKED, 1), (DONE, 1)]
        """State and number of the save, at each look."""
        self.stops = False
        """Whether training ends after the save."""
        self.refusals: list[Refusal] = []
        self.asked: list[run_pb2.RequestSaveRequest] = []
        self.evicted: list[rendezvous_pb2.EvictNodeRequest] = []

    def Get(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if isinstance(request, rendezvous_pb2.RendezvousServiceGetRequest):
            looks = self.later if self.evicted else self.meetings
            shown = looks.pop(0) if len(looks) > 1 else looks[0]
            return rendezvous_pb2.RendezvousServiceGetResponse(rendezvous=shown)
        state, number = self.saves.pop(0) if len(self.saves) > 1 else self.saves[0]
        at = Timestamp(seconds=1_700_000_000)
        save = run_pb2.Save(number=number, by="ann", asked_at=at, stop=self.stops)
        save.state = run_pb2.SaveState.ValueType(state)
        if state == DONE:
            save.MergeFrom(run_pb2.Save(step=9, ended_at=at))
        return run_pb2.RunServiceGetResponse(run=run_pb2.Run(run_id="job1", save=save))

    def RequestSave(  # noqa: N802
        self, request: run_pb2.RequestSaveRequest, context: grpc.ServicerContext
    ) -> run_pb2.RequestSaveResponse:
        self.asked.append(request)
        return run_pb2.RequestSaveResponse(save=run_pb2.Save(number=1))

    def EvictNode(  # noqa: N802
        self, request: rendezvous_pb2.EvictNodeRequest, context: grpc.ServicerContext
    ) -> rendezvous_pb2.EvictNodeResponse:
        if self.refusals:
            context.abort_with_status(grpc_status(self.refusals.pop(0)))
        if not request.dry_run:
            self.evicted.append(request)
        return rendezvous_pb2.EvictNodeResponse(evicted=[A], spares=1)


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.0)
    service = Coordinator()  # type: ignore[abstract]
    # Both services have a method Get, whose request tells them apart.
    both = (add_RendezvousServiceServicer_to_server, add_RunServiceServicer_to_server)
    with serving(service, *both) as service.endpoint:
        yield service


def replace(coordinator: Coordinator, *arguments: str, name: str = "node-1") -> Any:
    return invoke("replace", "job1", name, *arguments, f"--endpoint={coordinator.endpoint}")


@pytest.mark.parametrize("name", ["node-1", "10.0.0.1"])
def test_it_saves_evicts_and_waits_for_the_round_without_the_node(coordinator: Coordinator, name: str):
    result = replace(coordinator, "--reason=bad disk", f"--wait={PATIENCE}", name=name)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        f"run job1: node {name} was replaced; round 1 is complete with 2 nodes: node-3, node-2\n"
    )
    (asked,), (evicted,) = coordinator.asked, coordinator.evicted
    assert (asked.stop, asked.reason) == (False, f"node {name} is being replaced: bad disk")
    assert (evicted.node_name, evicted.reason, evicted.only_if_spare) == (name, "bad disk", True)
    assert result.stderr.splitlines() == [
        "run job1: save 1: asked for; the ranks have not agreed on a step",
        "run job1: save 1 at step 9: done by all ranks, 0 ms after it was asked for",
        f"run job1: evicting node {name}",
        "run job1: waiting for the next round: it is so",
    ]


def test_repeated_replacement_is_a_success(coordinator: Coordinator):
    coordinator.meetings = [AFTER]
    result = replace(coordinator)
    assert result.exit_code == 0
    assert result.stdout == (
        "run job1: node node-1 is not in the round; round 1 is complete with 2 nodes: node-3, node-2\n"
    )
    assert (coordinator.asked, coordinator.evicted) == ([], [])


def test_repetition_after_an_interruption_waits_for_the_round(coordinator: Coordinator):
    coordinator.meetings = [BETWEEN, BETWEEN, AFTER]
    result = replace(coordinator, "-o", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["round"] == "1"


def test_it_waits_for_a_spare_of_another_node(coordinator: Coordinator):
    own, away = node("1", REDUNDANT), node("3", REDUNDANT, connected=False)
    coordinator.meetings = [meeting(0, A, B, own), meeting(0, A, B, away), BEFORE]
    result = replace(coordinator)
    assert result.exit_code == 0
    assert result.stderr.startswith("run job1: waiting for a node on standby: 0 of 1\n")


@pytest.mark.parametrize(
    ("nodes", "why"), [((A, B), ""), ((A,), " Its round has room: a node stands by only beyond 2 nodes.")]
)
def test_it_is_refused_without_a_spare(
    coordinator: Coordinator, nodes: tuple[rendezvous_pb2.NodeView, ...], why: str
):
    coordinator.meetings = [meeting(0, *nodes)]
    result = replace(coordinator, "--wait=0")
    assert result.exit_code == Exit.TIMED_OUT
    assert (
        f"Error: 0 of 1 nodes stand by for node node-1 of run job1.{why} Nothing was evicted" in result.stderr
    )
    assert "next: start an agent on another node" in result.stderr
    assert coordinator.asked == []


def test_spare_that_goes_meanwhile_is_waited_for_again(coordinator: Coordinator):
    coordinator.refusals = [Refusal(Reason.NO_SPARE, "none")]
    coordinator.saves = [(DONE, 1)]
    assert replace(coordinator).exit_code == 0
    assert (len(coordinator.asked), len(coordinator.evicted)) == (2, 1)


def test_spare_that_comes_and_goes_is_not_waited_for_longer_than_was_given(coordinator: Coordinator):
    coordinator.refusals = [Refusal(Reason.NO_SPARE, "none")]
    coordinator.saves = [(DONE, 1)]
    result = replace(coordinator, "--wait=0")
    assert (result.exit_code, coordinator.evicted) == (Exit.FAILED, [])


def test_agent_of_the_node_under_another_address_is_no_spare(coordinator: Coordinator):
    other = node("1", REDUNDANT)
    other.node.address = "10.1.0.1"
    coordinator.meetings = [meeting(0, A, B, other)]
    assert replace(coordinator, "--wait=0", name="10.0.0.1").exit_code == Exit.TIMED_OUT
    assert coordinator.asked == []


def test_node_that_joins_while_the_round_forms_is_replaced(coordinator: Coordinator):
    """A coordinator that has just started knows no nodes of the round that forms."""
    forming = meeting(1, B)
    forming.complete = False
    coordinator.meetings = [forming, BEFORE]
    coordinator.saves = [(DONE, 1)]
    result = replace(coordinator)
    assert result.exit_code == 0, result.stderr
    assert len(coordinator.evicted) == 1


def test_node_is_evicted_again_if_its_new_agent_joins_before_the_spare(coordinator: Coordinator):
    coordinator.later, coordinator.saves = [BETWEEN, BEFORE, BEFORE, BETWEEN, AFTER], [(DONE, 1)]
    assert replace(coordinator).exit_code == 0
    assert len(coordinator.evicted) == 2


def test_node_that_another_command_evicts_meanwhile_is_replaced(coordinator: Coordinator):
    coordinator.refusals = [Refusal(Reason.NODE_NOT_FOUND, "gone")]
    coordinator.meetings = [BEFORE, BETWEEN, AFTER]
    assert replace(coordinator).exit_code == 0


def test_any_other_refusal_ends_the_command(coordinator: Coordinator):
    coordinator.refusals = [Refusal(Reason.ROLE_TOO_LOW, "you may not")]
    result = replace(coordinator)
    assert (result.exit_code, "you may not" in result.stderr) == (Exit.FAILED, True)


def test_save_that_fails_is_asked_for_again(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "ASK_AGAIN", 0.0)
    coordinator.saves = [(ASKED, 1), (ASKED, 1), (DONE, 1)]
    assert replace(coordinator).exit_code == 0
    assert len(coordinator.asked) == 3


@pytest.mark.parametrize(
    ("state", "stops", "code", "text"),
    [
        (run_pb2.SAVE_STATE_WITHDRAWN, False, Exit.CLOSED, "withdrawn"),
        (ASKED, True, Exit.CLOSED, "training is to end after it. Nothing was evicted"),
        (ASKED, False, Exit.TIMED_OUT, "replace a node that hangs with --no-save"),
    ],
)
def test_node_is_not_evicted_without_a_save(
    coordinator: Coordinator, state: int, stops: bool, code: Exit, text: str
):
    coordinator.saves, coordinator.stops = [(state, 1)], stops
    result = replace(coordinator, "--wait=0")
    assert (result.exit_code, coordinator.evicted) == (code, [])
    assert text in result.stderr


def test_node_that_hangs_is_replaced_without_a_save(coordinator: Coordinator):
    assert replace(coordinator, "--no-save").exit_code == 0
    assert (coordinator.asked, len(coordinator.evicted)) == ([], 1)


def test_round_that_does_not_come_together_is_a_timeout(coordinator: Coordinator):
    coordinator.later, coordinator.saves = [BETWEEN], [(DONE, 1)]
    result = replace(coordinator, "--wait=0")
    assert result.exit_code == Exit.TIMED_OUT
    assert "node node-1 has left run job1, and no round is complete without it" in result.stderr
    assert "next: muster get rounds job1" in result.stderr


@pytest.mark.parametrize(
    ("shown", "code", "text"),
    [
        (meeting(0, A, closed=common_pb2.Closed(by="ops")), Exit.CLOSED, "was closed by ops"),
        (meeting(0, A, stopped=common_pb2.Stopped(by="ops", step=3)), Exit.CLOSED, "was stopped at step 3"),
        (rendezvous_pb2.Rendezvous(run_id="job1"), Exit.FAILED, "no node has joined run job1"),
    ],
)
def test_run_without_further_rounds_is_an_error(
    coordinator: Coordinator, shown: rendezvous_pb2.Rendezvous, code: Exit, text: str
):
    coordinator.meetings = [shown]
    result = replace(coordinator)
    assert (result.exit_code, text in result.stderr) == (code, True)


def test_dry_run_shows_the_plan(coordinator: Coordinator):
    result = replace(coordinator, "--dry-run")
    assert result.exit_code == 0
    assert result.stdout == (
        "would replace node node-1 of run job1\n  agent 10.0.0.1 (pid 7) is evicted\n"
        "  1 node of other machines on standby\n"
    )
    assert coordinator.evicted == []


def test_coordinator_that_is_away_is_tried_again(coordinator: Coordinator):
    coordinator.refusals = [Refusal(Reason.COORDINATOR_DRAINING, "it ends")] * 2
    assert replace(coordinator, "--timeout=0.3").exit_code == 0
