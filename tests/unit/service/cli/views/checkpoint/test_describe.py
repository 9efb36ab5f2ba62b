"""``muster checkpoint describe``: one checkpoint, its ranks and its files."""

import json
import re
from pathlib import Path

from muster.checkpoint.manifest import MANIFEST
from tests.support.saves.damage import flip
from tests.support.saves.stored_checkpoints import in_folder
from tests.unit.service.cli.views.checkpoint.commands import run


def test_describe_shows_the_newest_with_its_ranks(tmp_path: Path):
    in_folder(tmp_path, 100)
    path = in_folder(tmp_path, 200)
    text = run("describe", tmp_path).stdout
    assert dict(re.findall(r"^([A-Z][\w ]+): +(.+)$", text, re.MULTILINE)) == {
        "Step": "200",
        "Path": str(path),
        "State": "COMMITTED",
        "Committed": "2023-11-14T22:13:20Z, 41s ago",
        "Size": f"{sum(file.stat().st_size for file in path.iterdir())} bytes",
        "Run": "job1",
        "World size": "2",
        "Decision": 'barrier "save" #200',
        "Order": "2",
        "Digests": "xxh3-128 of 4 segments in 2 files",
        "Kept": "no",
    }
    assert [line.split() for line in text.splitlines()[-2:]] == [
        ["0", "node-0", "16", "bytes", "1.5s"],
        ["1", "node-1", "12", "bytes", "1.5s"],
    ]
    assert "Files:" not in text
    files = run("describe", tmp_path, "-o", "wide").stdout.partition("Files:")[2]
    assert [line.split()[:5] for line in files.splitlines()[2:]] == [
        ["__0_0.distcp", "16", "bytes", "0", "3"],
        ["__1_0.distcp", "12", "bytes", "1", "1"],
    ]


def test_describe_in_json_has_the_manifest(tmp_path: Path):
    in_folder(tmp_path, 100)
    in_folder(tmp_path, 200, digests=False)
    assert json.loads(run("describe", tmp_path, "-o", "json").stdout)["manifest"] is None
    shown = json.loads(run("describe", tmp_path, "--step=100", "-o", "json").stdout)
    assert (shown["step"], shown["manifest"]["algorithm"]) == (100, "xxh3-128")
    assert [(one["file"], one["bytes"], one["rank"]) for one in shown["manifest"]["files"]] == [
        ("__0_0.distcp", 16, 0),
        ("__1_0.distcp", 12, 1),
    ]
    assert shown["manifest"]["ranks"][1] == {"rank": 1, "host": "node-1", "bytes": 12, "seconds": 1.5}


def test_describe_finds_a_damaged_manifest(tmp_path: Path):
    flip(in_folder(tmp_path, 100) / MANIFEST, 20)
    text = run("describe", tmp_path).stdout
    assert re.search(r"State:\s+DAMAGED", text)
    assert "manifest.json: it is not the manifest that committed.json names" in text
    shown = json.loads(run("describe", tmp_path, "-o", "json").stdout)
    assert (shown["state"], shown["damage"]["file"]) == ("DAMAGED", MANIFEST)
