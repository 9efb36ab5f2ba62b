"""What a user may call the place of his checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from muster.worker.saves.storage.bucket_storage import BucketStorage
from muster.worker.saves.storage.folder_storage import FolderStorage
from muster.worker.saves.storage.open_storage import open_storage


@pytest.mark.parametrize(
    "name", ["{}/new", "file://{}/new", "local://{}/new", "{}/a:b", "{}/s3", "{}/run-2026-11-23T10:31"]
)
def test_a_folder(tmp_path: Path, name: str):
    storage = open_storage(name.format(tmp_path), None, "job")
    assert isinstance(storage, FolderStorage)
    assert [path.is_dir() for path in tmp_path.iterdir()] == [True]


def test_a_bucket():
    assert isinstance(open_storage("memory://job-of-test-places", None, "job"), BucketStorage)


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        ("s3:/bucket/job", None, ValueError, r"s3:/bucket/job is neither .* Write s3://bucket/job, as text"),
        (Path("s3://bucket/job"), None, ValueError, "Write s3://bucket/job, as text"),
        ("s3:bucket/job", None, ValueError, "Write s3://bucket/job"),
        ("s3://", None, ValueError, r"names no bucket. Name one: s3://BUCKET/JOB\."),
        ("s4://bucket/job", None, ValueError, r"s4://bucket/job cannot be opened: .*fsspec knows: .*s3"),
        ("simplecache::s3://bucket/job", None, ValueError, "Name the store alone"),
        ("s3://bucket/lr=[0.1,2]", None, ValueError, "none of .* which stand for others"),
        ("s3://bucket/st*r", None, ValueError, "which stand for others"),
        ("s3://bucket//job", None, ValueError, "no empty part"),
        ("gs://bucket/job", None, ImportError, "a package for gs:// that is not installed: .* gcsfs"),
        ("memory://job", {"overwrite": False}, ValueError, "storage_options has overwrite, which torch's"),
        ("bucket/job", {"profile": "training"}, ValueError, "bucket/job is a folder, .* Name a scheme"),
    ],
    ids=str,
)
def test_invalid_location_is_refused_with_advice(
    name: str | Path, options: dict[str, Any] | None, error: type[Exception], said: str, tmp_path: Path
):
    with pytest.raises(error, match=said):
        open_storage(name, options, "job")


def test_relative_folder_name_may_contain_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_storage("run-10:31", None, "job"), FolderStorage)
    assert (tmp_path / "run-10:31").is_dir()
