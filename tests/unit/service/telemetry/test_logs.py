"""Logs neither stall nor crash the coordinator, whatever becomes of those who read them."""

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.patience import PATIENCE
from muster.service.telemetry import logs
from muster.service.telemetry.logs import MAX_WAITING_LINES, LineWriter


class HeldStderr(io.StringIO):
    """A stderr whose reader reads when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = threading.Event()
        self.may_write = threading.Event()

    def write(self, text: str) -> int:
        self.writing.set()
        assert self.may_write.wait(PATIENCE)
        return super().write(text)


@contextmanager
def held_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldStderr]:
    """No fixture: between a fixture and its test, pytest puts its own stderr back."""
    held = HeldStderr()
    monkeypatch.setattr(sys, "stderr", held)
    yield held
    held.may_write.set()


def finish(writer: LineWriter) -> None:
    writer.close()
    assert not writer._thread.is_alive()


def test_lines_come_out_in_order(monkeypatch: pytest.MonkeyPatch):
    with held_stderr(monkeypatch) as stderr:
        stderr.may_write.set()
        writer = LineWriter()
        for level in ("debug", "info", "warning", "error", "critical"):
            getattr(writer, level)(level)
        finish(writer)
        assert stderr.getvalue().split() == ["debug", "info", "warning", "error", "critical"]


def test_lines_that_nobody_reads_block_nothing_and_their_loss_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "MAX_WAITING_LINES", 5)
    with held_stderr(monkeypatch) as stderr:
        writer = LineWriter()
        writer.msg("first")
        assert stderr.writing.wait(PATIENCE)
        for number in range(20):
            writer.msg(f"line {number}")
        stderr.may_write.set()
        finish(writer)
        assert stderr.getvalue().splitlines() == [
            "first",
            "(15 log lines were dropped: nobody read them)",
            *(f"line {number}" for number in range(5)),
        ]


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "I/O error"), ValueError("closed file")])
def test_a_stderr_that_fails_is_given_up_and_tried_again(monkeypatch: pytest.MonkeyPatch, error: Exception):
    class Failing(io.StringIO):
        failing = True

        def write(self, text: str) -> int:
            if self.failing:
                Failing.failing = False
                raise error
            return super().write(text)

    failing = Failing()
    monkeypatch.setattr(sys, "stderr", failing)
    writer = LineWriter()
    writer.msg("lost")
    writer.msg("said")
    finish(writer)
    assert failing.getvalue() == "said\n"


# ---------------------------------------------------------------------- whole processes


def run(script: str, *arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": PATIENCE} | more
    # As most users start it: without a buffer Python has nothing to flush at its end.
    options["env"] = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, check=False, **options)  # type: ignore[call-overload,no-any-return]


LOG_MORE_THAN_A_PIPE_HOLDS = """
import sys
import structlog
from muster.service.telemetry.logs import configure
configure(sys.argv[1])
log = structlog.get_logger()
for number in range(int(sys.argv[2])):
    log.warning("event", number=number, reason="x" * 200)
print("alive")
"""


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_pipe_that_nobody_drains_stops_nothing(log_format: str):
    read, write = os.pipe()
    try:
        done = run(LOG_MORE_THAN_A_PIPE_HOLDS, log_format, str(MAX_WAITING_LINES + 2_000), stderr=write)
    finally:
        os.close(read)
        os.close(write)
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_log_pipe_without_a_reader_does_not_stop_the_process():
    read, write = os.pipe()
    os.close(read)
    try:
        done = run(LOG_MORE_THAN_A_PIPE_HOLDS, "json", "100", stderr=write)
    finally:
        os.close(write)
    assert done.stdout == "alive\n"
    assert done.returncode in (0, 120), "120: Python itself could not flush stderr at the end"


LOG_ALL = """
import logging, sys
import structlog
from muster.service.core.vocabulary.effects import Notice
from muster.service.core.vocabulary.model import Outcome
from muster.service.telemetry.logs import EventLog, configure
from lab import records

