"""A keeper's folder: lock, id, address, attempts and space."""

import json
import os
from pathlib import Path

import pytest

from muster.checkpoint.committed import SaveAttempt, run_mark
from muster.keeper.folder import FolderInUseError, KeeperFolder, Signature


@pytest.fixture
def folder(tmp_path: Path) -> KeeperFolder:
    made = KeeperFolder(tmp_path / "local", "job")
    made.lock()
    return made


def test_runs_have_folders_of_their_own(tmp_path: Path, folder: KeeperFolder):
    assert folder.path == tmp_path / "local" / f"muster-{run_mark('job')}"
    KeeperFolder(tmp_path / "local", "another").lock()


def test_folder_of_a_live_keeper_is_refused(tmp_path: Path, folder: KeeperFolder):
    with pytest.raises(FolderInUseError, match="another keeper runs in"):
        KeeperFolder(tmp_path / "local", "job").lock()


def test_id_is_made_once_and_again_if_it_is_unreadable(folder: KeeperFolder):
    made = folder.id()
    assert folder.id() == made
    for damaged in (b"", b"\xff\xfe", b"../x", b"x" * 100):
        (folder.path / "keeper.id").write_bytes(damaged)
        assert folder.id() not in (made, "")


def test_address_is_replaced_at_once_and_readable_by_its_user_alone(folder: KeeperFolder):
    for token in ("first", "second"):
        folder.announce("http://127.0.0.1:1", token, "id")
        path = folder.path / "keeper.json"
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads(path.read_text()) == {
            "pid": os.getpid(),
            "url": "http://127.0.0.1:1",
            "token": token,
            "id": "id",
        }
    folder.retract()
    assert not path.exists()


def test_only_folders_with_the_name_of_an_attempt_are_attempts(folder: KeeperFolder):
    folder.begin(SaveAttempt(1, 2))
    for other in ("01-2", "x", "1-2-3"):
        (folder.path / other).mkdir()
    assert folder.attempts() == {SaveAttempt(1, 2)}


def test_files_of_an_attempt_are_its_regular_files(folder: KeeperFolder):
    attempt = SaveAttempt(1, 2)
    path = folder.begin(attempt)
    for name in ("__0_0.distcp", ".metadata", "manifest.json", ".__1_0.distcp.fetch"):
        (path / name).touch()
    (path / ".notes").mkdir()
    (path / "link").symlink_to(path / "__0_0.distcp")
    assert folder.files(attempt) == {"__0_0.distcp", ".metadata", "manifest.json"}
    assert folder.files(SaveAttempt(9, 9)) == frozenset()


@pytest.mark.parametrize("name", ["", ".", "..", "../keeper.json", "a/b", "a\0"])
def test_name_that_leads_out_of_an_attempt_is_refused(folder: KeeperFolder, name: str):
    with pytest.raises(ValueError, match="no name in a folder"):
        folder.file(SaveAttempt(1, 2), name)
    with pytest.raises(ValueError, match="no name in a folder"):
        folder.note(SaveAttempt(1, 2), name)


def test_deleted_attempt_leaves_nothing_even_after_a_crash(tmp_path: Path, folder: KeeperFolder):
    attempt = SaveAttempt(1, 2)
    (folder.begin(attempt) / "x").write_bytes(b"x" * 100_000)
    assert folder.used() >= 100_000
    folder.delete(attempt)
    folder.delete(attempt)
    assert folder.attempts() == set()
    half = folder.path / ".removed-1-3"
    half.mkdir()
    os.close(folder._lock)
    KeeperFolder(tmp_path / "local", "job").lock()
    assert not half.exists()


def test_signature_changes_with_the_file(tmp_path: Path):
    path = tmp_path / "f"
    assert Signature.of(path) is None
    path.write_bytes(b"one")
    first = Signature.of(path)
    os.utime(path, ns=(1, 1))
    second = Signature.of(path)
    path.with_name("g").write_bytes(b"one")
    path.with_name("g").rename(path)
    os.utime(path, ns=(1, 1))
    assert len({first, second, Signature.of(path)}) == 3
    (tmp_path / "link").symlink_to(path)
    assert Signature.of(tmp_path / "link") is None
    assert Signature.of(tmp_path) is None
