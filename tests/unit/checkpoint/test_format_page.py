"""What docs/checkpoint-format.md says is so: its program verifies a checkpoint without Muster."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from muster.checkpoint.committed import MARKER, committed_from, seal, unseal
from muster.checkpoint.manifest import MANIFEST, Manifest
from tests.support.saves.stored_checkpoints import in_folder

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoint-format.md").read_text()


def verified(checkpoint: Path) -> "subprocess.CompletedProcess[str]":
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    # -P and no PYTHONPATH: it needs the package xxhash, and nothing of Muster.
    command = [
        sys.executable,
        "-P",
        "-c",
        f"{program}\nassert 'muster.checkpoint' not in sys.modules",
        str(checkpoint),
    ]
    return subprocess.run(command, capture_output=True, text=True, env={}, check=False)


def test_program_of_the_page_verifies_a_checkpoint(tmp_path: Path):
    done = verified(in_folder(tmp_path, 100))
    assert (done.returncode, done.stdout, done.stderr) == (0, "every byte is what was written\n", "")


@pytest.mark.parametrize(
    ("file", "was", "now"),
    [
        (MARKER, b'"world_size": 2', b'"world_size": 3'),
        (MANIFEST, b'"rank":1', b'"rank":0'),
        ("__1_0.distcp", b"more", b"mode"),
        ("__1_0.distcp", b"weights", b"weight"),
        ("__1_0.distcp", b"weights", b"weights!"),
    ],
)
def test_program_of_the_page_finds_damage(tmp_path: Path, file: str, was: bytes, now: bytes):
    path = in_folder(tmp_path, 100) / file
    data = path.read_bytes()
    assert was in data
    path.write_bytes(data.replace(was, now))
    done = verified(path.parent)
    assert (done.returncode, done.stderr) == (1, f"{file} is damaged\n")


def test_examples_of_the_page_can_be_read(tmp_path: Path):
    marker, manifest = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    made = committed_from(unseal(marker.encode()), tmp_path)
    assert (made.step, made.order, made.world_size) == (300, 3, 2)
    assert seal(made.fields()) == json.dumps(json.loads(marker), sort_keys=True).encode()
    assert Manifest.decode(manifest.encode()).size == 64_008_383
