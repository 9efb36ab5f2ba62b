"""``muster save``: what is asked for, waited for and withdrawn, and how it is said."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from muster.service.cli.actions import waiting as module
from muster.service.cli.failure import Exit
from muster.service.formatting.requested_saves import asked_text, save_text, time_left
from muster.v1 import run_pb2
from muster.v1.run_pb2_grpc import RunServiceServicer, add_RunServiceServicer_to_server
from tests.support.grpc_server import serving
from tests.unit.service.cli.test_main import invoke


def save(state: int, number: int = 1, **more: Any) -> run_pb2.Save:
    asked_at = Timestamp(seconds=1_700_000_000)
    found = run_pb2.Save(number=number, by="ann@login", reason="a drain", asked_at=asked_at)
    found.state = run_pb2.SaveState.ValueType(state)
    found.MergeFrom(run_pb2.Save(**more))
    return found


ASKED = save(run_pb2.SAVE_STATE_ASKED)
DONE = save(run_pb2.SAVE_STATE_DONE, step=412, ended_at=Timestamp(seconds=1_700_000_014), stop=True)


class Runs(RunServiceServicer):
    """A coordinator that has one save, which becomes what the test wants at each look."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.asked: list[run_pb2.RequestSaveRequest | run_pb2.CancelSaveRequest] = []
        self.looks = [ASKED]
        self.on_node: list[run_pb2.DrainedRun] = []
        self.drained: list[run_pb2.DrainNodeRequest] = []

    def RequestSave(  # noqa: N802
        self, request: run_pb2.RequestSaveRequest, context: grpc.ServicerContext
    ) -> run_pb2.RequestSaveResponse:
        self.asked.append(request)
        return run_pb2.RequestSaveResponse(save=ASKED)

    def DrainNode(  # noqa: N802
        self, request: run_pb2.DrainNodeRequest, context: grpc.ServicerContext
    ) -> run_pb2.DrainNodeResponse:
        self.drained.append(request)
        return run_pb2.DrainNodeResponse(runs=self.on_node)

    def CancelSave(  # noqa: N802
        self, request: run_pb2.CancelSaveRequest, context: grpc.ServicerContext
    ) -> run_pb2.CancelSaveResponse:
        self.asked.append(request)
        return run_pb2.CancelSaveResponse(save=save(run_pb2.SAVE_STATE_WITHDRAWN))

    def Get(  # noqa: N802
        self, request: run_pb2.RunServiceGetRequest, context: grpc.ServicerContext
    ) -> run_pb2.RunServiceGetResponse:
        shown = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return run_pb2.RunServiceGetResponse(run=run_pb2.Run(run_id="job1", save=shown))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.0)
    service = Runs()  # type: ignore[abstract]
    with serving(service, add_RunServiceServicer_to_server) as service.endpoint:
        yield service


def test_it_asks_and_says_how_it_stands(runs: Runs):
    result = invoke("save", "job1", "--stop", "--reason=a drain", f"--endpoint={runs.endpoint}")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "run job1: save 1: asked for; the ranks have not agreed on a step\n"
    (asked,) = runs.asked
    assert isinstance(asked, run_pb2.RequestSaveRequest)
    assert (asked.run_id, asked.stop, asked.reason) == ("job1", True, "a drain")
    assert "@" in asked.by


def test_it_waits_until_all_are_done(runs: Runs):
    runs.looks = [ASKED, save(run_pb2.SAVE_STATE_AGREED, step=412), DONE]
    result = invoke("save", "job1", "--wait=60", f"--endpoint={runs.endpoint}")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "run job1: save 1 at step 412: done by all ranks, 14 s after it was asked for; "
        "training ends after it\n"
    )
    assert runs.looks == [DONE]


def test_a_later_request_stands_for_this_one(runs: Runs):
    runs.looks = [save(run_pb2.SAVE_STATE_ASKED, number=2), save(run_pb2.SAVE_STATE_DONE, number=2)]
    result = invoke("save", "job1", "--wait=60", f"--endpoint={runs.endpoint}")
    assert (result.exit_code, "save 2: done" in result.stdout) == (0, True)


def test_it_does_not_wait_for_ever(runs: Runs):
    result = invoke("save", "job1", "--wait=0.001", f"--endpoint={runs.endpoint}")
    assert result.exit_code == Exit.TIMED_OUT
    assert "not done within 1 ms" in result.stderr
    assert "next: muster stack job1" in result.stderr


def test_wait_counts_down_to_the_deadline_and_names_late_ranks(runs: Runs):
    deadline = Timestamp(seconds=int(time.time()) + 86_400)
    agreed = save(run_pb2.SAVE_STATE_AGREED, step=412, deadline=deadline)
    late = save(
        run_pb2.SAVE_STATE_AGREED, step=412, deadline=deadline, late="rank that had not saved: rank 3"
    )
    runs.looks = [save(run_pb2.SAVE_STATE_ASKED, deadline=deadline), agreed, agreed, late]
    result = invoke("save", "job1", "--deadline=87", "--wait=0.2", f"--endpoint={runs.endpoint}")
    assert result.exit_code == Exit.TIMED_OUT
    first, second = result.stderr.splitlines()[:2]
    assert re.fullmatch(r"run job1: save 1: asked for; .* on a step; 8\d{4} s left", first)
    assert re.fullmatch(r"run job1: save 1 at step 412: agreed on; .*; 8\d{4} s left", second)
    assert result.stderr.splitlines()[3] == "  rank that had not saved: rank 3"
    (asked,) = runs.asked
    assert isinstance(asked, run_pb2.RequestSaveRequest)
    assert asked.deadline_ms == 87_000


