"""Files that are replaced: seen once, and a broken one changes nothing."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lab.patience import PATIENCE
from muster.service.security.files import FileError, Reloaded, keep_fresh, read


class Numbers:
    """A number in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loads = 0
        self.heard: list[int] = []

    def load(self) -> int:
        self.loads += 1
        try:
            return int(read(self.path))
        except ValueError:
            raise FileError(f"{self.path} holds no number.") from None


@pytest.fixture
def numbers(tmp_path: Path) -> Numbers:
    (tmp_path / "n").write_text("1")
    return Numbers(tmp_path / "n")


def put(path: Path, text: str) -> None:
    """Replace it whole, so that it is another file."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    fresh.replace(path)


def test_value_is_loaded_again_only_when_its_file_changed(numbers: Numbers):
    one = Reloaded("number", [numbers.path], numbers.load, numbers.heard.append)
    one.look()
    assert (one.value, numbers.loads, numbers.heard) == (1, 1, [])
    put(numbers.path, "2")
    with capture_logs() as logged:
        one.look()
        one.look()
    assert (one.value, numbers.loads, numbers.heard) == (2, 2, [2])
    assert [line["event"] for line in logged] == ["number.reloaded"]


@pytest.mark.parametrize("gone", [True, False])
def test_failed_reload_is_logged_once_and_changes_nothing(numbers: Numbers, gone: bool):
    one = Reloaded("number", [numbers.path], numbers.load, numbers.heard.append)
    numbers.path.unlink() if gone else put(numbers.path, "x")
    with capture_logs() as logged:
        one.look()
        one.look()
    assert (one.value, numbers.heard, one.failed) == (1, [], True)
    assert [(line["event"], line["log_level"]) for line in logged] == [("number.kept", "error")]
    assert logged[0]["reason"].endswith("What was loaded before stays in force.")
    put(numbers.path, "3")
    one.look()
    assert (one.value, one.failed) == (3, False)


def test_failed_reload_is_repeated_until_it_succeeds(numbers: Numbers):
    """Though the file has not changed again: there were too many open files, say."""
    one = Reloaded("number", [numbers.path], numbers.load)
    put(numbers.path, "2")
    failures = [FileError("too many open files."), FileError("too many open files."), KeyError("unforeseen")]

    def failing() -> int:
        if failures:
            raise failures.pop(0)
        return numbers.load()

    one._load = failing
    with capture_logs() as logged:
        for _ in range(4):
            one.look()
    assert one.value == 2
    assert [line["event"] for line in logged] == ["number.kept", "number.kept", "number.reloaded"]
    assert logged[1]["reason"].startswith("KeyError: 'unforeseen'.")


def test_symbolic_link_that_is_swapped_is_a_change(numbers: Numbers, tmp_path: Path):
    for version in "12":
        (tmp_path / version).mkdir()
        (tmp_path / version / "n").write_text(version)
    link = tmp_path / "data"
    link.symlink_to(tmp_path / "1")
    numbers.path = link / "n"
    one = Reloaded("number", [numbers.path], numbers.load)
    fresh = tmp_path / "fresh"
    fresh.symlink_to(tmp_path / "2")
    fresh.replace(link)
    one.look()
    assert one.value == 2


def test_first_load_that_fails_is_an_error(numbers: Numbers):
    numbers.path.unlink()
    with pytest.raises(FileError, match="cannot be read: No such file"):
        Reloaded("number", [numbers.path], numbers.load)


async def test_files_are_followed_until_the_end(numbers: Numbers):
    changed = asyncio.Event()
    one = Reloaded("number", [numbers.path], numbers.load, lambda _: changed.set())
    following = asyncio.create_task(keep_fresh([one], interval=0))
    put(numbers.path, "2")
    await asyncio.wait_for(changed.wait(), PATIENCE)
    following.cancel()
    assert one.value == 2
