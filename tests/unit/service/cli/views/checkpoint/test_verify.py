"""``muster checkpoint verify``: the state that it finds, the damage that it names, its exit status."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from muster.checkpoint.committed import MARKER, seal, unseal
from muster.checkpoint.damage import DAMAGED
from muster.checkpoint.inventory import FolderInventory
from muster.checkpoint.manifest import MANIFEST
from muster.checkpoint.source import FolderSource
from muster.checkpoint.verification import verify as verify_files
from muster.service.cli.failure import Exit
from muster.service.cli.views import checkpoint as module
from tests.support.saves.damage import flip
from tests.support.saves.stored_checkpoints import by_adapter, in_folder
from tests.unit.service.cli.views.checkpoint.commands import FILE, columns, run


def test_verified_checkpoints_end_with_0(tmp_path: Path):
    for step in (100, 200):
        in_folder(tmp_path, step)
    result = run("verify", tmp_path)
    assert columns(result.stdout) == [
        ["STEP", "STATE", "FILES", "VERIFIED", "REASON"],
        ["200", "VERIFIED", "2", "28 bytes", "-"],
        ["100", "VERIFIED", "2", "28 bytes", "-"],
    ]
    assert result.stderr == ""


def test_damage_ends_with_6_and_names_file_offset_and_rank(tmp_path: Path):
    damaged = in_folder(tmp_path, 100)
    in_folder(tmp_path, 200)
    flip(damaged / "__0_0.distcp", 8)
    result = run("verify", tmp_path, code=Exit.DAMAGED)
    assert columns(result.stdout)[1:] == [
        ["200", "VERIFIED", "2", "28 bytes", "-"],
        [
            "100",
            "DAMAGED",
            "2",
            "12 bytes",
            "__0_0.distcp at offset 7: 9 bytes are not what was written; rank 0 (node-0) wrote it",
        ],
    ]
    assert result.stderr == (
        f"step 100 is damaged\n  next: muster checkpoint mark {tmp_path} --corrupt 100\n"
    )
    run("verify", tmp_path, "--step", 200)
    run("verify", tmp_path, "--step", 100, code=Exit.DAMAGED)
    assert not (damaged / DAMAGED).exists(), "verify changes nothing"


def test_all_damage_is_in_json_and_in_the_wide_table(tmp_path: Path):
    path = in_folder(tmp_path, 100)
    (path / "__0_0.distcp").unlink()
    flip(path / FILE, 3)
    (found,) = json.loads(run("verify", tmp_path, "-o", "json", code=6).stdout)["checkpoints"]
    assert (found["state"], found["files"], found["verified_bytes"], found["error"]) == (
        "DAMAGED",
        2,
        0,
        None,
    )
    assert [
        (one["file"], one["offset"], one["written_by_rank"], one["written_by_host"])
        for one in found["damages"]
    ] == [("__0_0.distcp", None, 0, "node-0"), (FILE, 0, 1, "node-1")]
    assert run("verify", tmp_path, code=6).stdout.strip().endswith("wrote it; and 1 more")
    assert "it is missing" in run("verify", tmp_path, "-o", "wide", code=6).stdout
    assert f"{FILE} at offset 0" in run("verify", tmp_path, "-o", "wide", code=6).stdout


@pytest.mark.parametrize("file", [MARKER, MANIFEST, FILE, "__0_0.distcp"])
@pytest.mark.parametrize("what", ["flipped", "truncated", "extended", "gone"])
def test_damage_of_any_file_is_found(tmp_path: Path, file: str, what: str):
    path = in_folder(tmp_path, 100) / file
    data = path.read_bytes()
    if what == "flipped":
        flip(path, len(data) // 2)
    elif what == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if what == "truncated" else data + b"x")
    (found,) = json.loads(run("verify", tmp_path, "-o", "json", code=6).stdout)["checkpoints"]
    assert [one["file"] for one in found["damages"]] == [file]


def test_checkpoint_without_digests_is_said_to_be_unverified(tmp_path: Path):
    in_folder(tmp_path, 100, digests=False)
    result = run("verify", tmp_path)
    assert columns(result.stdout)[1] == ["100", "UNVERIFIED", "-", "-", "it has no digests"]
    assert result.stderr.startswith("step 100 is unverified: it has no digests")


def test_marked_checkpoint_is_damaged_though_its_bytes_are_right(tmp_path: Path):
    in_folder(tmp_path, 100)
    run("mark", tmp_path, "--corrupt=100", "--reason=the loss was nan")
    result = run("verify", tmp_path, code=Exit.DAMAGED)
    assert columns(result.stdout)[1][:4] == ["100", "DAMAGED", "2", "28 bytes"]
    assert "the loss was nan; marked by" in result.stdout
    assert "marked as damaged, and every byte is what was written" in result.stderr
    assert f"muster checkpoint mark {tmp_path} --clear 100" in result.stderr


def test_marked_checkpoint_with_damage_shows_both(tmp_path: Path):
    flip(in_folder(tmp_path, 100) / FILE, 3)
    run("mark", tmp_path, "--corrupt=100")
    result = run("verify", tmp_path, "-o", "wide", code=Exit.DAMAGED)
    assert re.search(rf"{FILE} at offset 0: .*; marked by \S+$", result.stdout, re.MULTILINE)
    assert result.stderr == ""


def test_io_error_is_no_damage_and_the_others_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for step in (100, 200, 300):
        in_folder(tmp_path, step)
    real = FolderSource.open

    @contextmanager
    def opened(self: FolderSource, name: str) -> Iterator[Any]:
        if "200" in self.place:
            raise OSError(5, "Input/output error", f"{self.place}/{name}")
        with real(self, name) as file:
            yield file

    monkeypatch.setattr(FolderSource, "open", opened)
    result = run("verify", tmp_path, code=Exit.FAILED)
    assert [row[:2] for row in columns(result.stdout)[1:]] == [
        ["300", "VERIFIED"],
        ["200", "UNREADABLE"],
        ["100", "VERIFIED"],
    ]
    assert "it cannot be read: [Errno 5] Input/output error" in result.stdout
    flip(tmp_path / "step-0000000100" / FILE, 1)
    run("verify", tmp_path, code=Exit.DAMAGED)


@pytest.mark.parametrize("what", ["removed", "replaced", "removed, and PLACE is it"])
def test_checkpoint_that_a_job_removes_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    old, new = by_adapter(tmp_path / "checkpoint-100"), by_adapter(tmp_path / "checkpoint-200")
    other = by_adapter(tmp_path / ".new")
    (other / FILE).write_bytes(b"other weights")
    (other / MARKER).write_bytes(seal(unseal((other / MARKER).read_bytes()) | {"sequence": 5}))

    def verify(source: Any, *arguments: Any) -> Any:
        if source.place == str(old):
            old.rename(tmp_path / ".removed-1")
            if what == "replaced":
                other.rename(old)
        return verify_files(source, *arguments)

    monkeypatch.setattr(module, "verify_files", verify)
    result = run("verify", old if "PLACE" in what else tmp_path)
    assert "step 100 was removed or replaced while it was verified" in result.stderr
    rows = [row[0] for row in columns(result.stdout)[1:]]
    assert rows == ([] if "PLACE" in what else [new.name.removeprefix("checkpoint-")])


def test_files_are_read_by_as_many_threads_as_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    in_folder(tmp_path, 100)
    asked: list[int] = []
    real = verify_files

    def verify(source: Any, manifest: Any, threads: int, on_read: Any) -> Any:
        asked.append(threads)
        return real(source, manifest, threads, on_read)

    monkeypatch.setattr(module, "verify_files", verify)
    run("verify", tmp_path, "--threads", 3)
    run("verify", tmp_path)
    assert asked == [3, module.DEFAULT_THREADS]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_is_shown_on_a_terminal_and_is_gone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    in_folder(tmp_path, 100)
    (one,) = FolderInventory(tmp_path).checkpoints()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    stdout = sys.stdout
    with module._progress(one) as (begin, on_read):
        assert sys.stdout is stdout, "data goes to where it went before"
        found = module.verification(one, 2, begin, on_read)
    assert found.state == "VERIFIED"
    assert "step 100" in terminal.getvalue()
    assert "28/28 bytes" in terminal.getvalue()


def test_folder_is_verified_without_torch_and_without_fsspec(tmp_path: Path):
    in_folder(tmp_path, 100)
    program = (
        "import sys; from muster.service.cli.main import app\n"
        "app(['checkpoint', 'verify', sys.argv[1]], standalone_mode=False)\n"
        "print([name for name in ('torch', 'fsspec', 'rich.progress') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["STEP", "STATE"],
        ["100", "VERIFIED"],
        ["[]"],
    ]
