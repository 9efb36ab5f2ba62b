"""What torch's writer writes is digested on the way, and synced when it is closed."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from muster.checkpoint.digest import digest_of
from muster.checkpoint.manifest import FileEntry
from muster.worker.saves.storage.digesting import DigestingFiles, DigestingStream
from muster.worker.saves.storage.rank_write import RankWrite

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_every_item_of_torchs_writer_has_segments_of_its_own(tmp_path: Path, options: dict[str, int]):
    state = {"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16), "c": {"d": 5, "e": "text"}}
    writer = FileSystemWriter(tmp_path, sync_files=False, **options)  # type: ignore[arg-type]
    files = DigestingFiles()
    writer.fs = files
    dcp.save(state, storage_writer=writer)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    assert set(files.written) == {path.name for path in tmp_path.iterdir()}
    for stored in metadata.storage_data.values():
        entry = FileEntry(files.written[stored.relative_path])
        data = (tmp_path / stored.relative_path).read_bytes()
        assert entry.size == len(data)
        (segment,) = entry.between(stored.offset, stored.length)
        assert segment.digest == digest_of(data[stored.offset : stored.offset + stored.length])


def test_writer_that_reports_other_offsets_is_refused(tmp_path: Path):
    writer = FileSystemWriter(tmp_path, sync_files=False)
    files = DigestingFiles()
    writer.fs = files
    dcp.save({"a": torch.ones(3), "b": torch.ones(3)}, storage_writer=writer)
    results: list[object] = []
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    for index, stored in metadata.storage_data.items():
        stored.offset += 1
        results.append(type("Result", (), {"index": index, "storage_data": stored})())
    with pytest.raises(RuntimeError, match="cannot be given a digest"):
        RankWrite.of(results, files.written, 0.0)  # type: ignore[arg-type]


def test_stream_is_synced_once_at_its_final_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    with DigestingFiles().create_stream(tmp_path / "file", "wb") as stream:
        pickle.dump(list(range(100)), stream)
    assert sizes == [(tmp_path / "file").stat().st_size]


def test_descriptor_of_a_stream_has_all_that_was_written(tmp_path: Path):
    """As torch's writer syncs by it before it closes the stream."""
    with (tmp_path / "file").open("wb") as raw:
        stream = DigestingStream(raw, sync=False)
        stream.write(b"some bytes")
        assert os.fstat(stream.fileno()).st_size == 10
        stream.close()
    assert [segment.length for segment in stream.segments()] == [10]
