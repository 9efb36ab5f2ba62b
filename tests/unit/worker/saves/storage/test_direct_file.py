"""A direct file holds what was written, however it was cut into writes, and wherever it lies."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.worker.saves.storage import direct_file
from muster.worker.saves.storage.direct_file import ALIGNMENT, DirectFile, DirectFileSystem
from tests.support.expect import raising

BUFFER = 2 * ALIGNMENT
WRITES = st.lists(st.integers(0, 3 * BUFFER) | st.just(BUFFER) | st.just(ALIGNMENT) | st.none(), max_size=8)
"""Lengths of writes; None is a flush."""


def is_direct(file: DirectFile) -> bool:
    return bool(fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("direct")


@given(lengths=WRITES, refused=st.booleans(), short=st.none() | st.integers(1, BUFFER))
def test_file_holds_every_byte_for_any_writes(
    folder: Path, lengths: list[int | None], refused: bool, short: int | None
):
    real, content = os.write, bytearray()
    with pytest.MonkeyPatch.context() as patch, DirectFile(folder / "file", BUFFER) as file:

        def write(descriptor: int, data: memoryview) -> int:
            if refused and is_direct(file):
                raise OSError(errno.EINVAL, "this device wants another alignment")
            return real(descriptor, data if short is None else data[:short])

        patch.setattr(os, "write", write)
        for number, length in enumerate(lengths):
            if length is None:
                file.flush()
                assert (folder / "file").read_bytes() == content
            else:
                piece = bytes([number + 1]) * length
                assert file.write(piece) == length
                content += piece
        file.flush()
    assert (folder / "file").read_bytes() == content


def test_whole_blocks_are_written_directly_and_the_rest_ordinarily(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written: list[tuple[int, bool]] = []
    real = os.write
    with DirectFile(tmp_path / "file", BUFFER) as file:
        if not is_direct(file):
            pytest.fail(
                f"{tmp_path} takes no direct writes: run the tests on ext4, XFS or tmpfs (Linux 6.6)."
            )

        def write(descriptor: int, data: memoryview) -> int:
            written.append((len(data), is_direct(file)))
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", write)
        file.write(bytes(BUFFER + ALIGNMENT + 1))
    assert written == [(BUFFER, True), (ALIGNMENT, True), (1, False)]


def test_file_that_cannot_be_written_is_closed_and_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = DirectFile(tmp_path / "file", BUFFER)
    file.write(b"content")
    monkeypatch.setattr(os, "write", raising(OSError, errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        file.close()
    assert file.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fileno())


@pytest.mark.parametrize(("kind", "direct"), [("ext4", True), ("xfs", True), ("nfs4", False), (None, False)])
def test_only_measured_file_systems_are_written_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, direct: bool
):
    monkeypatch.setattr(direct_file, "file_system_of", lambda device: kind)
    with DirectFileSystem().create_stream(tmp_path / "file", "wb") as stream:
        assert isinstance(stream, DirectFile) == direct
        stream.write(b"content")
    with DirectFileSystem().create_stream(tmp_path / "file", "rb") as stream:
        assert stream.read() == b"content"


def test_file_system_of_a_folder_is_found():
    assert direct_file.file_system_of(Path("/proc").stat().st_dev) == "proc"
    assert direct_file.file_system_of(os.makedev(4000, 1)) is None
