"""What a process says of itself when it is asked."""

import _thread
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from lab.patience import PATIENCE
from muster.v1 import insight_pb2 as pb
from muster.worker.insight import process, saves, stacks
from muster.worker.insight.inspection import Inspection

MAIN = pb.Thread(
    name="MainThread",
    main=True,
    frames=[pb.Frame(function="all_reduce", file="c10d.py", line=7), pb.Frame(file="train.py", line=214)],
)


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_INSPECT", raising=False)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Callable[[pb.Thread], None]:
    """Lets the main thread stand somewhere."""

    def at(main: pb.Thread) -> None:
        monkeypatch.setattr(stacks, "threads", lambda most: ([main, pb.Thread(name="other")], 3))

    at(MAIN)
    return at


def moved() -> pb.Thread:
    """A frame further out has come to another line; the innermost one is called again."""
    main = pb.Thread()
    main.CopyFrom(MAIN)
    main.frames[1].line += 1
    return main


def deeper() -> pb.Thread:
    main = pb.Thread()
    main.CopyFrom(MAIN)
    main.frames_left_out += 1
    return main


def test_report_holds_all_that_is_known(monkeypatch: pytest.MonkeyPatch, clock: Clock, stand: object):
    monkeypatch.setattr(process, "cpu_seconds", lambda: 5.0)
    inspection = Inspection(clock)
    monkeypatch.setattr(process, "cpu_seconds", lambda: 5.75)
    monkeypatch.setattr(process, "resident_bytes", lambda: 4096)
    monkeypatch.setattr(saves, "under_way", lambda: [11, 12])
    monkeypatch.setattr(process, "child_state", {11: "D", 12: ""}.get)
    clock.now += 2.5
    assert inspection.report(['barrier "save" #3'], clock.now - 41.0004) == pb.Report(
        threads=[MAIN, pb.Thread(name="other")],
        threads_left_out=3,
        waits_at=['barrier "save" #3'],
        since_arrival_ms=41_000,
        cpu_ms=750,
        cpu_over_ms=2500,
        resident_bytes=4096,
        saves=[pb.ChildOfSave(pid=11, state="D"), pb.ChildOfSave(pid=12)],
    )


def test_session_reports_while_the_main_thread_is_stuck():
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(Inspection().report, [], None).result()
    assert report.threads[0].main
    assert "test_session_reports_while_the_main_thread_is_stuck" in [
        frame.function for frame in report.threads[0].frames
    ]
    assert report.resident_bytes > 0


def test_report_has_only_the_main_thread_unless_all_are_requested(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
):
    # Threads that other tests have left may start and end in this process at any time.
    idents = [*range(1, 5), threading.main_thread().ident]
    monkeypatch.setattr(sys, "_current_frames", lambda: dict.fromkeys(idents, sys._getframe()))
    asked = partial(Inspection(clock).report, [], None)
    with ThreadPoolExecutor(1) as pool:
        every = pool.submit(asked).result()
        one = pool.submit(asked, all_threads=False).result()
    assert [thread.main for thread in every.threads] == [True] + [False] * 4
    assert every.threads_left_out == 0
    assert [thread.main for thread in one.threads] == [True]
    assert one.threads_left_out == 4


def test_report_without_an_arrival_has_no_arrival_time(clock: Clock):
    assert not Inspection(clock).report([], None).HasField("since_arrival_ms")
    assert Inspection(clock).report([], clock.now).HasField("since_arrival_ms")


def test_processor_time_counts_from_the_last_question(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    used = [0.0, 1.0, 1.0, 8.5]
    monkeypatch.setattr(process, "cpu_seconds", lambda: used.pop(0))
    inspection = Inspection(clock)
    reported = []
    for passed in (2.0, 0.5, 4.0):
        clock.now += passed
        report = inspection.report([], None)
        reported.append((report.cpu_ms, report.cpu_over_ms))
    assert reported == [(1000, 2000), (0, 500), (7500, 4000)]


@pytest.mark.parametrize("elsewhere", [moved(), deeper(), pb.Thread(main=True)], ids=["line", "depth", "end"])
def test_still_time_counts_while_the_main_thread_does_not_move(
    clock: Clock, stand: Callable[[pb.Thread], None], elsewhere: pb.Thread
):
    inspection = Inspection(clock)
    reported = []
    for main in (MAIN, MAIN, MAIN, elsewhere, elsewhere, MAIN):
        stand(main)
        clock.now += 10.0
        reported.append(inspection.report([], None).still_ms)
    assert reported == [0, 10_000, 20_000, 0, 10_000, 0]


def test_still_time_restarts_after_a_failed_question(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, stand: Callable[[pb.Thread], None]
):
    inspection = Inspection(clock)
    inspection.report([], None)
    monkeypatch.setattr(stacks, "threads", fail)
    inspection.report([], None)
    stand(MAIN)
    clock.now += 10.0
    assert inspection.report([], None).still_ms == 0


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false", "No", " off "])
def test_user_may_refuse_by_the_environment(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("MUSTER_INSPECT", value)
    monkeypatch.setattr(stacks, "threads", fail)
    assert Inspection().report(["save"], 1.0) == pb.Report(declined=True)


@pytest.mark.parametrize("value", ["", "on", "1"])
def test_other_values_do_not_refuse(monkeypatch: pytest.MonkeyPatch, stand: object, value: str):
    monkeypatch.setenv("MUSTER_INSPECT", value)
    report = Inspection().report(["save"], None)
    assert not report.declined
    assert report.threads[0] == MAIN


def fail(*_: object) -> None:
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize(
    ("module", "function", "lost"),
    [
        (stacks, "threads", "threads"),
        (process, "cpu_seconds", "cpu_over_ms"),
        (process, "resident_bytes", "resident_bytes"),
        (saves, "under_way", "saves"),
    ],
)
def test_failing_part_is_left_out_of_the_report(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    clock: Clock,
    stand: object,
    module: object,
    function: str,
    lost: str,
):
    monkeypatch.setattr(saves, "under_way", lambda: [11])
    inspection = Inspection(clock)
    clock.now += 1.0
    monkeypatch.setattr(module, function, fail)
    with caplog.at_level(logging.DEBUG, "muster.worker.insight"):
        report = inspection.report(["save"], clock.now - 1.0)
    reported = {field.name for field, _ in report.ListFields()} | {"cpu_ms", "threads_left_out"}
    assert reported == {
        "threads",
        "threads_left_out",
        "waits_at",
        "since_arrival_ms",
        "cpu_ms",
        "cpu_over_ms",
        "resident_bytes",
        "saves",
    } - {lost}
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert "Too many open files" in caplog.text


def test_name_that_cannot_be_encoded_costs_only_the_barriers(stand: object):
    report = Inspection().report(["\udcff"], None)
    assert list(report.waits_at) == []
    assert report.threads[0] == MAIN


def test_report_takes_no_lock():
    answered = _thread.allocate_lock()
    answered.acquire()

    def ask() -> None:
        Inspection().report([], None)
        answered.release()

    with threading._active_limbo_lock:  # type: ignore[attr-defined]
        # It is threading's own, so that only a thread of the interpreter's can be started under it.
        _thread.start_new_thread(ask, ())
        assert answered.acquire(timeout=PATIENCE)
