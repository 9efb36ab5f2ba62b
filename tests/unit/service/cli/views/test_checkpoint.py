"""``muster checkpoint``: what it shows, how it ends, and what it makes of what is damaged or hostile."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import typer

from muster.checkpoint import retry
from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.bucket.protocol import CheckpointBucket
from muster.checkpoint.committed import MARKER, SaveAttempt, seal, unseal
from muster.checkpoint.damage import DAMAGED, KEPT
from muster.checkpoint.inventory import FolderInventory
from muster.checkpoint.manifest import MANIFEST, ManifestReference
from muster.checkpoint.source import FolderSource
from muster.checkpoint.verification import verify as verify_files
from muster.service.cli.failure import Exit
from muster.service.cli.options import Output
from muster.service.cli.views import checkpoint as module
from muster.service.cli.views import checkpoint_tables as checkpoint_views
from muster.service.formatting.cells import size
from tests.support.saves.stored_checkpoints import ITEMS, ODD, by_adapter, in_bucket, in_folder
from tests.unit.service.cli.test_main import invoke

NOW = 1_700_000_041.0
FILE = "__1_0.distcp"


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_views, "time", SimpleNamespace(time=lambda: NOW))


@pytest.fixture(autouse=True)
def _no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "DELAYS", ())


@pytest.fixture
def objects() -> FsspecObjects:
    return FsspecObjects(f"memory://{uuid4().hex}", {})


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def run(verb: str, *arguments: Any, code: int = Exit.DONE) -> Any:
    result = invoke("checkpoint", verb, *map(str, arguments))
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def columns(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line) for line in text.splitlines()]


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


# ---------------------------------------------------------------------- list


def test_list_shows_what_is_committed_newest_first(tmp_path: Path):
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


# ---------------------------------------------------------------------- describe


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


# ---------------------------------------------------------------------- verify


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


# ---------------------------------------------------------------------- mark


def test_marks_are_made_and_taken_back(tmp_path: Path):
    path = in_folder(tmp_path, 100)
    made = run("mark", tmp_path, "--corrupt", 100, "--reason", "a bad disk").stdout
    assert made.startswith(
        f"step 100 ({path}) is marked as damaged, and no job resumes from it: a bad disk; "
    )
    assert "is marked as damaged already: a bad disk" in run("mark", tmp_path, "--corrupt=100").stdout
    assert "is kept, and retention" in run("mark", tmp_path, "--keep", 100).stdout
    assert "is kept already" in run("mark", tmp_path, "--keep", 100).stdout
    shown = json.loads(run("list", tmp_path, "-o", "json").stdout)["checkpoints"][0]
    assert (shown["state"], shown["kept"], shown["marked_damaged"]) == ("DAMAGED", True, True)
    assert shown["damage"]["reason"].startswith("a bad disk; marked by ")
    assert "not marked as damaged and kept any more" in run("mark", tmp_path, "--clear", 100).stdout
    assert "has no mark" in run("mark", tmp_path, "--clear", 100).stdout
    assert sorted(one.name for one in path.iterdir()) == [*ITEMS, MARKER, MANIFEST]


def test_mark_shows_what_became_of_the_checkpoint_in_json(tmp_path: Path):
    in_folder(tmp_path, 100)
    shown = json.loads(run("mark", tmp_path, "--keep", 100, "-o", "json").stdout)
    assert (shown["step"], shown["kept"]) == (100, True)


def test_checkpoint_whose_marker_is_garbage_can_be_marked(tmp_path: Path):
    (in_folder(tmp_path, 100) / MARKER).write_bytes(b"{")
    run("mark", tmp_path, "--keep", 100)
    run("mark", tmp_path, "--corrupt", 100)
    assert (tmp_path / "step-0000000100" / KEPT).exists()
    run("mark", tmp_path, "--clear", 100)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--corrupt=1", "--keep=1"),
        ("--keep=1", "--clear=1"),
        ("--keep=1", "--reason=why"),
        ("--keep=-1",),
        ("--corrupt=one",),
    ],
)
def test_mark_wants_one_of_its_options(tmp_path: Path, arguments: tuple[str, ...]):
    in_folder(tmp_path, 1)
    assert run("mark", tmp_path, *arguments, code=Exit.USAGE).stdout == ""


def test_step_that_several_checkpoints_have_is_marked_by_its_path(objects: FsspecObjects):
    bucket = CheckpointBucket(objects, objects.url, "job1")
    attempts = [in_bucket(objects, 100, life=SaveAttempt(life, 0), bucket=bucket) for life in (0, 1)]
    result = run("mark", objects.url, "--keep", 100, code=Exit.USAGE)
    assert all(f"\n  {objects.url}/{attempt.name}" in result.stderr for attempt in attempts)
    run("mark", f"{objects.url}/{attempts[0].name}", "--keep", 100)
    shown = json.loads(run("list", objects.url, "-o", "json").stdout)["checkpoints"]
    assert {one["name"]: one["kept"] for one in shown} == {attempts[0].name: True, attempts[1].name: False}


def test_mark_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = in_folder(tmp_path, 100)

    def refuse(*_: Any) -> None:
        raise PermissionError("Permission denied")

    monkeypatch.setattr("muster.checkpoint.inventory.mark", refuse)
    result = run("mark", tmp_path, "--keep", 100, code=Exit.FAILED)
    assert f"Error: {path} cannot be marked: Permission denied\n  next: " in result.stderr


# ---------------------------------------------------------------------- bad places


@pytest.mark.parametrize("verb", ["list", "describe", "verify", "mark"])
def test_place_that_is_none_is_an_error(tmp_path: Path, verb: str):
    more = ["--keep=1"] if verb == "mark" else []
    (tmp_path / "file").touch()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / ".metadata").touch()
    for place, said in [
        (tmp_path / "none", "is not there: "),
        (tmp_path / "file", "is a file without a marker beside it, "),
        (tmp_path / "torch", "is not a committed checkpoint: it has no committed.json"),
    ]:
        result = run(verb, place, *more, code=Exit.FAILED)
        assert result.stderr.startswith(f"Error: {place} {said}")
        assert result.stdout == ""


@pytest.mark.parametrize("verb", ["describe", "verify", "mark"])
def test_step_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path, verb: str):
    more = "--keep" if verb == "mark" else "--step"
    assert "no checkpoint is committed in" in run(verb, tmp_path, more, 7, code=Exit.FAILED).stderr
    for step in (900, 1000, 80):
        in_folder(tmp_path, step)
    result = run(verb, tmp_path, more, 7, code=Exit.FAILED)
    assert result.stderr == (
        f"Error: no checkpoint of step 7 is committed in {tmp_path}; there are 80, 900, 1000\n"
    )


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("", "it is empty"),
        ("nothing://bucket/job1", "Protocol not known"),
        ("gs://bucket/job1", "gs:// that is not installed"),
        ("memory://a/*", "stand for others"),
    ],
)
def test_address_that_is_none_is_a_usage_error(place: str, said: str):
    assert said in run("list", place, code=Exit.USAGE).stderr


def test_place_without_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    result = run("list", tmp_path, code=Exit.FAILED)
    assert result.stderr.startswith(f"Error: {tmp_path} cannot be read: [Errno 13] Permission denied")


def shows_without_traceback(place: Path) -> None:
    for output in (Output.WIDE, Output.JSON):
        for path in place.iterdir():
            module.describe(str(path), None, output)
        module.list_checkpoints(str(place), output)
        with suppress(typer.Exit):
            module.verify(str(place), None, 1, output)


@pytest.mark.parametrize(
    "field", ["step", "world_size", "run_id", "prefix", "sequence", "order", "committed_at", "manifest"]
)
def test_odd_marker_is_no_traceback(tmp_path: Path, field: str, capsys: pytest.CaptureFixture[str]):
    for step, value in enumerate(ODD):
        path = in_folder(tmp_path, step) / MARKER
        path.write_bytes(seal(unseal(path.read_bytes()) | {field: value}))
    shows_without_traceback(tmp_path)
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "field",
    [
        ("files",),
        ("ranks",),
        ("files", FILE),
        ("files", FILE, "rank"),
        ("ranks", 0),
        ("ranks", 0, "host"),
        ("ranks", 0, "seconds"),
    ],
    ids=str,
)
def test_odd_manifest_is_no_traceback(
    tmp_path: Path, field: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
):
    for step, value in enumerate(ODD):
        path = in_folder(tmp_path, step)
        said = json.loads((path / MANIFEST).read_bytes())
        inner = said
        for key in field[:-1]:
            inner = inner[key]
        inner[field[-1]] = value
        data = json.dumps(said).encode()
        (path / MANIFEST).write_bytes(data)
        marker = unseal((path / MARKER).read_bytes()) | {"manifest": asdict(ManifestReference.of(data))}
        (path / MARKER).write_bytes(seal(marker))
    shows_without_traceback(tmp_path)
    assert "\x1b" not in capsys.readouterr().out


def test_names_cannot_send_escapes_to_the_terminal(tmp_path: Path):
    by_adapter(tmp_path / "\x1b[31m-7")
    for verb in ("list", "describe", "verify"):
        assert "\x1b" not in run(verb, tmp_path, "-o", "wide").stdout
    assert "\x1b" not in run("mark", tmp_path, "--keep", 7).stdout
