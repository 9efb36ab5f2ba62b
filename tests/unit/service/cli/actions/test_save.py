"""``muster save``: what is asked for, waited for and withdrawn, and how it is said."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from muster.service.cli.actions import save as module
from muster.service.cli.failure import Exit
from muster.service.formatting.requested_saves import asked_text, save_text
from muster.v1 import run_pb2
from muster.v1.run_pb2_grpc import RunServiceServicer, add_RunServiceServicer_to_server
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

    def RequestSave(  # noqa: N802
        self, request: run_pb2.RequestSaveRequest, context: grpc.ServicerContext
    ) -> run_pb2.RequestSaveResponse:
        self.asked.append(request)
        return run_pb2.RequestSaveResponse(save=ASKED)

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
    serving = Runs()  # type: ignore[abstract]
    server = grpc.server(ThreadPoolExecutor(1))
    add_RunServiceServicer_to_server(serving, server)
    serving.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield serving
    server.stop(None).wait()


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


def test_what_was_withdrawn_is_not_waited_for(runs: Runs):
    runs.looks = [save(run_pb2.SAVE_STATE_WITHDRAWN)]
    result = invoke("save", "job1", "--wait=60", f"--endpoint={runs.endpoint}")
    assert (result.exit_code, "withdrawn" in result.stderr) == (Exit.CLOSED, True)


def test_it_withdraws(runs: Runs):
    result = invoke("save", "job1", "--cancel", "-o", "json", f"--endpoint={runs.endpoint}")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["state"] == "SAVE_STATE_WITHDRAWN"
    (asked,) = runs.asked
    assert isinstance(asked, run_pb2.CancelSaveRequest)


@pytest.mark.parametrize("more", [["--stop"], ["--wait=1"]])
def test_what_is_withdrawn_cannot_be_asked_for_at_once(runs: Runs, more: list[str]):
    result = invoke("save", "job1", "--cancel", *more, f"--endpoint={runs.endpoint}")
    assert (result.exit_code, runs.asked) == (Exit.USAGE, [])


def test_who_asked_is_printable():
    assert asked_text(save(1, by="eve\x1b[31m")).count("\x1b") == 0
    assert asked_text(ASKED) == "ann@login: a drain"
    assert save_text(save(0)).startswith("save 1: unknown")