configure(sys.argv[1])
log = EventLog()
log.decided(records.decision(outcome=Outcome.RELEASED, message="released"))
log.decided(records.decision(message="timed out\\n  missing: rank 3\\n  next: look"))
log.noticed(Notice("run.superseded", "job1", "generation 2 began"))
log.committed(0.5)
logging.getLogger("grpc").warning("a %s", "warning")
logging.getLogger("grpc").info("not shown")
logging.getLogger("odd").warning("\\x1b[2J <script>\\nforged")
logging.getLogger("grpc").warning("%d", "not a number")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("asyncio").exception("a fault")
"""


def test_json_logs_are_one_object_a_line():
    done = run(LOG_ALL, "json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all(line.pop("timestamp").endswith("Z") for line in lines)
    fault = lines.pop()
    assert "ZeroDivisionError" in fault.pop("exception")
    assert fault == {"event": "asyncio", "level": "error", "reason": "a fault"}
    assert lines.pop()["reason"].startswith("'%d' with ('not a number',): %d format: "), "nobody is harmed"
    barrier = {"event": "barrier.decided", "run": "job1", "prefix": "checkpoint", "sequence": 7}
    assert lines == [
        barrier | {"outcome": "RELEASED", "level": "info", "reason": "released"},
        barrier
        | {
            "outcome": "TIMED_OUT",
            "level": "warning",
            "reason": "timed out | missing: rank 3 | next: look",
        },
        {"event": "run.superseded", "level": "info", "run": "job1", "reason": "generation 2 began"},
        {"event": "grpc", "level": "warning", "reason": "a warning"},
        {"event": "odd", "level": "warning", "reason": "\\x1b[2J <script>\\nforged"},
    ]


def test_console_logs_are_one_line_each_and_without_colours_in_a_file():
    done = run(LOG_ALL, "console")
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stderr.splitlines()
    assert "[info     ] barrier.decided" in first
    assert "[warning  ] barrier.decided" in second
    assert "timed out | missing: rank 3 | next: look" in second
    assert "\x1b" not in done.stderr


EVERYTHING = """
import gc, logging, sys, threading, warnings
import structlog
from muster.service.telemetry import logs

logs.configure("json")
log = structlog.get_logger()
log.info("event", reason="two\\nlines")
warnings.warn("an old\\nargument", DeprecationWarning, stacklevel=1)
grpc = logging.getLogger("grpc._cython.cygrpc")
grpc.error("a call\\nwent wrong")
# Of a client that went away as it was answered: no line.
grpc.error("ExecuteBatchError raised in core by servicer method [%s]", "/muster.v1.RunService/Get")
try:
    raise KeyError("caught")
except KeyError:
    logging.getLogger("asyncio").exception("a task failed")


class Unraisable:
    def __del__(self):
        raise ValueError("ignored")


Unraisable()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
logs.failed("the state cannot be written")
raise RuntimeError("nobody caught it")
"""


def test_every_json_log_line_is_a_single_object_regardless_of_its_source():
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", EVERYTHING], capture_output=True, text=True, timeout=PATIENCE
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == [
        "event",
        "py.warnings",
        "grpc._cython.cygrpc",
        "asyncio",
        "uncaught",
        "uncaught",
        "failed",
        "uncaught",
    ]
    assert all({"level", "timestamp", "reason"} <= line.keys() for line in lines)
    assert "DeprecationWarning: an old" in lines[1]["reason"]
    assert "KeyError" in lines[3]["exception"]
    assert [line["reason"] for line in lines[4:6]] == [
        "ValueError: ignored",
        "ZeroDivisionError: division by zero",
    ]
    assert lines[-1]["reason"] == "RuntimeError: nobody caught it"


def test_a_loss_is_told_in_json_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "MAX_WAITING_LINES", 1)
    with held_stderr(monkeypatch) as stderr:
        writer = LineWriter(logs._loss_for_collectors)
        writer.msg("{}")
        assert stderr.writing.wait(PATIENCE)
        for _ in range(3):
            writer.msg("{}")
        stderr.may_write.set()
        finish(writer)
        assert [json.loads(line) for line in stderr.getvalue().splitlines()] == [
            {},
            {"event": "log.dropped", "level": "warning", "lines": 2},
            {},
        ]
