"""The ``muster`` command on rounds, closed runs and evictions: real nodes on real streams."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from lab.keepers import Keeper
from lab.patience import PATIENCE
from lab.processes.command import ended, job, muster, output, watching
from lab.processes.coordinator import Coordinator
from muster.v1 import common_pb2, rendezvous_pb2, rendezvous_pb2_grpc

ROUNDS = ["ROUND", "STATE", "NODES", "WAITING", "JOINED", "IN", "COMPLETED", "AT"]


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(tmp_path, state="memory:") as running:
        yield running


class Nodes:
    """The nodes of job1: two to three make a round, and two of them wait long for a third."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = rendezvous_pb2_grpc.RendezvousServiceStub(channel)

    def join(self, number: int, *, attempt: int = 1, run_id: str = "job1", last_call: float = 1800):
        """The stream of a node; its first message has come when this returns."""
        stream = self._stub.Join(
            rendezvous_pb2.JoinRequest(
                run_id=run_id,
                node=rendezvous_pb2.Node(
                    incarnation=f"agent-{number}", address=f"node-{number}", pid=900 + number
                ),
                attempt=attempt,
                min_nodes=2,
                max_nodes=3,
                join_timeout_ms=3_600_000,
                last_call_timeout_ms=round(last_call * 1000),
                keep_alive_timeout_ms=600_000,
                protocol_version=1,
            ),
            timeout=10 * PATIENCE,
        )
        next(stream)
        return stream

    def complete(self) -> list[Iterator[rendezvous_pb2.JoinResponse]]:
        """Three nodes, and their round."""
        streams = [self.join(number) for number in range(3)]
        for stream in streams:
            until_told(stream, "round_complete")
        return streams

    def leave(self, number: int, reason: str = "") -> None:
        request = rendezvous_pb2.LeaveRequest(run_id="job1", incarnation=f"agent-{number}", reason=reason)
        assert self._stub.Leave(request, timeout=PATIENCE).had_place

    def get(self) -> rendezvous_pb2.Rendezvous:
        request = rendezvous_pb2.RendezvousServiceGetRequest(run_id="job1")
        return self._stub.Get(request, timeout=PATIENCE).rendezvous


def until_told(stream: Iterator[rendezvous_pb2.JoinResponse], kind: str) -> rendezvous_pb2.JoinResponse:
    """The first message of a kind; a join may have been told it at once."""
    return next(one for one in stream if one.WhichOneof("message") == kind)


@contextmanager
def nodes_of(coordinator: Coordinator) -> Iterator[Nodes]:
    with grpc.insecure_channel(coordinator.endpoint) as channel:
        yield Nodes(channel)


@pytest.fixture
def nodes(coordinator: Coordinator) -> Iterator[Nodes]:
    with nodes_of(coordinator) as joined:
        yield joined


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# ---------------------------------------------------------------------- looking


def test_rounds_form_are_complete_and_are_over(coordinator: Coordinator, nodes: Nodes):
    def shown(*options: str) -> list[list[str]]:
        return rows(output(coordinator.endpoint, "get", "rounds", "job1", *options))

    first, second = nodes.join(0), nodes.join(1)
    assert shown() == [ROUNDS, ["0", "FORMING", "2/3", "0", "-", "-"]]
    third = nodes.join(2)
    for stream in (first, second, third):
        until_told(stream, "round_complete")
    (complete,) = shown()[1:]
    assert complete[:4] == ["0", "COMPLETE", "3/3", "0"]
    assert complete[5].endswith("Z")

    standing_by = nodes.join(3)
    (wide,) = shown("-o", "wide")[1:]
    assert wide[:5] == ["0", "COMPLETE", "3/3", "0", "1"]
    assert " ".join(wide[7:]) == "node-0 (pid 900), node-1 (pid 901), node-2 (pid 902) -"
    nodes.leave(2)
    assert shown()[1][:4] == ["0", "COMPLETE", "2/3", "1"]

    again = [nodes.join(number, attempt=2) for number in (0, 1)]
    for stream in (standing_by, *again):
        until_told(stream, "round_complete")
    current, over = shown()[1:]
    assert current[:4] == ["1", "COMPLETE", "3/3", "0"]
    assert over == ["0", "OVER", "3", "-", *complete[4:]]

    found = json.loads(output(coordinator.endpoint, "get", "rounds", "job1", "-o", "json"))["rendezvous"]
    assert (found["round"], found["complete"], len(found["nodes"])) == ("1", True, 3)
    assert [one["round"] for one in found["rounds"]] == ["1", "0"]


