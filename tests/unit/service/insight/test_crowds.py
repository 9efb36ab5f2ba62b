"""Folding what processes said: one who differs from a crowd is seen."""

from muster.service.core.vocabulary.effects import ProbeTarget
from muster.service.insight import words
from muster.service.insight.crowds import stacks
from muster.service.insight.inspector import ProcessAnswer
from muster.v1.insight_pb2 import Frame, Report, Thread


def asked(rank: int) -> ProbeTarget:
    return ProbeTarget(rank, rank, f"life-{rank}", "node-0", 100 + rank, relayed=False)


def at(line: int, *, more: int = 0) -> Report:
    threads = [Thread(name="MainThread", main=True, frames=[Frame(function="f", file="t.py", line=line)])]
    threads += [Thread(name=f"pin-{n}", frames=[Frame(function="g")]) for n in range(more)]
    return Report(threads=threads, cpu_ms=line, still_ms=line * 1000)


def test_processes_at_one_place_are_one_crowd_largest_first():
    lines = [7, 214, 214, 8, 214]
    folded = stacks(ProcessAnswer(asked(rank), at(line, more=rank)) for rank, line in enumerate(lines))
    assert [[one.rank for one in crowd.members] for crowd in folded.crowds] == [[1, 2, 4], [0], [3]]
    crowd = folded.crowds[0]
    assert crowd.line == "main thread in f, t.py:214"
    assert [thread.name for thread in crowd.threads] == ["MainThread"]
    assert [(one.host, one.pid, one.report.cpu_ms, len(one.report.threads)) for one in crowd.members] == [
        ("node-0", 100 + rank, 214, 0) for rank in (1, 2, 4)
    ]


def test_single_process_is_shown_in_full():
    (crowd,) = stacks([ProcessAnswer(asked(0), at(5, more=2))]).crowds
    assert [thread.name for thread in crowd.threads] == ["MainThread", "pin-0", "pin-1"]
    assert crowd.line == "main thread in f, t.py:5, for 5 s"


def test_main_thread_is_the_first():
    report = at(5, more=2)
    report.threads.sort(key=lambda thread: thread.main)
    (crowd,) = stacks([ProcessAnswer(asked(0), report)]).crowds
    assert [thread.name for thread in crowd.threads] == ["MainThread", "pin-0", "pin-1"]


def test_crowd_without_main_threads_shows_no_single_report():
    reports = [Report(still_ms=41_000 * rank, waits_at=[f"barrier {rank}"]) for rank in (1, 2)]
    (crowd,) = stacks(ProcessAnswer(asked(rank), report) for rank, report in enumerate(reports)).crowds
    assert crowd.line == "tells of no main thread"


def test_silent_processes_are_grouped_by_reason():
    folded = stacks(
        ProcessAnswer(asked(rank), None, words.NO_ANSWER if rank else words.NO_SESSION) for rank in range(3)
    )
    assert not folded.crowds
    assert [(crowd.line, [one.rank for one in crowd.members]) for crowd in folded.silent] == [
        (words.NO_ANSWER, [1, 2]),
        (words.NO_SESSION, [0]),
    ]
    assert not folded.silent[0].members[0].HasField("report")


def test_4096_ranks_fold_into_what_differs():
    folded = stacks(ProcessAnswer(asked(rank), at(1 if rank % 342 == 0 else 2)) for rank in range(4096))
    assert [len(crowd.members) for crowd in folded.crowds] == [4084, 12]
