"""The model of a file system, by which the tests of crash consistency know what a loss of power may leave."""

import random
import re
from pathlib import Path

import pytest

from tests.support.crashes.power_loss import History, Image, NotMadeError
from tests.support.crashes.syscalls import parsed

ROOT = Path("/root-of-the-test")


def history(*ranks: str) -> History:
    """The history of what ranks called; ``/`` stands for the folder, and their lines are in their order."""
    return History(ROOT, {rank: list(parsed(traced(text).splitlines())) for rank, text in enumerate(ranks)})


def traced(text: str) -> str:
    """Return calls as strace writes them: with all strings in hexadecimal digits."""

    def digits(found: re.Match[str]) -> str:
        inside = found[0][1:-1].replace("/", f"{ROOT}/", 1) if found[0][1] == "/" else found[0][1:-1]
        inside = inside.removesuffix("/") if inside == f"{ROOT}/" else inside
        return found[0][0] + "".join(f"\\x{byte:02x}" for byte in inside.encode()) + found[0][-1]

    return re.sub(r'"[^"]*"|</[^>]*>', digits, text)


def left(made: History) -> list[dict[str, bytes | None]]:
    """Everything that a loss of power may leave at the end."""
    found: dict[bytes, Image] = {}
    for image in made.images(len(made.events), random.Random(1), 5):
        found[image.key] = image
    return [dict(image.content) for image in found.values()]


WRITTEN = """\
7 1.0 openat(AT_FDCWD</>, "/a", O_WRONLY|O_CREAT, 0666) = 3</a> <0.01>
7 2.0 write(3</a>, "abcd", 4) = 4 <0.01>
"""


def test_nothing_is_certain_that_was_not_synced():
    states = left(history(WRITTEN))
    assert {} in states
    assert [state["a"] for state in states if state] == [b"abcd", b"", b"\0\0\0\0", b"ab"]


def test_synced_file_is_whole_wherever_its_name_is_left():
    states = left(history(WRITTEN + "7 3.0 fsync(3</a>) = 0 <0.01>\n"))
    assert states == [{}, {"a": b"abcd"}] or states == [{"a": b"abcd"}, {}]


def test_synced_directory_has_its_entries():
    synced = "7 3.0 fsync(3</a>) = 0 <0.01>\n7 4.0 fsync(4</>) = 0 <0.01>\n"
    assert left(history(WRITTEN + synced)) == [{"a": b"abcd"}]


def test_sync_by_another_machine_leaves_a_file_uncertain():
    states = left(history(WRITTEN, "7 3.0 fsync(3</a>) = 0 <0.01>\n7 4.0 fsync(4</>) = 0 <0.01>\n"))
    assert [state["a"] for state in states] == [b"abcd", b"", b"\0\0\0\0", b"ab"]


def test_write_that_ends_after_a_sync_began_is_not_covered_by_it():
    overlapping = """\
7 1.0 openat(AT_FDCWD</>, "/a", O_WRONLY|O_CREAT, 0666) = 3</a> <0.01>
7 2.0 fsync(3</a> <unfinished ...>
8 2.1 write(3</a>, "abcd", 4) = 4 <0.01>
7 2.5 <... fsync resumed>) = 0 <0.5>
7 4.0 fsync(4</>) = 0 <0.01>
"""
    assert {"a": b""} in left(history(overlapping))


def test_rename_is_kept_or_lost_as_a_whole():
    renamed = """\
7 3.0 fsync(3</a>) = 0 <0.01>
7 4.0 fsync(4</>) = 0 <0.01>
7 5.0 rename("/a", "/b") = 0 <0.01>
"""
    states = left(history(WRITTEN + renamed))
    assert sorted(states, key=str) == [{"a": b"abcd"}, {"b": b"abcd"}]


def test_new_directory_may_vanish_with_all_that_was_synced_in_it():
    nested = """\
7 1.0 mkdir("/d", 0777) = 0 <0.01>
7 2.0 openat(AT_FDCWD</>, "/d/a", O_WRONLY|O_CREAT, 0666) = 3</d/a> <0.01>
7 3.0 fsync(4</d>) = 0 <0.01>
"""
    states = left(history(nested))
    assert sorted(states, key=str) == [{"d": None, "d/a": b""}, {}]


def test_message_of_a_rank_appears_at_its_position_in_the_history():
    said = '7 3.0 write(5</x.marks>, "saved 1", 7) = 7 <0.01>\n'
    made = history(WRITTEN + said)
    assert made.said(len(made.events)) == ["saved 1"]
    assert made.said(len(made.events) - 1) == []


OTHERS = """\
9 1.5 mkdir("/run/inner", 0777) = 0 <0.1>
9 1.7 openat(AT_FDCWD</>, "/run/inner/a", O_WRONLY|O_CREAT, 0666) = 3</run/inner/a> <0.01>
"""


def test_call_may_end_earlier_by_its_strace_than_the_one_that_it_needs():
    made = history('7 1.0 mkdir("/run", 0777) = 0 <2.0>\n', OTHERS)
    assert {"run": None, "run/inner": None, "run/inner/a": b""} in left(made)


def test_call_that_ended_before_the_one_that_it_needs_began_is_a_fault():
    with pytest.raises(NotMadeError, match="run/inner has a name in a directory that nobody has made"):
        history('7 3.0 mkdir("/run", 0777) = 0 <0.1>\n', OTHERS)