def test_wide_rounds_show_where_copies_of_local_checkpoints_go(coordinator: Coordinator, nodes: Nodes):
    held = nodes.complete()
    with grpc.insecure_channel(coordinator.endpoint) as channel:
        keepers = [Keeper(channel, number, 3) for number in range(3)]
        header, row = output(coordinator.endpoint, "get", "rounds", "job1", "-o", "wide").splitlines()
        narrow = output(coordinator.endpoint, "get", "rounds", "job1")
        for keeper in keepers:
            keeper.close()
    assert header.endswith("COPIES")
    copies = dict(pair.split(" to ") for pair in row[header.index("COPIES") :].split("; "))
    assert set(copies) == set(copies.values()) == {"node-0", "node-1", "node-2"}
    assert all(node != holder for node, holder in copies.items())
    assert "COPIES" not in narrow
    assert len(held) == 3


def test_watch_rounds_prints_a_line_for_each_change(coordinator: Coordinator, nodes: Nodes):
    held = [nodes.join(0)]
    arguments = ["get", "rounds", "job1", "--watch", "--interval=0.1"]
    with (
        watching(coordinator.endpoint, *arguments) as table,
        watching(coordinator.endpoint, *arguments, "-o", "json") as lines,
    ):
        assert table.stdout.readline().split() == ROUNDS
        assert table.stdout.readline().split()[:3] == ["0", "FORMING", "1/3"]
        assert len(json.loads(lines.stdout.readline())["nodes"]) == 1
        held.append(nodes.join(1))
        assert table.stdout.readline().split()[:3] == ["0", "FORMING", "2/3"]
        assert len(json.loads(lines.stdout.readline())["nodes"]) == 2
        held.append(nodes.join(2))
        assert table.stdout.readline().split()[:3] == ["0", "COMPLETE", "3/3"]
        assert json.loads(lines.stdout.readline())["complete"] is True
        assert ended(table) == (130, "")
        assert ended(lines) == (130, "")


def test_a_run_without_nodes_has_no_rounds_and_that_is_no_failure(coordinator: Coordinator):
    with job(coordinator):
        done = muster(coordinator.endpoint, "get", "rounds", "job1")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "no node has joined run job1\n")
        found = json.loads(muster(coordinator.endpoint, "get", "rounds", "job1", "-o", "json").stdout)
    assert found["rendezvous"]["rounds"] == []


def test_a_run_and_its_members_show_their_nodes(coordinator: Coordinator, nodes: Nodes):
    with job(coordinator):
        held = nodes.complete()
        held.append(nodes.join(3))
        nodes.leave(2, "disk\x1b[2J full")
        assert rows(output(coordinator.endpoint, "get", "runs"))[1] == [
            "job1", "OPEN", "0", "1", "2", "4/4", "1", "1", "-",
        ]  # fmt: skip
        text = output(coordinator.endpoint, "describe", "run", "job1")
        member = output(coordinator.endpoint, "describe", "member", "job1", "3")
    assert (
        "Rendezvous:\n"
        "  Round:    1\n"
        "  State:    COMPLETE\n"
        "  Message:  round 1 of run job1 is complete, with 2 nodes in it, 1 waiting to be let in\n"
    ) in text
    section = text.partition("Nodes:\n")[2].partition("\n\n")[0]
    assert [row[:5] for row in rows(section)] == [
        ["RANK", "ADDRESS", "PID", "PLACE", "STATE"],
        ["0", "node-0", "900", "PARTICIPANT", "CONNECTED"],
        ["1", "node-1", "901", "PARTICIPANT", "CONNECTED"],
        ["-", "node-3", "903", "WAITING", "CONNECTED"],
    ]
    (gone,) = rows(text.partition("Gone nodes:\n")[2].partition("\n\n")[0])[1:]
    assert gone[:3] + gone[4:] == ["node-2", "902", "1", "left", "(disk\\x1b[2J", "full)"]
    assert "Node:         1, node-1 (pid 901)\n" in member


