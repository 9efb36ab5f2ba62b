"""Whatever is not as it was written is found."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Lock

import pytest

from lab.patience import PATIENCE
from muster.checkpoint import retry
from muster.checkpoint.damage import Damage, DamageError
from muster.checkpoint.digest import Segment, digest_of
from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestReference
from muster.checkpoint.source import FolderSource, OpenFile, Source
from muster.checkpoint.verification import (
    check_sizes,
    read_file,
    read_item,
    read_manifest,
    verify,
)
from tests.support.saves.stored_checkpoints import ITEMS, manifest_of, write_files

FILE = "__0_0.distcp"
DATA = b"".join(ITEMS[FILE])
BEGINS = (0, 6, 7)
"""Where the items of the file begin."""


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    write_files(tmp_path, ITEMS)
    return manifest_of(ITEMS)


def found(source: Source, manifest: Manifest) -> list[Damage]:
    return [damage for one in verify(source, manifest, 2) for damage in one.damages]


def begin_of(place: int) -> int:
    return max(begin for begin in BEGINS if begin <= place)


def test_undamaged_checkpoint_is_read_to_its_last_byte(tmp_path: Path, manifest: Manifest):
    heard, lock = list[int](), Lock()

    def hear(count: int) -> None:
        with lock:
            heard.append(count)

    verified = list(verify(FolderSource(tmp_path), manifest, 2, hear))
    assert [(one.file, one.size, one.damages) for one in verified] == [
        (name, sum(map(len, items)), ()) for name, items in ITEMS.items()
    ]
    assert sum(heard) == manifest.size


def test_every_flipped_bit_is_found_where_its_item_begins(tmp_path: Path, manifest: Manifest):
    for place in range(len(DATA)):
        changed = bytearray(DATA)
        changed[place] ^= 1 << (place % 8)
        (tmp_path / FILE).write_bytes(changed)
        (damage,) = found(FolderSource(tmp_path), manifest)
        assert (damage.file, damage.offset) == (FILE, begin_of(place))
        assert "bytes are not what was written" in damage.reason


def test_every_truncation_is_found(tmp_path: Path, manifest: Manifest):
    for length in range(len(DATA)):
        (tmp_path / FILE).write_bytes(DATA[:length])
        (damage,) = found(FolderSource(tmp_path), manifest)
        assert (damage.file, damage.offset) == (FILE, begin_of(length))
        assert "bytes were written from this offset on" in damage.reason


@pytest.mark.parametrize("more", [b"x", b"\0", DATA])
def test_every_extension_is_found(tmp_path: Path, manifest: Manifest, more: bytes):
    (tmp_path / FILE).write_bytes(DATA + more)
    (damage,) = found(FolderSource(tmp_path), manifest)
    assert (damage.file, damage.offset) == (FILE, len(DATA))
    assert "it goes on after" in damage.reason


def test_file_that_was_empty_may_not_have_content(tmp_path: Path):
    manifest = manifest_of({"empty": []})
    write_files(tmp_path, {"empty": []})
    assert found(FolderSource(tmp_path), manifest) == []
    (tmp_path / "empty").write_bytes(b"x")
    assert [damage.offset for damage in found(FolderSource(tmp_path), manifest)] == [0]


def test_swapped_items_and_files_are_found(tmp_path: Path, manifest: Manifest):
    (tmp_path / FILE).write_bytes(b"".join(reversed(ITEMS[FILE])))
    assert len(found(FolderSource(tmp_path), manifest)) == 1
    write_files(tmp_path, ITEMS)
    one, two = (tmp_path / name for name in ITEMS)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    assert [damage.file for damage in found(FolderSource(tmp_path), manifest)] == list(ITEMS)


@pytest.mark.parametrize("instead", ["nothing", "a folder", "a link to nowhere"])
def test_missing_file_is_found(tmp_path: Path, manifest: Manifest, instead: str):
    path = tmp_path / FILE
    path.unlink()
    if instead == "a folder":
        path.mkdir()
    elif instead == "a link to nowhere":
        path.symlink_to("nowhere")
    assert [(one.file, one.reason) for one in found(FolderSource(tmp_path), manifest)] == [
        (FILE, "it is missing")
    ]


class Unsteady:
    """A source whose reads go wrong as a test says."""

    def __init__(self, folder: Path, read: Callable[[OpenFile, int, memoryview], int]) -> None:
        self._source = FolderSource(folder)
        self._read = read
        self.place = self._source.place
        self.opened = 0

    def sizes(self) -> dict[str, int]:
        return self._source.sizes()

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        self.opened += 1
        with self._source.open(name) as file:
            yield _Unsteady(file, self._read)


class _Unsteady:
    def __init__(self, file: OpenFile, read: Callable[[OpenFile, int, memoryview], int]) -> None:
        self._file = file
        self._unsteady = read

    def read(self, offset: int, length: int) -> bytes:
        return self._file.read(offset, length)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return self._unsteady(self._file, offset, buffer)


def test_mismatch_that_a_second_read_does_not_see_is_no_damage(tmp_path: Path, manifest: Manifest):
    reads = list[int]()

    def once_wrong(file: OpenFile, offset: int, buffer: memoryview) -> int:
        reads.append(offset)
        count = file.read_into(offset, buffer)
        if len(reads) == 1:
            buffer[:count] = b"\0" * count
        return count

    source = Unsteady(tmp_path, once_wrong)
    only = Manifest({FILE: manifest.files[FILE]})
    assert found(source, only) == []
    assert source.opened == 2, "a second read is one of a file that was opened again"


def test_io_error_is_retried_and_is_no_damage(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retry, "DELAYS", (0.0,))
    failures = [OSError("EIO")]

    def fails(file: OpenFile, offset: int, buffer: memoryview) -> int:
        if failures:
            raise failures.pop()
        return file.read_into(offset, buffer)

    only = Manifest({FILE: manifest.files[FILE]})
    assert found(Unsteady(tmp_path, fails), only) == []
    failures += [OSError("EIO")] * 2
    with pytest.raises(OSError, match="EIO"):
        found(Unsteady(tmp_path, fails), only)


def test_closing_a_verification_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that is interrupted does not read terabytes to their end."""
    monkeypatch.setattr("muster.checkpoint.verification.PIECE", 1)
    files = {"a": [b"small"], "b": [b"x" * 100_000]}
    write_files(tmp_path, files)
    reading, go_on, count = Event(), Event(), 0

    def slow(file: OpenFile, offset: int, buffer: memoryview) -> int:
        nonlocal count
        read = file.read_into(offset, buffer)
        if buffer[:read].tobytes() == b"x":
            count += 1
            reading.set()
            assert go_on.wait(PATIENCE)
        return read

    with closing(verify(Unsteady(tmp_path, slow), manifest_of(files), 2)) as verified:
        assert next(verified).file == "a"
        assert reading.wait(PATIENCE)
        # What closes it waits for the thread that reads, which goes on when it is told to stop.
        monkeypatch.setattr(Event, "set", lambda self, was=Event.set: (was(self), was(go_on)))
    assert count == 1


