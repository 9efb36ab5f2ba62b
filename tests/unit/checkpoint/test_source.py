"""Where the files of a checkpoint are read from."""

import os
from pathlib import Path
from uuid import uuid4

import pytest

from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.bucket.source import BucketSource
from muster.checkpoint.source import FolderSource, Source, read_whole


@pytest.fixture(params=["folder", "bucket"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    held = {"a": b"0123456789", "below/b": b"", "c": b"x"}
    if request.param == "bucket":
        objects = FsspecObjects(f"memory://{uuid4().hex}", {})
        for name, data in held.items():
            objects.put(f"one/{name}", data)
        return BucketSource(objects, "one")
    for name, data in held.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return FolderSource(tmp_path)


def test_all_files_are_listed_with_their_sizes(source: Source):
    assert source.sizes() == {"a": 10, "below/b": 0, "c": 1}


def test_reads_end_at_the_end_of_a_file(source: Source):
    buffer = memoryview(bytearray(4))
    with source.open("a") as file:
        for offset, there in ((0, b"0123"), (4, b"4567"), (8, b"89"), (10, b""), (99, b"")):
            assert file.read(offset, 4) == there
            assert buffer[: file.read_into(offset, buffer)] == there
    assert [read_whole(source, name) for name in ("a", "below/b")] == [b"0123456789", b""]


def test_missing_file_is_certainly_absent(source: Source):
    with pytest.raises(FileNotFoundError):
        read_whole(source, "d")


def test_short_reads_of_a_network_file_system_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").write_bytes(b"0123456789")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, offset: real(handle, [buffers[0][:3]], offset))
    buffer = bytearray(100)
    with FolderSource(tmp_path).open("a") as file:
        assert [file.read(0, 10), file.read(2, 100)] == [b"0123456789", b"23456789"]
        assert file.read_into(1, memoryview(buffer)) == 9
    assert buffer[:10] == b"123456789\0"


def test_link_to_nowhere_is_a_missing_file(tmp_path: Path):
    (tmp_path / "a").symlink_to("nowhere")
    assert FolderSource(tmp_path).sizes() == {}


def test_folder_that_cannot_be_listed_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        FolderSource(tmp_path / "none").sizes()