# ---------------------------------------------------------------------- close


def test_close(coordinator: Coordinator, nodes: Nodes):
    def close(*options: str):
        return muster(coordinator.endpoint, "close", "job1", *options)

    with job(coordinator) as running:
        in_round = nodes.complete()[:2]
        nodes.leave(2)
        waiting = nodes.join(3)

        done = close("--dry-run", "--reason=over")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == (
            "would close run job1\n"
            "  the wait of 1 node ends: node-3 (pid 903)\n"
            "  2 nodes in the round are told, and go on\n"
            "  4 connected processes are told, and go on\n"
            '  barrier "checkpoint" #1 of run job1 goes on\n'
        )
        assert not nodes.get().HasField("closed")

        done = close("--reason=the budget\x1b[2J is spent")
        assert (done.returncode, done.stderr) == (0, "")
        headline, *affected = done.stdout.splitlines()
        assert headline.startswith("run job1 was closed by ")
        assert headline.endswith(f"@{socket.gethostname()}: the budget\\x1b[2J is spent")
        assert affected == [
            "  the wait of 1 node ended: node-3 (pid 903)",
            "  2 nodes in the round were told, and go on",
            "  4 connected processes were told, and go on",
            '  barrier "checkpoint" #1 of run job1 goes on',
        ]
        for stream in in_round:
            assert until_told(stream, "closed").closed.reason == "the budget\x1b[2J is spent"
        with pytest.raises(grpc.RpcError, match="was closed by"):
            next(waiting)
        assert not running.get().HasField("decision")

        for again in (close("--reason=me too"), close("--dry-run"), close("-o", "json")):
            assert (again.returncode, again.stdout) == (5, "")
            assert again.stderr == f"Error: nothing to close: {headline}\n"

        # Who closed it is one matter, the barriers another: they can be ended later.
        done = close("--abort-barriers")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f'{headline}\n  barrier "checkpoint" #1 of run job1 was aborted\n'
        assert running.decision().outcome == common_pb2.OUTCOME_ABORTED
        assert close("--abort-barriers").returncode == 5

        assert rows(output(coordinator.endpoint, "get", "runs"))[1][:2] == ["job1", "CLOSED"]
        assert rows(output(coordinator.endpoint, "get", "rounds", "job1"))[1][:3] == ["1", "CLOSED", "2/3"]
        text = output(coordinator.endpoint, "describe", "run", "job1")
        assert "\nClosed:\n  By:      " in text
        assert "\n  Reason:  the budget\\x1b[2J is spent\n" in text


def test_close_and_evict_answer_in_json(coordinator: Coordinator):
    def shown(*arguments: str):
        return json.loads(output(coordinator.endpoint, *arguments, "-o", "json"))

    barrier = {"prefix": "checkpoint", "sequence": "1"}
    with job(coordinator):
        evicted = shown("evict", "job1", "3", "--dry-run")
        assert ([one["pid"] for one in evicted["members"]], evicted["failed_barriers"]) == ([4003], [barrier])
        would = shown("close", "job1", "--dry-run")
        assert ("closed" in would, would["connected_processes"]) == (False, 4)
        closed = shown("close", "job1", "--abort-barriers", "--reason=over")
        assert (closed["closed"]["reason"], closed["was_closed"]) == ("over", False)
        assert closed["open_barriers"] == [barrier]


# ---------------------------------------------------------------------- evict


def test_evict(coordinator: Coordinator):
    with job(coordinator) as running:
        assert output(coordinator.endpoint, "evict", "job1", "3", "--dry-run") == (
            "would evict rank 3 of run job1\n"
            "  rank 3 (node-1, pid 4003), connected, is sent away\n"
            '  barrier "checkpoint" #1 of run job1 needs it, and fails\n'
        )
        assert not running.get().HasField("decision")
        assert output(coordinator.endpoint, "evict", "job1", "3", "--reason=a broken\x1b[2J GPU") == (
            "rank 3 of run job1 was evicted: a broken\\x1b[2J GPU\n"
            "  rank 3 (node-1, pid 4003), connected, was sent away\n"
            '  barrier "checkpoint" #1 of run job1 needed it, and failed\n'
        )
        assert running.get().decision.outcome == common_pb2.OUTCOME_MEMBER_LOST
        text = output(coordinator.endpoint, "describe", "member", "job1", "3")
        assert "\nState:        EVICTED for " in text
        done = muster(coordinator.endpoint, "evict", "job1", "3")
        assert (done.returncode, done.stdout) == (1, "")
        assert "rank 3 of run job1 has no process that could be evicted; there are 0-2." in done.stderr


