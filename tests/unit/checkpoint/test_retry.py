"""Reads of shared storage are tried again, and absence is believed at once."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.checkpoint import retry
from muster.checkpoint.retry import DELAYS, retrying
from tests.support.crashes.stat_faults import StatFaults


class Flaky:
    """Fails some times, and then answers."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "read"


@pytest.mark.parametrize("failures", range(len(DELAYS) + 1))
def test_read_is_tried_again_with_growing_delays(failures: int):
    read, slept = Flaky(*[OSError("EIO")] * failures), list[float]()
    assert retrying("it", read, slept.append) == "read"
    assert slept == list(DELAYS[:failures])


def test_last_error_is_raised_when_it_persists():
    read, slept = Flaky(*(OSError(str(number)) for number in range(9))), list[float]()
    with pytest.raises(OSError, match=str(len(DELAYS))):
        retrying("it", read, slept.append)
    assert slept == list(DELAYS)


@pytest.mark.parametrize("error", [FileNotFoundError, NotADirectoryError, ValueError])
def test_absence_and_other_errors_are_not_retried(error: type[Exception]):
    read, slept = Flaky(error("no")), list[float]()
    with pytest.raises(error):
        retrying("it", read, slept.append)
    assert (read.calls, slept) == (1, [])


def test_each_retry_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture):
    retrying("/mnt/job1", Flaky(OSError("stale file handle")), lambda _: None)
    assert "cannot read /mnt/job1; retrying in 0.1 s: stale file handle" in caplog.text


LOOKS: dict[Callable[[Path], bool], set[str]] = {
    retry.is_file: {"file", "link"},
    retry.is_folder: {"folder"},
    retry.is_link: {"link", "broken"},
    retry.exists: {"file", "folder", "link"},
    retry.lexists: {"file", "folder", "link", "broken"},
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("missing")
    return tmp_path


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
def test_look_at_a_path_tells_what_it_is(place: Path, look: Callable[[Path], bool]):
    names = ("file", "folder", "link", "broken", "missing", "file/below")
    assert {name for name in names if look(place / name)} == LOOKS[look]


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("look", [*LOOKS, retry.resolved], ids=lambda look: look.__name__)
def test_error_at_a_path_is_not_taken_for_absence(
    place: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object], error: int
):
    faults = StatFaults(monkeypatch, place / "link", error=error)
    with pytest.raises(OSError, match=re.escape(os.strerror(error))):
        look(place / "link")
    assert faults.struck == 2


@pytest.mark.parametrize("look", [*LOOKS, retry.resolved], ids=lambda look: look.__name__)
def test_look_that_fails_once_is_repeated(
    place: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object]
):
    expected = look(place / "link")
    faults = StatFaults(monkeypatch, place / "link", times=1)
    assert look(place / "link") == expected
    assert faults.struck == 1


def test_resolved_path_has_no_links(place: Path):
    assert retry.resolved(place / "link") == place / "file"
    assert retry.resolved(place / "broken") == place / "missing"
    assert retry.resolved(place / "folder" / "..") == place
