"""``muster checkpoint`` ends without a traceback if its input is missing, odd or hostile."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer

from muster.checkpoint.committed import MARKER, seal, unseal
from muster.checkpoint.manifest import MANIFEST, ManifestReference
from muster.checkpoint.storage_options import STORAGE_OPTIONS
from muster.service.cli.failure import Exit
from muster.service.cli.options import Output
from muster.service.cli.views import checkpoint as module
from tests.support.saves.stored_checkpoints import ODD, by_adapter, in_folder
from tests.unit.service.cli.views.checkpoint.commands import FILE, run


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("secret", f"{STORAGE_OPTIONS} is no JSON object, such as "),
        ('["secret"]', f"{STORAGE_OPTIONS} is no JSON object, such as "),
        ('{"url": "secret"}', "memory://job1 cannot be opened: an option is not what its store takes: "),
    ],
)
def test_options_that_no_bucket_takes_are_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, said: str
):
    monkeypatch.setenv(STORAGE_OPTIONS, options)
    result = run("list", "memory://job1", code=Exit.USAGE)
    assert result.stderr.startswith(f"Error: {said}")
    assert "secret" not in result.stderr
    in_folder(tmp_path, 1)
    run("list", tmp_path)  # They are not a folder's.


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
