"""A thread writes to a stream while a child is forked: the child prints and logs all the same."""

import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.worker.saves import AsyncRequest, ForkCaller
from muster.worker.saves.writers import child
from muster.worker.saves.writers.stream_locks import renew_stream_locks


class SlowFile(io.RawIOBase):
    """A file to which this process, but not its child, writes only when it is told to.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._owner = os.getpid()
        self._file = path.open("ab", buffering=0)
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: object) -> int:
        self.entered.set()
        assert os.getpid() != self._owner or self.go_on.wait(PATIENCE)
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
    logger = logging.getLogger("tests.stream_locks")
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


@pytest.mark.parametrize("buffer", [io.BufferedWriter, io.BufferedRandom])
def test_file_that_can_be_read_has_a_lock_too(buffer: type[Any], tmp_path: Path):
    path = tmp_path / "log"
    with path.open("w+b", buffering=0) as file, io.TextIOWrapper(buffer(file)) as stream:
        monkey = pytest.MonkeyPatch()
        monkey.setattr(sys, "stderr", stream)
        try:
            stream.buffer.write(b"of the parent")
            renew_stream_locks()
            stream.write("of the child")
            stream.flush()
        finally:
            monkey.undo()
        assert path.read_text() == "of the child"


class Lazy(logging.Handler):
    """A handler that has no stream yet."""

    @property
    def stream(self) -> object:
        raise RuntimeError("not opened")


class Unbuffered:
    """A stream that does not say what it writes to."""

    @property
    def buffer(self) -> object:
        raise ValueError("there is none")


def test_no_stream_fails_a_save(monkeypatch: pytest.MonkeyPatch):
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    detached = io.TextIOWrapper(io.BufferedWriter(io.FileIO(os.devnull, "w")))
    detached.detach().close()
    logger, lazy = logging.getLogger("tests.stream_locks"), Lazy()
    logger.addHandler(lazy)
    try:
        for stream in (None, io.StringIO(), closed, detached, Unbuffered(), object()):
            monkeypatch.setattr(sys, "stdout", stream)
            renew_stream_locks()
            assert sys.stdout is stream
    finally:
        logger.removeHandler(lazy)
