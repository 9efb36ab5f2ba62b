"""``muster checkpoint list``: the committed checkpoints of folders, of adapters and of buckets."""

import json
from pathlib import Path

import pytest

from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.bucket.protocol import CheckpointBucket
from muster.checkpoint.damage import DAMAGED, KEPT
from muster.service.cli.failure import Exit
from muster.service.formatting.cells import size
from tests.support.saves.stored_checkpoints import by_adapter, in_bucket, in_folder
from tests.unit.service.cli.views.checkpoint.commands import FILE, columns, run


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (3 << 40, "3.0 TiB"),
        (2**70, "1,048,576.0 PiB"),
    ],
)
def test_size_has_a_unit(count: int, words: str):
    assert size(count) == words


def test_list_shows_committed_checkpoints_newest_first(tmp_path: Path):
    for step in (100, 200):
        in_folder(tmp_path, step)
    in_folder(tmp_path, 50, digests=False)
    (tmp_path / "step-0000000200" / DAMAGED).write_text("{}")
    (tmp_path / "step-0000000100" / KEPT).touch()
    shown = columns(run("list", tmp_path).stdout)
    assert shown[0] == ["STEP", "AGE", "SIZE", "RANKS", "RUN", "STATE", "DIGESTS", "KEPT", "REASON"]
    assert [row[:2] + row[3:8] for row in shown[1:]] == [
        ["50", "41s", "2", "job1", "COMMITTED", "no", "no"],
        ["200", "41s", "2", "job1", "DAMAGED", "yes", "no"],
        ["100", "41s", "2", "job1", "COMMITTED", "yes", "yes"],
    ]
    assert "the mark itself cannot be read" in shown[2][8]
    wide = columns(run("list", tmp_path, "-o", "wide").stdout)
    assert wide[0][8:10] == ["COMMITTED AT", "NAME"]
    assert wide[1][8:10] == ["2023-11-14T22:13:20Z", "step-0000000050"]


def test_list_is_a_document_for_programs(tmp_path: Path):
    path = in_folder(tmp_path, 100)
    length = sum(file.stat().st_size for file in path.iterdir())
    assert json.loads(run("list", tmp_path, "-o", "json").stdout) == {
        "checkpoints": [
            {
                "step": 100,
                "name": "step-0000000100",
                "path": str(path),
                "state": "COMMITTED",
                "committed_at": "2023-11-14T22:13:20Z",
                "age_ms": 41_000,
                "bytes": length,
                "world_size": 2,
                "run_id": "job1",
                "prefix": "save",
                "sequence": 100,
                "order": 1,
                "digests": True,
                "kept": False,
                "marked_damaged": False,
                "damage": None,
            }
        ]
    }


@pytest.mark.parametrize("output", ["table", "json"])
def test_place_without_checkpoints_is_said_on_stderr(tmp_path: Path, objects: FsspecObjects, output: str):
    for place in (tmp_path, objects.url):
        result = run("list", place, "-o", output)
        assert result.stderr == f"no checkpoint is committed in {place}\n"
        assert result.stdout == ("" if output == "table" else '{\n  "checkpoints": []\n}\n')


def test_checkpoints_of_adapters_are_listed(tmp_path: Path):
    by_adapter(tmp_path / "checkpoint-500")
    by_adapter(tmp_path / "final", digests=False)
    shown = {row[0]: row[5:7] for row in columns(run("list", tmp_path).stdout)[1:]}
    assert shown == {"500": ["COMMITTED", "yes"], "-": ["COMMITTED", "no"]}


def test_buckets_are_shown_as_folders_are(objects: FsspecObjects):
    bucket = CheckpointBucket(objects, objects.url, "job1")
    damaged = in_bucket(objects, 100, bucket=bucket)
    in_bucket(objects, 200, bucket=bucket)
    run("verify", objects.url)
    objects.put(f"{damaged.name}/{FILE}", b"more_weights")
    assert [row[5] for row in columns(run("list", objects.url).stdout)[1:]] == ["COMMITTED", "COMMITTED"]
    (found,) = json.loads(
        run("verify", f"{objects.url}/{damaged.name}", "-o", "json", code=Exit.DAMAGED).stdout
    )["checkpoints"]
    assert [(one["file"], one["offset"], one["written_by_rank"]) for one in found["damages"]] == [
        (FILE, 0, 1)
    ]
    run("mark", objects.url, "--corrupt", 100, "--reason", "bit rot")
    assert "bit rot; marked by" in run("describe", objects.url, "--step", 100).stdout
    run("mark", objects.url, "--clear", 100)
    assert [row[5] for row in columns(run("list", objects.url).stdout)[1:]] == ["COMMITTED", "COMMITTED"]
