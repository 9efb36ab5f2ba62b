"""``--wait`` of ``muster save`` and ``muster drain``: each run is named, and its own save counts."""

import json
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial

import grpc
import pytest

from muster.service.cli.actions import waiting as module
from muster.service.cli.failure import Exit
from muster.v1 import run_pb2
from muster.v1.run_pb2_grpc import RunServiceServicer, add_RunServiceServicer_to_server
from tests.support.grpc_server import serving
from tests.unit.service.cli.actions.test_save import ASKED, DONE, save
from tests.unit.service.cli.test_main import invoke

STOP = save(run_pb2.SAVE_STATE_ASKED, stop=True)
PLAIN_DONE = save(run_pb2.SAVE_STATE_DONE, number=2, step=412)
"""What became of a plain request that went on after the request to stop had lapsed."""


class Runs(RunServiceServicer):
    """A coordinator with two runs on a node."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.looks: dict[str, Callable[[], run_pb2.Save | None]] = {}
        self.asked = STOP

    def RequestSave(  # noqa: N802
        self, request: run_pb2.RequestSaveRequest, context: grpc.ServicerContext
    ) -> run_pb2.RequestSaveResponse:
        return run_pb2.RequestSaveResponse(save=self.asked)

    def DrainNode(  # noqa: N802
        self, request: run_pb2.DrainNodeRequest, context: grpc.ServicerContext
    ) -> run_pb2.DrainNodeResponse:
        runs = [run_pb2.DrainedRun(run_id=one, save=self.asked) for one in sorted(self.looks)]
        return run_pb2.DrainNodeResponse(runs=runs)

    def Get(  # noqa: N802
        self, request: run_pb2.RunServiceGetRequest, context: grpc.ServicerContext
    ) -> run_pb2.RunServiceGetResponse:
        found = self.looks[request.run_id]()
        if found is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no run {request.run_id} is known")
            raise AssertionError
        return run_pb2.RunServiceGetResponse(run=run_pb2.Run(run_id=request.run_id, save=found))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.0)
    service = Runs()  # type: ignore[abstract]
    with serving(service, add_RunServiceServicer_to_server) as service.endpoint:
        yield service


def test_run_that_is_forgotten_meanwhile_does_not_end_the_wait_for_the_others(runs: Runs):
    """job1 was forgotten. The command ends at once, and says nothing of job2, which has not saved."""
    looked: list[str] = []

    def look() -> run_pb2.Save:
        looked.append("job2")
        return DONE

    runs.looks = {"job1": lambda: None, "job2": look}
    result = invoke("drain", "node-1", "--wait=5", f"--endpoint={runs.endpoint}")
    assert result.exit_code != 0
    assert looked, result.stderr


@pytest.mark.parametrize("command", [("save", "job1", "--stop"), ("drain", "node-1")])
def test_plain_save_is_not_taken_for_the_stop_that_was_waited_for(runs: Runs, command: tuple[str, ...]):
    """The stop lapsed, and the plain request that it covered went on and is done."""
    runs.looks = {"job1": lambda: PLAIN_DONE}
    result = invoke(*command, "--wait=5", f"--endpoint={runs.endpoint}")
    assert result.exit_code == Exit.CLOSED, result.stdout


def test_json_is_printed_when_one_run_was_not_saved(runs: Runs):
    """With -o json, a program learns nothing on stdout of the runs that have saved."""
    runs.looks = {"job1": lambda: ASKED, "job2": lambda: DONE}
    result = invoke("drain", "node-1", "--wait=0.05", "-o", "json", f"--endpoint={runs.endpoint}")
    assert result.exit_code == Exit.TIMED_OUT
    states = {
        one["run_id"]: one["save"]["state"] for one in json.loads(result.stdout or '{"runs": []}')["runs"]
    }
    assert states.get("job2") == "SAVE_STATE_DONE"


def test_withdrawn_run_does_not_hide_that_another_one_timed_out(runs: Runs):
    """job1 withdrawn (5), job2 not saved in time (4): the exit code depends on the order of names."""
    withdrawn = save(run_pb2.SAVE_STATE_WITHDRAWN)
    codes = []
    for first, second in ((withdrawn, ASKED), (ASKED, withdrawn)):
        runs.looks = {"job1": partial(copy, first), "job2": partial(copy, second)}
        codes.append(invoke("drain", "node-1", "--wait=0.05", f"--endpoint={runs.endpoint}").exit_code)
    assert codes[0] == codes[1]


@pytest.mark.parametrize(("interval", "lines"), [(0.0, 3), (3600.0, 1)])
def test_line_of_an_unchanged_save_is_shown_again_after_the_interval(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, interval: float, lines: int
):
    monkeypatch.setattr(module, "COUNTDOWN_INTERVAL", interval)
    looks = iter([ASKED, ASKED, ASKED, DONE])
    runs.looks = {"job1": lambda: next(looks)}
    result = invoke("save", "job1", "--wait=60", f"--endpoint={runs.endpoint}")
    assert result.exit_code == 0, result.stderr
    shown = "run job1: save 1: asked for; the ranks have not agreed on a step"
    assert result.stderr.splitlines() == [shown] * lines


def test_deadline_below_a_millisecond_is_not_dropped(runs: Runs):
    seen: list[int] = []

    def request_save(
        request: run_pb2.RequestSaveRequest, context: grpc.ServicerContext
    ) -> run_pb2.RequestSaveResponse:
        seen.append(request.deadline_ms)
        return run_pb2.RequestSaveResponse(save=STOP)

    runs.RequestSave = request_save  # type: ignore[method-assign]
    with serving(runs, add_RunServiceServicer_to_server) as endpoint:
        invoke("save", "job1", "--deadline=0.0001", f"--endpoint={endpoint}")
    assert seen == [1]