def test_wait_ends_when_the_save_is_withdrawn(runs: Runs):
    runs.looks = [save(run_pb2.SAVE_STATE_WITHDRAWN)]
    result = invoke("save", "job1", "--wait=60", f"--endpoint={runs.endpoint}")
    assert (result.exit_code, "withdrawn" in result.stderr) == (Exit.CLOSED, True)


def test_cancel_withdraws_the_request(runs: Runs):
    result = invoke("save", "job1", "--cancel", "-o", "json", f"--endpoint={runs.endpoint}")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["state"] == "SAVE_STATE_WITHDRAWN"
    (asked,) = runs.asked
    assert isinstance(asked, run_pb2.CancelSaveRequest)


@pytest.mark.parametrize("more", [["--stop"], ["--wait=1"], ["--deadline=1"]])
def test_cancel_cannot_be_combined_with_stop_wait_or_deadline(runs: Runs, more: list[str]):
    result = invoke("save", "job1", "--cancel", *more, f"--endpoint={runs.endpoint}")
    assert (result.exit_code, runs.asked) == (Exit.USAGE, [])


def test_text_tells_time_left_and_how_late_a_save_was():
    deadline = Timestamp(seconds=1_700_000_010)
    assert time_left(ASKED, 1_700_000_000) == ""
    assert time_left(save(run_pb2.SAVE_STATE_ASKED, deadline=deadline), 1_700_000_000) == "10 s left"
    assert "passed 2 s ago" in time_left(save(run_pb2.SAVE_STATE_ASKED, deadline=deadline), 1_700_000_012)
    done = save(run_pb2.SAVE_STATE_DONE, deadline=deadline, ended_at=Timestamp(seconds=1_700_000_014))
    assert time_left(done, 1_700_000_020) == ""
    assert save_text(done).endswith("14 s after it was asked for, 4 s after its deadline")
    assert "deadline" not in save_text(save(run_pb2.SAVE_STATE_LAPSED, deadline=deadline, ended_at=deadline))


# ---------------------------------------------------------------------- drain


def test_drain_asks_all_runs_on_the_node_to_stop(runs: Runs):
    runs.on_node = [run_pb2.DrainedRun(run_id=one, save=ASKED) for one in ("job1", "job2")]
    result = invoke("drain", "node-1", "--deadline=120", f"--endpoint={runs.endpoint}")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "run job1: save 1: asked for; the ranks have not agreed on a step\n"
        "run job2: save 1: asked for; the ranks have not agreed on a step\n"
    )
    (asked,) = runs.drained
    assert (asked.node_name, asked.stop, asked.deadline_ms) == ("node-1", True, 120_000)
    assert asked.reason == "node node-1 is drained"


def test_drain_waits_until_all_runs_have_saved(runs: Runs):
    runs.on_node = [run_pb2.DrainedRun(run_id=one, save=ASKED) for one in ("job1", "job2")]
    runs.looks = [ASKED, DONE]
    result = invoke("drain", "node-1", "--wait=60", f"--endpoint={runs.endpoint}")
    assert result.exit_code == 0, result.stderr
    assert [line.partition(",")[0] for line in result.stdout.splitlines()] == [
        "run job1: save 1 at step 412: done by all ranks",
        "run job2: save 1 at step 412: done by all ranks",
    ]


def test_drain_names_every_run_that_has_not_saved(runs: Runs):
    runs.on_node = [run_pb2.DrainedRun(run_id=one, save=ASKED) for one in ("job1", "job2")]
    result = invoke("drain", "node-1", "--wait=0.001", f"--endpoint={runs.endpoint}")
    assert result.exit_code == Exit.TIMED_OUT
    assert "run job1: " in result.stderr
    assert "run job2: " in result.stderr


def test_drain_of_a_node_without_runs_does_nothing(runs: Runs):
    result = invoke("drain", "node-9", f"--endpoint={runs.endpoint}")
    assert result.exit_code == 0
    assert result.stdout.startswith("no run has a process on node node-9, or an agent in a complete round.")
    shown = invoke("drain", "node-9", "-o", "json", f"--endpoint={runs.endpoint}")
    assert json.loads(shown.stdout) == {"runs": []}


def test_requester_name_is_shown_without_control_characters():
    assert asked_text(save(1, by="eve\x1b[31m")).count("\x1b") == 0
    assert asked_text(ASKED) == "ann@login: a drain"
    assert save_text(save(0)).startswith("save 1: unknown")
