"""The note by which a rank tells rank 0 what it wrote."""

import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from muster.checkpoint.digest import Segment, digest_of
from muster.worker.saves.storage.rank_write import RankWrite
from tests.support.hostile.mine import Mine


def test_note_is_read_as_it_was_written():
    results = [
        WriteResult(MetadataIndex("weight", [2, 0], 1), 8, _StorageInfo("__0_0.distcp", 0, 8)),
        WriteResult(MetadataIndex("schritt\udc80"), 4, _StorageInfo("__0_0.distcp", 8, 4, ["zstd"])),
    ]
    files = {"__0_0.distcp": (Segment(8, digest_of(b"a")), Segment(4, digest_of(b"b")))}
    write = RankWrite(results, files, "node-0", 0.25)
    read = RankWrite.decode(write.encode())
    assert read == write
    assert [result.index.index for result in read.results] == [1, None], "not compared by torch"
    assert type(read.results[0].index.offset) is type(results[0].index.offset)


def test_note_runs_no_code(tmp_path: Path):
    with pytest.raises(ValueError, match="note cannot be read"):
        RankWrite.decode(pickle.dumps(Mine(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "note", [b"", b"[]", b"{}", b'{"results": [[]], "files": {}, "host": "", "seconds": 0}']
)
def test_note_of_another_version_is_refused(note: bytes):
    with pytest.raises(ValueError, match="Use one version of Muster"):
        RankWrite.decode(note)