# ---------------------------------------------------------------------- forget


def test_forget(coordinator: Coordinator):
    affected = '  sent away: 4 processes\n  without an outcome: barrier "checkpoint" #1 of run job1\n'
    with job(coordinator) as running:
        done = muster(coordinator.endpoint, "forget", "job1", "--dry-run")
        assert (done.returncode, done.stdout) == (1, "")
        assert "run job1 is in use: 4 processes are connected to it, or may come back" in done.stderr
        would = output(coordinator.endpoint, "forget", "job1", "--force", "--dry-run")
        assert would == f"would forget run job1\n{affected}"
        assert not running.get().HasField("decision")
        assert output(coordinator.endpoint, "forget", "job1", "--force") == (
            f"run job1 was forgotten: an operator asked for it (muster forget)\n{affected}"
        )
        assert "job1" not in muster(coordinator.endpoint, "get", "runs").stdout
    assert 'run="job1"' not in coordinator.get("/metrics")[1]
    (line,) = coordinator.logged("run.forgotten")
    assert line["reason"] == "run job1 was forgotten: an operator asked for it (muster forget)"


# ---------------------------------------------------------------------- bad input, and no answer


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("get", "rounds", "nope"), 'no run "nope" is known'),
        (("get", "rounds", "no\x1bpe", "--watch"), 'no run "no\\x1bpe" is known'),
        (("close", "nope"), 'no run "nope" is known'),
        (("close", "no\x1bpe", "--dry-run"), 'no run "no\\x1bpe" is known'),
        (("close", "job1", "--reason", "x" * 20_000), "reason = 20,000 bytes: it may have 16,384"),
        (("evict", "nope", "3"), 'no run "nope" is known'),
        (("forget", "nope", "--force"), 'no run "nope" is known'),
        (("forget", "job1"), "End the job first; or forget the run all the same"),
        (("evict", "job1", "9"), "rank 9 of run job1 has no process that could be evicted; there are 0-3."),
        (("evict", "job1", "9", "--dry-run"), "List them with: muster get members job1"),
        (("evict", "job1", "3", "--reason", "x" * 20_000), "reason = 20,000 bytes: it may have 16,384"),
    ],
)
def test_refused_command_reports_the_reason_and_changes_nothing(
    running_job: Coordinator, arguments: tuple[str, ...], said: str
):
    done = muster(running_job.endpoint, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert said in done.stderr
    (run,) = rows(output(running_job.endpoint, "get", "runs"))[1:]
    assert (run[1], run[5]) == ("OPEN", "4/4")


@pytest.fixture(scope="module")
def running_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator with a job, for the tests that change nothing."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("cli")
        running = stack.enter_context(Coordinator(folder, state="memory:"))
        stack.enter_context(job(running))
        yield running


def test_without_an_answer_it_is_unknown_what_was_done():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        for arguments, unknown in (
            (
                ("close", "jo\x1bb1"),
                "whether the run was closed is unknown; see: muster describe run 'jo\\x1bb1'",
            ),
            (("evict", "job1", "3"), "rank was evicted is unknown; see: muster describe member job1 3"),
            (("forget", "job1"), "whether the run was forgotten is unknown; see: muster describe run job1"),
        ):
            done = muster(endpoint, *arguments, "--timeout=0.3")
            assert (done.returncode, done.stdout) == (4, "")
            assert f"the coordinator at {endpoint} did not answer within 300 ms" in done.stderr
            assert done.stderr.endswith(f"{unknown}\n")
            dry = muster(endpoint, *arguments, "--dry-run", "--timeout=0.3")
            assert dry.returncode == 4
            assert "unknown" not in dry.stderr
