"""The ``muster`` command as a process, against a real coordinator."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from lab.processes.command import Job, ended, environment, job, muster, output, watching
from lab.processes.coordinator import MUSTER, Coordinator, free_port
from muster.v1 import common_pb2

WAITING = 'barrier "checkpoint" #1 of run job1 has waited'
MISSING = "missing: rank 3 (node-1, pid 4003, connected, still at #0)"


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """One coordinator for the tests that only read."""
    with Coordinator(tmp_path_factory.mktemp("cli"), state="memory:") as running:
        yield running


@pytest.fixture
def own_coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    """A coordinator that a test may change."""
    with Coordinator(tmp_path, state="memory:") as running:
        yield running


@pytest.fixture(scope="module")
def waiting(coordinator: Coordinator) -> Iterator["Job"]:
    """The job, for the tests that only read."""
    with job(coordinator) as running:
        yield running


# ---------------------------------------------------------------------- get


def test_get_runs(coordinator: Coordinator, waiting: Job):
    assert output(coordinator.endpoint, "get", "runs") == (
        "RUN    STATE   GENERATION   ROUND   NODES   CONNECTED   OPEN   DECIDED   STEP\n"
        "job1   OPEN    0            -       -       4/4         1      1         -\n"
    )  # fmt: skip
    (run,) = json.loads(output(coordinator.endpoint, "get", "runs", "job1", "-o", "json"))["runs"]
    assert (run["connected"], run["generation"]) == (4, "0")


def test_get_barriers(coordinator: Coordinator, waiting: Job):
    header, first, second = output(coordinator.endpoint, "get", "barriers").splitlines()
    assert header.split() == ["RUN", "PREFIX", "SEQUENCE", "STATE", "ARRIVED", "WAITED", "LEFT", "MISSING"]
    assert first.split()[:5] + first.split()[7:] == ["job1", "checkpoint", "1", "OPEN", "3/4", "3"]
    assert second.split()[:5] == ["job1", "checkpoint", "0", "RELEASED", "4/4"]
    assert second.split()[6:] == ["-", "-"]

    wide = output(coordinator.endpoint, "get", "barriers", "job1", "--history=5", "--output=wide")
    assert "rank 3 (node-1, pid 4003, connected, still at #0)" in wide

    listed = json.loads(output(coordinator.endpoint, "get", "barriers", "-o", "json"))["barriers"]
    assert [one["sequence"] for one in listed] == ["1", "0"]
    assert listed[0]["missing"][0]["state"] == "MISSING_STATE_NOT_ARRIVED"
    assert listed[1]["decision"]["outcome"] == "OUTCOME_RELEASED"


def test_get_members(coordinator: Coordinator, waiting: Job):
    rows = [line.split() for line in output(coordinator.endpoint, "get", "members", "job1").splitlines()]
    assert rows[0] == ["RANK", "NODE", "HOST", "PID", "STATE", "SINCE", "STEP", "GROUPS"]
    assert [(row[0], row[1], row[2], row[3], row[7]) for row in rows[1:]] == [
        ("0", "0", "node-0", "4000", "checkpoint#1"),
        ("1", "0", "node-0", "4001", "checkpoint#1"),
        ("2", "1", "node-1", "4002", "checkpoint#1"),
        ("3", "1", "node-1", "4003", "checkpoint#0"),
    ]


@pytest.mark.parametrize("kind", ["runs", "barriers"])
def test_an_empty_list_says_so_and_is_no_failure(own_coordinator: Coordinator, kind: str):
    done = muster(own_coordinator.endpoint, "get", kind)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"no {kind} have ")
    assert own_coordinator.endpoint in done.stderr
    assert json.loads(muster(own_coordinator.endpoint, "get", kind, "-o", "json").stdout) == {kind: []}


def test_closed_output_pipe_ends_the_command_quietly(coordinator: Coordinator, waiting: Job):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [str(MUSTER), "get", "barriers"],
        env=environment(coordinator.endpoint),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------- watch


def test_watch_runs_prints_a_line_for_each_change(own_coordinator: Coordinator):
    with watching(own_coordinator.endpoint, "get", "runs", "--watch") as process:
        assert "no runs have said hello" in process.stderr.readline()
        with job(own_coordinator):
            header = "RUN STATE GENERATION ROUND NODES CONNECTED OPEN DECIDED STEP"
            assert process.stdout.readline().split() == header.split()
            while process.stdout.readline().split() != ["job1", "OPEN", "0", "-", "-", "4/4", "1", "1", "-"]:
                pass
        assert ended(process) == (130, "")


def test_watch_barriers_prints_a_document_for_each_change(own_coordinator: Coordinator):
    with job(own_coordinator) as running:
        arguments = ["get", "barriers", "job1", "-w", "-o", "json", "--interval=0.1"]
        with watching(own_coordinator.endpoint, *arguments) as process:
            first, second = (json.loads(process.stdout.readline()) for _ in range(2))
            assert [first["sequence"], second["sequence"]] == ["1", "0"]
            running.arrive(1, [3])
            changed = json.loads(process.stdout.readline())
            assert (changed["sequence"], changed["decision"]["outcome"]) == ("1", "OUTCOME_RELEASED")
            assert ended(process) == (130, "")


def test_watch_members(own_coordinator: Coordinator):
    with (
        job(own_coordinator) as running,
        watching(own_coordinator.endpoint, "get", "members", "job1", "-w", "--interval=0.1") as process,
    ):
        for _ in range(5):
            process.stdout.readline()
        running.arrive(1, [3])
        changed = process.stdout.readline().split()
        assert (changed[0], changed[-1]) == ("3", "checkpoint#1")


def test_a_watch_of_a_coordinator_that_dies_says_that_it_cannot_be_reached(own_coordinator: Coordinator):
    with job(own_coordinator), watching(own_coordinator.endpoint, "get", "runs", "-w") as process:
        process.stdout.readline()
        own_coordinator.kill()
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 3
        assert f"the coordinator at {own_coordinator.endpoint} cannot be reached" in said


# ---------------------------------------------------------------------- describe


def test_describe_run(coordinator: Coordinator, waiting: Job):
    text = output(coordinator.endpoint, "describe", "run", "job1")
    assert "Connected:   4 of 4 ranks seen\nGroups:      1\nBarriers:    1 open, 1 decided\n" in text
    assert "  node-0   0      CONNECTED   0-1\n  node-1   1      CONNECTED   2-3\n" in text
    shown = json.loads(output(coordinator.endpoint, "describe", "run", "job1", "-o", "json"))
    assert (shown["run"]["run_id"], len(shown["members"]), len(shown["barriers"])) == ("job1", 4, 2)


def test_describe_barrier(coordinator: Coordinator, waiting: Job):
    text = output(coordinator.endpoint, "describe", "barrier", "job1", "checkpoint")
    assert "State:       OPEN\nArrived:     3 of 4\n" in text
    assert WAITING in text
    assert MISSING in text
    text = output(coordinator.endpoint, "describe", "barrier", "job1", "checkpoint", "0")
    assert "State:       RELEASED\n" in text
    shown = json.loads(
        output(coordinator.endpoint, "describe", "barrier", "job1", "checkpoint", "-o", "json")
    )
    assert shown["barrier"]["message"].startswith(WAITING)


def test_describing_a_barrier_that_timed_out_is_no_failure(own_coordinator: Coordinator):
    with job(own_coordinator) as running:
        running.arrive(1, [3])
        assert running.decision().outcome == common_pb2.OUTCOME_RELEASED
        running.arrive(2, [0], timeout=0.1)
        decision = running.decision()
        text = output(own_coordinator.endpoint, "describe", "barrier", "job1", "checkpoint")
    assert "State:       TIMED_OUT\n" in text
    # The sentence is the one that the ranks were told.
    for line in decision.message.splitlines():
        assert line in text


def test_describe_member(coordinator: Coordinator, waiting: Job):
    text = output(coordinator.endpoint, "describe", "member", "job1", "3")
    assert "Process:      4003 on node-1\nNode:         1\nState:        CONNECTED for " in text
    assert "\nLast seen:    now\n" in text
    assert text.endswith(
        'barrier "checkpoint" #1 of run job1 (OPEN): rank 3 (node-1, pid 4003, connected, still at #0)\n'
    )
    shown = json.loads(output(coordinator.endpoint, "describe", "member", "job1", "0", "-o", "json"))
    assert (shown["rank"], len(shown["members"]), shown["missing_from"]) == (0, 1, [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("get", "members", "nope"), 'no run "nope" is known'),
        (("get", "runs", "nope", "--watch"), 'no run "nope" is known'),
        (("get", "barriers", "no\x1bpe"), 'no run "no\\x1bpe" is known'),
        (("describe", "run", "nope"), 'no run "nope" is known'),
        (("describe", "barrier", "job1", "nope"), 'run job1 has no group "nope"; it has "checkpoint"'),
        (("describe", "barrier", "job1", "checkpoint", "9"), "#9 of run job1 is not known"),
        (("describe", "member", "job1", "9"), "known are the ranks 0-3"),
        (("abort", "job1", "nope"), 'run job1 has no group "nope"'),
    ],
)
def test_unknown_object_is_refused_with_the_coordinators_message(
    coordinator: Coordinator, waiting: Job, arguments: tuple[str, ...], said: str
):
    done = muster(coordinator.endpoint, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert said in done.stderr


# ---------------------------------------------------------------------- abort


def test_abort(own_coordinator: Coordinator):
    endpoint = own_coordinator.endpoint
    with job(own_coordinator) as running:
        done = muster(endpoint, "abort", "job1", "checkpoint", "--sequence=0", "--reason=disk\x1b[2J full")
        assert (done.returncode, done.stdout) == (5, "")
        assert "has no open barrier #0" in done.stderr

        text = output(endpoint, "abort", "job1", "checkpoint", "--dry-run")
        assert text.startswith(f"would abort: {WAITING}")
        assert not running.get().HasField("decision")

        text = output(endpoint, "abort", "job1", "checkpoint", "--sequence=1", "--reason=disk\x1b[2J full")
        assert text.startswith('barrier "checkpoint" #1 of run job1 was aborted: disk\\x1b[2J full\n')
        assert running.decision().message == text.rstrip("\n")

        done = muster(endpoint, "abort", "job1", "checkpoint")
        assert done.returncode == 5
        assert "has no open barrier" in done.stderr
        done = muster(endpoint, "abort", "job1", "checkpoint", "--dry-run")
        assert (done.returncode, done.stdout) == (5, "")
        assert "nothing to abort" in done.stderr


def test_abort_prints_the_decision_as_json(own_coordinator: Coordinator):
    with job(own_coordinator):
        shown = json.loads(output(own_coordinator.endpoint, "abort", "job1", "checkpoint", "-o", "json"))
    assert shown["decision"]["outcome"] == "OUTCOME_ABORTED"
    assert "was aborted: by an operator" in shown["decision"]["message"]


# ---------------------------------------------------------------------- no coordinator


def test_a_coordinator_that_is_not_there_is_unreachable():
    endpoint = f"127.0.0.1:{free_port()}"
    done = muster(endpoint, "get", "runs")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"Error: the coordinator at {endpoint} cannot be reached; last error: ")
    assert "Connection refused" in done.stderr
    assert "\n  next: " in done.stderr


def test_a_coordinator_that_does_not_answer_is_a_timeout():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        for arguments in (("get", "runs"), ("get", "runs", "-w"), ("abort", "job1", "checkpoint")):
            done = muster(endpoint, *arguments, "--timeout=0.3")
            assert (done.returncode, done.stdout) == (4, "")
            assert f"the coordinator at {endpoint} did not answer within 300 ms" in done.stderr
    assert "whether the barrier was aborted is unknown" in done.stderr


# ---------------------------------------------------------------------- top


class Terminal:
    """``muster top`` on a terminal of its own."""

    def __init__(self, endpoint: str, *arguments: str) -> None:
        self._side, self._theirs = pty.openpty()
        termios.tcsetwinsize(self._theirs, (24, 120))
        self.settings = termios.tcgetattr(self._theirs)
        self._seen = ""
        self.process = subprocess.Popen(
            [str(MUSTER), "top", *arguments],
            env=environment(endpoint),
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._side)
        os.close(self._theirs)

    def wait_for(self, text: str) -> None:
        """Read until the text was drawn, beginning after the last text that was waited for."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._seen:
            left = deadline - time.monotonic()
            assert left > 0, f"it never drew {text!r}: {self._seen}"
            if select.select([self._side], [], [], left)[0]:
                self._seen += os.read(self._side, 65536).decode(errors="replace")
        self._seen = self._seen.partition(text)[2]

    def type(self, keys: str) -> None:
        os.write(self._side, keys.encode())

    def end(self) -> tuple[int, str]:
        """Wait for its end; exit code and stderr. The terminal must be as it was."""
        # Its output is read before its end is waited for: a terminal that nobody reads stops the writer.
        self.wait_for("\x1b[?1049l")
        _, said = self.process.communicate(timeout=PATIENCE)
        assert termios.tcgetattr(self._theirs) == self.settings
        return self.process.returncode, said


