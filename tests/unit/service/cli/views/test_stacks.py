import pytest

from muster.service.cli.views.stacks import stacks_lines
from muster.v1.insight_pb2 import ChildOfSave, Crowd, Frame, ProbedProcess, Report, StacksResponse, Thread

ALL_REDUCE = Frame(function="all_reduce", file="/torch/distributed_c10d.py", line=2810, library=True)
STEP = Frame(function="step", file="train.py", line=214)
LINE = "main thread in step, train.py:214, for 41 s"


def member(rank: int, *, host: str = "node-0", said: Report | None = None) -> ProbedProcess:
    return ProbedProcess(rank=rank, host=host, pid=4000 + rank if host else 0, report=said)


def main_thread(*frames: Frame, left_out: int = 0) -> Thread:
    return Thread(name="MainThread", main=True, frames=frames, frames_left_out=left_out)


def crowd(*ranks: int, line: str = LINE) -> Crowd:
    members = [member(rank, said=Report()) for rank in ranks]
    return Crowd(members=members, threads=[main_thread(ALL_REDUCE, STEP)], line=line)


def silent(*ranks: int, host: str = "node-1", line: str = "does not answer") -> Crowd:
    return Crowd(members=[member(rank, host=host) for rank in ranks], line=line)


def alone(said: Report, *threads: Thread, line: str = "") -> list[str]:
    """What is shown of a single process, below the count."""
    only = Crowd(members=[member(3, said=said)], threads=threads, line=line)
    return stacks_lines("job1", StacksResponse(crowds=[only]))[2:]


def test_ranks_that_differ_from_the_crowd_are_listed_first():
    apart = {5, 17, *range(33, 43)}
    response = StacksResponse(
        crowds=[
            crowd(*(rank for rank in range(4090) if rank not in apart)),
            crowd(*range(33, 43), line="main thread in read, data.py:9"),
            crowd(17, 5, line="main thread has ended"),
        ],
        silent=[silent(*range(4090, 4096))],
    )
    lines = stacks_lines("job1", response)
    assert lines[:10] == [
        "run job1: 4,090 of 4,096 processes answered",
        "12 differ from the crowd: ranks 5, 17, 33-42",
        "",
        "4,078 ranks: 0-4, 6-16, 18-32, 43-4089",
        "  main thread in step, train.py:214, for 41 s",
        "  main thread",
        "    all_reduce  /torch/distributed_c10d.py:2810",
        "    step        train.py:214",
        "",
        "10 ranks: 33-42",
    ]
    assert lines[lines.index("2 ranks: 5, 17") + 1] == "  main thread has ended"


@pytest.mark.parametrize(
    ("crowds", "expected"),
    [
        ([crowd(0, 1)], []),
        ([crowd(0), crowd(1)], []),
        ([crowd(0, 1), crowd(2), crowd(3)], []),
        ([crowd(0, 1), crowd(2)], ["1 differs from the crowd: rank 2"]),
        ([crowd(0, 1, 2), crowd(3, 3)], ["2 differ from the crowd: rank 3"]),
    ],
)
def test_only_from_a_majority_can_one_differ(crowds: list[Crowd], expected: list[str]):
    lines = stacks_lines("job1", StacksResponse(crowds=crowds))
    assert [line for line in lines if "from the crowd" in line] == expected


def test_several_processes_of_a_rank_are_no_several_ranks():
    for ranks, headline in (((3, 3), "2 processes of rank 3"), ((0, 1, 1), "3 processes of ranks 0-1")):
        assert stacks_lines("job1", StacksResponse(crowds=[crowd(*ranks)]))[2] == headline


