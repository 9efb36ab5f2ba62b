"""Reads of shared storage are tried again, and absence is believed at once."""

import errno
from pathlib import Path

import pytest

from muster.checkpoint import retry
from muster.checkpoint.retry import DELAYS, retrying


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


def test_error_at_a_path_is_not_taken_for_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    assert [retry.is_file(tmp_path / name) for name in ("file", "missing", "file/below", ".")] == [
        True,
        False,
        False,
        False,
    ]

    def fails(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(retry, "DELAYS", ())
    monkeypatch.setattr(Path, "stat", fails)
    with pytest.raises(OSError, match="Input/output error"):
        retry.is_file(tmp_path / "file")