def test_top_draws_until_q(own_coordinator: Coordinator):
    with job(own_coordinator) as running, Terminal(own_coordinator.endpoint, "--interval=0.1") as terminal:
        terminal.wait_for("connected ranks 4")
        terminal.wait_for("rank 3 (node-1, pid 4003")
        running.arrive(1, [3])
        terminal.wait_for("no barrier is open")
        terminal.wait_for('barrier "checkpoint" #1 of run job1 was released')
        terminal.type("xq")
        assert terminal.end() == (0, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_top_and_restores_the_terminal(
    coordinator: Coordinator, waiting: Job, number: int, code: int
):
    with Terminal(coordinator.endpoint, "--interval=60") as terminal:
        terminal.wait_for("checkpoint #1")
        terminal.process.send_signal(number)
        assert terminal.end() == (code, "")


def test_top_outlives_the_coordinator(own_coordinator: Coordinator):
    with Terminal(own_coordinator.endpoint, "--interval=0.1") as terminal:
        terminal.wait_for("no barrier is open")
        own_coordinator.kill()
        terminal.wait_for(f"the coordinator at {own_coordinator.endpoint} cannot be reached")
        own_coordinator.start()
        with job(own_coordinator):
            terminal.wait_for("rank 3 (node-1, pid 4003")
        terminal.type("q")
        assert terminal.end() == (0, "")


def test_top_outlives_the_file_of_its_token(own_coordinator: Coordinator, tmp_path: Path):
    file = tmp_path / "token"
    file.write_text("s3cr3t-0123456789")
    with Terminal(own_coordinator.endpoint, "--interval=0.1", f"--token-file={file}") as terminal:
        terminal.wait_for("no barrier is open")
        file.unlink()
        terminal.wait_for("--token-file = ")
        file.write_text("s3cr3t-9876543210")
        with job(own_coordinator):
            terminal.wait_for("rank 3 (node-1, pid 4003")
        terminal.type("q")
        assert terminal.end() == (0, "")


def test_top_without_a_coordinator_fails_before_it_draws():
    endpoint = f"127.0.0.1:{free_port()}"
    with Terminal(endpoint) as terminal:
        _, said = terminal.process.communicate(timeout=PATIENCE)
        assert terminal.process.returncode == 3
        assert f"the coordinator at {endpoint} cannot be reached" in said


def test_a_terminal_gets_colours(coordinator: Coordinator, waiting: Job):
    side, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 60))
    with subprocess.Popen(
        [str(MUSTER), "get", "barriers"],
        env=environment(coordinator.endpoint),
        stdout=theirs,
        stdin=subprocess.DEVNULL,
    ) as process:
        assert process.wait(PATIENCE) == 0
    os.close(theirs)
    text = os.read(side, 65536).decode()
    os.close(side)
    assert "\x1b[36mOPEN\x1b[0m" in text
    assert "\x1b[32mRELEASED\x1b[0m" in text