# ---------------------------------------------------------------------- single parts


def test_manifest_is_read_if_it_is_the_one_that_is_named(tmp_path: Path, manifest: Manifest):
    data = manifest.encode()
    (tmp_path / MANIFEST).write_bytes(data)
    source = FolderSource(tmp_path)
    assert read_manifest(source, ManifestReference.of(data)) == manifest
    assert read_manifest(source, None) is None
    for changed in (data[:-1], data + b" ", data.replace(b'"rank":1', b'"rank":0')):
        (tmp_path / MANIFEST).write_bytes(changed)
        with pytest.raises(DamageError, match=r"is not the manifest that committed\.json names"):
            read_manifest(source, ManifestReference.of(data))
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(DamageError, match="it is missing"):
        read_manifest(source, ManifestReference.of(data))


def test_named_manifest_that_cannot_be_read_is_damage(tmp_path: Path):
    (tmp_path / MANIFEST).write_bytes(b"{}")
    with pytest.raises(DamageError, match="cannot be read"):
        read_manifest(FolderSource(tmp_path), ManifestReference.of(b"{}"))


def test_whole_file_is_read_verified(tmp_path: Path, manifest: Manifest):
    source = FolderSource(tmp_path)
    assert read_file(source, manifest, FILE) == DATA
    with pytest.raises(DamageError, match=r"manifest\.json: it does not name other"):
        read_file(source, manifest, "other")
    for place in range(len(DATA)):
        (tmp_path / FILE).write_bytes(DATA[:place] + b"\xff" + DATA[place + 1 :])
        with pytest.raises(DamageError) as caught:
            read_file(source, manifest, FILE)
        assert caught.value.damage.offset == begin_of(place)
    for wrong in (DATA[:-1], DATA + b"x"):
        (tmp_path / FILE).write_bytes(wrong)
        with pytest.raises(DamageError, match=f"it has {len(wrong)} bytes, and {len(DATA)} were written"):
            read_file(source, manifest, FILE)


@pytest.mark.parametrize(("offset", "length"), [(0, 6), (6, 1), (7, 9), (0, 7), (6, 10), (0, 16)])
def test_item_is_read_verified(tmp_path: Path, manifest: Manifest, offset: int, length: int):
    segments = manifest.files[FILE].between(offset, length)
    buffer = memoryview(bytearray(length))
    with FolderSource(tmp_path).open(FILE) as file:
        read_item(file, FILE, offset, segments, buffer)
    assert buffer == DATA[offset : offset + length]
    for place in range(offset, offset + length):
        (tmp_path / FILE).write_bytes(DATA[:place] + b"\xff" + DATA[place + 1 :])
        with FolderSource(tmp_path).open(FILE) as file, pytest.raises(DamageError) as caught:
            read_item(file, FILE, offset, segments, buffer)
        assert caught.value.damage.offset == begin_of(place)
        (tmp_path / FILE).write_bytes(DATA[:place])
        with FolderSource(tmp_path).open(FILE) as file, pytest.raises(DamageError, match="are there"):
            read_item(file, FILE, offset, segments, buffer)


def test_empty_item_needs_no_bytes(tmp_path: Path, manifest: Manifest):
    with FolderSource(tmp_path).open(FILE) as file:
        read_item(file, FILE, 3, manifest.files[FILE].between(3, 0), memoryview(b""))


def test_sizes_show_what_is_missing_or_of_another_length(manifest: Manifest):
    there = {name: entry.size for name, entry in manifest.files.items()}
    check_sizes(manifest, there | {"another file": 3})
    with pytest.raises(DamageError, match=f"{FILE}: it is missing"):
        check_sizes(manifest, {name: size for name, size in there.items() if name != FILE})
    with pytest.raises(DamageError, match=f"{FILE}: it has 15 bytes, and 16 were written"):
        check_sizes(manifest, there | {FILE: 15})


def test_segment_of_another_length_is_damage_even_if_its_digest_is_right():
    from muster.checkpoint.verification import check

    with pytest.raises(DamageError, match="4 bytes were written from this offset on, and 3 are there"):
        check("a", 0, Segment(4, digest_of(b"abc")), b"abc")