def test_a_single_process_is_shown_with_all_its_threads_and_what_it_says_of_itself():
    said = Report(
        threads_left_out=2,
        waits_at=['barrier "checkpoint" #7', 'barrier "eval" #1'],
        since_arrival_ms=41_000,
        cpu_ms=1_200,
        cpu_over_ms=320_000,
        resident_bytes=3 * 2**30 + 2**29,
        saves=[
            *(ChildOfSave(pid=4200 + n, state=state) for n, state in enumerate("RSDTZ")),
            ChildOfSave(pid=4210),
            ChildOfSave(pid=4211, state="X"),
        ],
    )
    pinning = Thread(name="pin_memory", frames=[Frame(function="wait", file="threading.py", line=1)])
    assert alone(said, main_thread(ALL_REDUCE, STEP, left_out=12), pinning, line=LINE) == [
        "rank 3 (node-0, pid 4003)",
        "  main thread in step, train.py:214, for 41 s",
        "  last arrived 41s ago; "
        "used 1.2s of processor time in 5m20s; 3.5 GiB resident; save child 4200 runs; "
        "save child 4201 sleeps; save child 4202 waits for the disk; save child 4203 is stopped; "
        "save child 4204 has ended; save child 4210 (state unknown); save child 4211 (state X)",
        "  main thread",
        "    all_reduce  /torch/distributed_c10d.py:2810",
        "    step        train.py:214",
        "    … 12 more frames",
        "  thread pin_memory",
        "    wait  threading.py:1",
        "  … 2 more threads",
    ]


def test_values_missing_from_a_process_report_are_not_shown():
    assert alone(Report()) == ["rank 3 (node-0, pid 4003)", "  has not arrived anywhere yet"]
    assert alone(Report(since_arrival_ms=0, resident_bytes=2**20, cpu_over_ms=1))[1] == (
        "  last arrived 0ms ago; used 0ms of processor time in 1ms; 1 MiB resident"
    )


def test_a_main_thread_that_has_ended_has_no_frames_to_show():
    other = Thread(name="loader", frames=[STEP], frames_left_out=1)
    assert alone(Report(), main_thread(), other)[2:] == [
        "  thread loader",
        "    step  train.py:214",
        "    … 1 more frame",
    ]


def test_a_long_name_does_not_push_all_files_away():
    name = "f" * 60
    frames = Frame(function=name, file="long.py", line=1), Frame(function="数据", file="wide.py", line=2)
    assert alone(Report(), main_thread(*frames))[3:] == [
        f"    {name}  long.py:1",
        f"    数据{' ' * 36}  wide.py:2",
    ]


def test_the_silent_come_last_by_reason():
    response = StacksResponse(
        crowds=[crowd(0)],
        silent=[
            silent(9, 7, line="does not answer: it is stopped"),
            silent(*range(16, 33), 40, line="connection lost"),
            silent(50, host="", line="never joined"),
        ],
    )
    assert stacks_lines("job1", response)[-4:] == [
        "",
        "rank 7 (node-1, pid 4007), rank 9 (node-1, pid 4009): does not answer: it is stopped",
        "ranks 16-32, 40: connection lost",
        "rank 50: never joined",
    ]


def test_where_nobody_answers_only_the_silent_are_shown():
    assert stacks_lines("job1", StacksResponse(silent=[silent(7)])) == [
        "run job1: 0 of 1 process answered",
        "",
        "rank 7 (node-1, pid 4007): does not answer",
    ]


def test_no_name_can_speak_to_the_terminal_or_begin_a_line():
    bad = "\x1b[2J\nrank 0: fine\u202e<script>"
    one = ProbedProcess(
        rank=1,
        host=bad,
        pid=1,
        report=Report(waits_at=[bad], saves=[ChildOfSave(pid=1, state=bad)]),
    )
    frames = [Frame(function=bad, file=bad, line=1)]
    response = StacksResponse(
        crowds=[
            Crowd(
                members=[one],
                threads=[Thread(name=bad, main=True, frames=frames), Thread(name=bad, frames=frames)],
                line=bad,
            )
        ],
        silent=[Crowd(members=[ProbedProcess(rank=2, host=bad, pid=2)], line=bad)],
    )
    lines = stacks_lines(f"job1{bad}", response)
    shown = "\\x1b[2J\\nrank 0: fine\\u202e<script>"
    assert lines == [
        f"run job1{shown}: 1 of 2 processes answered",
        "",
        f"rank 1 ({shown}, pid 1)",
        f"  {shown}",
        f"  has not arrived anywhere yet; save child 1 (state {shown})",
        "  main thread",
        f"    {shown}  {shown}:1",
        f"  thread {shown}",
        f"    {shown}  {shown}:1",
        "",
        f"rank 2 ({shown}, pid 2): {shown}",
    ]
