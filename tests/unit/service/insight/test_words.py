"""What a process is doing, in a line."""

import pytest

from muster.service.insight import words
from muster.v1.insight_pb2 import ChildOfSave, Frame, Report, Thread


def frame(where: str, *, library: bool = False) -> Frame:
    function, file, line = where.split()
    return Frame(function=function, file=file, line=int(line), library=library)


def main(*frames: Frame) -> Thread:
    return Thread(name="MainThread", main=True, frames=frames)


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        (
            [frame("train_step /job/train.py 214"), frame("main /job/train.py 300")],
            "train_step, train.py:214",
        ),
        (
            [
                frame("Work.wait /lib/torch/c10d.py 9", library=True),
                frame("all_reduce /lib/torch/c10d.py 2810", library=True),
                frame("wrapper /lib/torch/logger.py 83", library=True),
                frame("train_step /job/train.py 214"),
                frame("main /lib/torch/launch.py 1", library=True),
            ],
            "all_reduce, train.py:214",
        ),
        ([frame("wrapper /lib/l.py 8", library=True), frame("Trainer.fit /job/t.py 2")], "fit, t.py:2"),
        ([frame("wait /lib/threading.py 327", library=True)], "wait, threading.py:327"),
        ([Frame(function="f\x1b[2J", file="a\nb.py")], None),
    ],
)
def test_place_names_the_called_function_and_the_calling_line(frames: list[Frame], said: str | None):
    place = words.place(main(*frames))
    if said is None:
        assert "\x1b" not in place
    else:
        assert place == f"main thread in {said}"


def test_main_thread_may_have_ended_or_be_missing():
    assert words.line(Report(threads=[main()])) == "main thread has ended"
    assert words.line(Report()) == "tells of no main thread"


def test_line_shows_duration_barriers_and_saves():
    report = Report(
        threads=[main(frame("f t.py 1"))],
        still_ms=41_000,
        waits_at=['barrier "eval" #2'],
        saves=[ChildOfSave(pid=77, state="D")],
    )
    assert words.line(report) == (
        'main thread in f, t.py:1, for 41 s, waits at barrier "eval" #2, '
        "saves in pid 77, which waits for the disk"
    )
    report.saves[0].state = "?"
    assert words.line(report).endswith("saves in pid 77")
