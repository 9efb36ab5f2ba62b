"""Which ranks ``muster stack`` asks, and what it does with the answer."""

import json
from collections.abc import Iterator

import grpc
import pytest

from muster.service.cli.failure import Exit
from muster.service.cli.views.stack import MAX_RANKS, parse_ranks
from muster.v1.insight_pb2 import Crowd, Frame, ProbedProcess, Report, StacksRequest, StacksResponse, Thread
from muster.v1.insight_pb2_grpc import InsightServiceServicer, add_InsightServiceServicer_to_server
from tests.support.grpc_server import serving
from tests.unit.service.cli.test_main import invoke


class Insight(InsightServiceServicer):
    """A coordinator that gives one answer, and keeps what it was asked."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.asked: list[StacksRequest] = []
        self.answer = StacksResponse(
            crowds=[
                Crowd(
                    members=[ProbedProcess(rank=3, host="node-0", pid=4121, report=Report())],
                    threads=[Thread(main=True, frames=[Frame(function="step", file="train.py", line=214)])],
                    line="main thread in step, train.py:214",
                )
            ]
        )

    def Stacks(self, request: StacksRequest, context: grpc.ServicerContext) -> StacksResponse:  # noqa: N802
        self.asked.append(request)
        return self.answer


@pytest.fixture
def insight() -> Iterator[Insight]:
    service = Insight()
    with serving(service, add_InsightServiceServicer_to_server) as service.endpoint:
        yield service


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ([], []),
        (["3"], [3]),
        (["0-3"], [0, 1, 2, 3]),
        (["3,5"], [3, 5]),
        (["8-9,0", "5-5", "9"], [0, 5, 8, 9]),
        (["0, 1-2"], [0, 1, 2]),
        (["2147483647"], [2**31 - 1]),
        ([f"1-{MAX_RANKS}"], list(range(1, MAX_RANKS + 1))),
    ],
)
def test_ranks_are_given_by_number_and_by_range(words: list[str], ranks: list[int]):
    assert parse_ranks(words) == ranks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["1", "three"], '"three" is not a rank'),
        ([""], '"" is not a rank'),
        (["1,,2"], '"" is not a rank'),
        (["1-"], '"1-" is not a rank'),
        (["0-1-2"], '"0-1-2" is not a rank'),
        (["+1"], '"+1" is not a rank'),
        (["٣"], '"٣" is not a rank'),
        (["9" * 5000], "is not a rank"),
        (["\x1b[2J"], r'"\x1b[2J" is not a rank'),
        (["1,7-3"], "7-3: this range ends before it begins"),
        (["2147483648"], "no rank is greater than 2,147,483,647"),
        (["0-2147483647"], "0-2147483647: these are more than 65,536 ranks"),
        ([f"1-{MAX_RANKS}", "0"], "0: these are more than 65,536 ranks"),
    ],
)
def test_invalid_rank_is_named_and_no_process_is_asked(insight: Insight, words: list[str], said: str):
    with pytest.raises(ValueError):
        parse_ranks(words)
    result = invoke("stack", "job1", *words, "--endpoint", insight.endpoint)
    assert (result.exit_code, result.stdout, insight.asked) == (Exit.USAGE, "", [])
    assert said in result.stderr


def test_it_asks_for_what_was_named(insight: Insight):
    for arguments in ((), ("7", "0-1,3"), ("--missing", "checkpoint"), ("2", "--missing", "checkpoint")):
        assert invoke("stack", "job1", *arguments, "--endpoint", insight.endpoint).exit_code == Exit.DONE
    assert insight.asked == [
        StacksRequest(run_id="job1"),
        StacksRequest(run_id="job1", ranks=[0, 1, 3, 7]),
        StacksRequest(run_id="job1", missing="checkpoint"),
        StacksRequest(run_id="job1", ranks=[2], missing="checkpoint"),
    ]


def test_people_get_the_stacks_and_programs_the_message(insight: Insight):
    result = invoke("stack", "job1", "--endpoint", insight.endpoint)
    assert (result.exit_code, result.stderr) == (Exit.DONE, "")
    assert result.stdout == (
        "run job1: 1 of 1 process answered\n"
        "\n"
        "rank 3 (node-0, pid 4121)\n"
        "  main thread in step, train.py:214\n"
        "  has not arrived anywhere yet\n"
        "  main thread\n"
        "    step  train.py:214\n"
    )
    result = invoke("stack", "job1", "-o", "json", "--endpoint", insight.endpoint)
    shown = json.loads(result.stdout)
    assert shown["crowds"][0]["threads"][0]["frames"][0]["line"] == 214
    assert shown["silent"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no process of run job1 can be asked\n"),
        (
            ("--missing=checkpoint",),
            'the open barrier "checkpoint" of run job1 waits for no process that could be asked\n'
            "  next: muster describe barrier job1 checkpoint\n",
        ),
        (("3", "--missing=p"), 'the open barrier "p" of run job1 waits for none of these ranks\n'),
    ],
)
def test_stack_says_why_no_process_was_asked(insight: Insight, arguments: tuple[str, ...], said: str):
    insight.answer = StacksResponse()
    result = invoke("stack", "job1", *arguments, "--endpoint", insight.endpoint)
    assert (result.exit_code, result.stdout, result.stderr) == (Exit.DONE, "", said)
    result = invoke("stack", "job1", *arguments, "-o", "json", "--endpoint", insight.endpoint)
    assert (json.loads(result.stdout), result.stderr) == ({"crowds": [], "silent": []}, said)
