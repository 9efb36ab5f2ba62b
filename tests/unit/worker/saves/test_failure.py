"""The words for how a save fails."""

import errno
import signal

import pytest

from muster.worker.decision import Decision, Outcome
from muster.worker.saves.failure import MAX_TEXT, cut, different_saves, ending_text, failure_text, save_error
from muster.worker.transport.fork_guard import HANDLERS


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (None, "its exit status was taken by another part of this program"),
        (0, "exit status 0 before its function had returned"),
        (3, "exit status 3"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-signal.SIGKILL, "killed by SIGKILL; the kernel may have killed it for want of memory"),
        (-99, "killed by signal 99"),
    ],
)
def test_an_exit_status_has_words(status: int | None, text: str):
    assert text in ending_text(status)


def test_an_abort_in_a_child_may_be_of_grpcs_fork_handlers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(HANDLERS, raising=False)
    assert "SIGABRT; gRPC's fork handlers are on" in ending_text(-signal.SIGABRT)
    monkeypatch.setenv(HANDLERS, "False")
    assert ending_text(-signal.SIGABRT) == "the writing process was killed by SIGABRT"


def test_an_exception_begins_with_what_it_is_and_says_where():
    try:
        raise OSError(28, "No space left on device")
    except OSError as error:
        text = failure_text(error)
    assert text.startswith("OSError: [Errno 28] No space left on device\nTraceback")
    assert "test_failure.py" in text


def chained(first: Exception, then: Exception) -> Exception:
    """An error that was raised while another was handled, as torch does when it closes a file."""
    then.__context__ = first
    return then


def test_error_of_storage_that_led_to_another_comes_first():
    full = OSError(errno.ENOSPC, "No space left on device")
    text = failure_text(chained(full, RuntimeError("unexpected pos 704 vs 598")))
    assert text.splitlines()[0] == (
        "OSError: [Errno 28] No space left on device; then RuntimeError: unexpected pos 704 vs 598"
    )


def test_handled_error_that_is_none_of_storage_does_not_come_first():
    text = failure_text(chained(FileNotFoundError(errno.ENOENT, "no cache"), ValueError("bad shape")))
    assert text.splitlines()[0] == "ValueError: bad shape"


def test_exception_is_named_first_however_long_its_traceback_is():
    text = failure_text(chained(RuntimeError("x" * 50_000), ValueError("bad shape")))
    assert text.splitlines()[0] == "ValueError: bad shape"
    assert text.rstrip().endswith("ValueError: bad shape")
    assert len(text) <= MAX_TEXT + 10


def test_long_exception_is_named_by_its_beginning():
    text = failure_text(ValueError("x" * 50_000))
    assert text.startswith("ValueError: xxx")
    assert len(text) <= MAX_TEXT + 10


@pytest.mark.parametrize("text", ["x" * 100_000, "€" * 100_000, "\udcff" * 50_000])
def test_a_long_text_is_cut_to_what_a_vote_takes(text: str):
    short = cut(text)
    assert len(short.encode("utf-8", "backslashreplace")) <= MAX_TEXT + 10
    assert short.startswith("…")
    assert short[-4:] in text or short.endswith("udcff")


def test_a_commit_that_failed_does_not_say_that_nothing_was_written():
    decision = Decision("save/commit", 1, Outcome.ABORTED, "rank 0 failed")
    assert "not committed, on any rank: rank 0 failed" in str(save_error("save 3", 3, decision))
    assert "save 3 was written by every rank, but" in str(save_error("save 3", 3, decision, written=True))


@pytest.mark.parametrize("numbers", [{}, {0: b"3", 2: b"3"}, {0: b"3", 1: b""}])
def test_ranks_that_say_nothing_else_make_the_same_save(numbers: dict[int, bytes]):
    assert different_saves(numbers) is None


def test_ranks_that_make_different_saves_are_named():
    said = different_saves({2: b"1", 0: b"", 1: b"3", 3: b"3"})
    assert said is not None
    assert "rank 1 has made 3 before this one, rank 2 1." in said
