"""A thread writes to a stream while a child is forked: the child prints and logs all the same."""

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from muster.worker.saves import AsyncRequest, ForkCaller
from muster.worker.saves.writers import child


class SlowFile(io.RawIOBase):
    """A file to which this process writes only when it is told to.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: object) -> int:
        self.entered.set()
        assert self.go_on.wait(PATIENCE)
        return self._file.write(data)  # type: ignore[arg-type]

    def close(self) -> None:
        super().close()
        self._file.close()


@contextmanager
def locked(path: Path) -> Iterator[io.TextIOWrapper]:
    """A stream to which another thread is writing, and so holds its lock."""
    file = SlowFile(path)
    stream = io.TextIOWrapper(io.BufferedWriter(file), line_buffering=True)
    thread = threading.Thread(target=stream.write, args=("parent\n",))
    thread.start()
    try:
        assert file.entered.wait(PATIENCE)
        yield stream
    finally:
        file.go_on.set()
        thread.join()
        stream.close()


@pytest.fixture
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent waits for no stream before it forks."""
    monkeypatch.setattr(child, "flush", lambda: None)


@pytest.mark.usefixtures("unflushed")
@pytest.mark.parametrize("name", ["stdout", "stderr", "__stdout__", "__stderr__"])
def test_child_prints_while_its_parent_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "output"

    def write() -> None:
        print("child", file=getattr(sys, name), flush=True)

    with locked(path) as stream:
        monkeypatch.setattr(sys, name, stream)
        assert ForkCaller().start(AsyncRequest(write, (), [])).wait(PATIENCE).failure is None
        monkeypatch.undo()
        assert path.read_text() == "child\n"
    assert path.read_text() == "child\nparent\n"


def test_child_logs_while_its_parent_does(tmp_path: Path):
    path = tmp_path / "log"
    logger = logging.getLogger("tests.child_streams")
    logger.propagate = False
    with locked(path) as stream:
        handler = logging.StreamHandler(stream)
        logger.addHandler(handler)
        try:
            request = AsyncRequest(logger.error, ("child",), [])
            assert ForkCaller().start(request).wait(PATIENCE).failure is None
        finally:
            logger.removeHandler(handler)
        assert path.read_text() == "child\n"


def test_child_has_a_stream_in_place_of_an_object_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such as one that writes to two streams, of which one may be locked."""

    class Tee:
        def flush(self) -> None:
            """Nothing is kept."""

    monkeypatch.setattr(sys, "stdout", Tee())
    seen = tmp_path / "seen"
    request = AsyncRequest(lambda: seen.write_text(str(sys.stdout.fileno())), (), [])
    assert ForkCaller().start(request).wait(PATIENCE).failure is None
    assert seen.read_text() == "1"
    assert isinstance(sys.stdout, Tee)
