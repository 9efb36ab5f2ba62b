"""A file is fetched piece by piece, verified, from whichever source has it."""

import random
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint.digest import Segment, digest_of
from muster.checkpoint.manifest import FileEntry
from muster.keeper import fetching
from muster.keeper.fetching import (
    DamagedSourcesError,
    Fetch,
    NoSourceError,
    SilentSourcesError,
    Sources,
    pieces_of,
    shuffled,
)
from muster.keeper.transport import AbsentError, TransportError

lengths = st.lists(st.integers(1, 40), max_size=12)


def entry_of(data: bytes, cuts: list[int]) -> FileEntry:
    segments, offset = [], 0
    for length in cuts:
        segments.append(Segment(length, digest_of(data[offset : offset + length])))
        offset += length
    return FileEntry(tuple(segments), 0)


class FakeStream:
    def __init__(self, data: bytes, breaks_after: int | None) -> None:
        self._data = data
        self._left = breaks_after

    def read_into(self, buffer: memoryview) -> int:
        if self._left == 0:
            raise TransportError("it broke off")
        count = min(len(buffer), len(self._data), 7, self._left or 7)
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        if self._left is not None:
            self._left -= count
        return count

    def close(self) -> None:
        pass


class FakeTransport:
    """Sources that have a file, or misbehave."""

    def __init__(self, answers: dict[str, Callable[[str], tuple[bytes, int | None]]]) -> None:
        self._answers = answers
        self.asked: list[tuple[str, str, int]] = []

    def open(self, url: str, path: str, offset: int = 0, length: int | None = None) -> FakeStream:
        self.asked.append((url, path, offset))
        data, breaks_after = self._answers[url](path)
        end = len(data) if length is None else offset + length
        return FakeStream(data[offset:end], breaks_after)

    def keep_only(self, urls: Collection[str]) -> None:
        pass


def whole(data: bytes) -> Callable[[str], tuple[bytes, int | None]]:
    return lambda _: (data, None)


def raising(error: Exception) -> Callable[[str], tuple[bytes, int | None]]:
    def answer(_: str) -> tuple[bytes, int | None]:
        raise error

    return answer


def fetched(transport: FakeTransport, entry: FileEntry, folder: Path) -> bytes:
    fetch = Fetch(transport, Sources(list(transport._answers), "/f", "the file"), entry, folder / ".f.fetch")
    for piece in fetch.missing():
        fetch.get(piece)
    fetch.finish(folder / "f")
    return (folder / "f").read_bytes()


@given(lengths, st.integers(1, 100))
def test_pieces_cover_a_file_in_whole_segments(cuts: list[int], least: int):
    entry = entry_of(bytes(sum(cuts)), cuts)
    pieces = pieces_of(entry, least)
    assert [one for piece in pieces for one in piece.segments] == list(entry.segments)
    offset = 0
    for piece in pieces:
        assert piece.offset == offset
        offset += piece.length
    assert all(piece.length >= least for piece in pieces[:-1])
    assert offset == entry.size


@given(data=st.data(), cuts=lengths, least=st.integers(1, 60))
@settings(max_examples=60)
def test_partial_file_of_any_content_is_completed(
    data: st.DataObject, cuts: list[int], least: int, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("fetch")
    content = random.Random(sum(cuts)).randbytes(sum(cuts))
    left = bytearray(content[: data.draw(st.integers(0, len(content)))])
    for place in data.draw(st.lists(st.integers(0, len(left) - 1), max_size=3)) if left else []:
        left[place] ^= 0xFF
    left += bytes(data.draw(st.integers(0, 9)))
    (folder / ".f.fetch").write_bytes(left)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching.pieces_of, "__defaults__", (least,))
        assert fetched(FakeTransport({"a": whole(content)}), entry_of(content, cuts), folder) == content
    assert [one.name for one in folder.iterdir()] == ["f"]


def test_segments_in_the_partial_file_are_not_fetched_again(tmp_path: Path):
    content = random.Random(1).randbytes(100)
    (tmp_path / ".f.fetch").write_bytes(content[:65])
    transport = FakeTransport({"a": whole(content)})
    assert fetched(transport, entry_of(content, [20] * 5), tmp_path) == content
    assert transport.asked == [("a", "/f", 60)]


def test_fetch_continues_after_its_last_verified_segment(tmp_path: Path):
    content = random.Random(2).randbytes(100)
    breaks = iter([50, None])
    transport = FakeTransport({"a": lambda _: (content, next(breaks))})
    assert fetched(transport, entry_of(content, [20] * 5), tmp_path) == content
    assert [offset for _, _, offset in transport.asked] == [0, 40]


def test_source_with_wrong_bytes_is_asked_to_verify_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    content = random.Random(3).randbytes(100)
    flipped = bytearray(content)
    flipped[50] ^= 1
    transport = FakeTransport({"http://a": whole(bytes(flipped)), "http://b": whole(content)})
    assert fetched(transport, entry_of(content, [20] * 5), tmp_path) == content
    assert transport.asked == [
        ("http://a", "/f", 0),
        ("http://a", "/f?verify=1", 40),
        ("http://b", "/f", 40),
    ]
    assert "http://a sent a damaged copy of the file (the segment at offset 40" in caplog.text


def test_copy_is_not_damaged_before_its_keeper_was_asked_to_verify_it():
    sources = Sources(["http://a"], "/f", "the file")
    (first, unverified), (second, _) = sources.next(), sources.next()
    sources.suspect(first, unverified, 0)
    sources.suspect(second, unverified, 40)  # Both pieces were on their way at the same time.
    url, verified = sources.next()
    assert verified == "/f?verify=1"
    sources.suspect(url, verified, 0)
    with pytest.raises(DamagedSourcesError):
        sources.next()


def test_source_that_drops_its_damaged_copy_is_not_asked_again(tmp_path: Path):
    content = random.Random(4).randbytes(40)

    def answer(path: str) -> tuple[bytes, int | None]:
        if "verify" in path:
            raise AbsentError("http://a dropped it")
        return bytes(40), None

    transport = FakeTransport({"http://a": answer, "http://b": whole(content)})
    assert fetched(transport, entry_of(content, [40]), tmp_path) == content


@pytest.mark.parametrize(
    ("answers", "error", "said"),
    [
        ({}, NoSourceError, "none is known"),
        ({"a": raising(AbsentError("a lacks it"))}, NoSourceError, "a lacks it"),
        ({"a": whole(bytes(40))}, DamagedSourcesError, "other bytes than were written, at offset 0"),
        ({"a": raising(TransportError("a is silent"))}, SilentSourcesError, "a is silent"),
        (
            {"a": raising(TransportError("a is silent")), "b": raising(AbsentError("b lacks it"))},
            SilentSourcesError,
            "a is silent",
        ),
        ({"a": whole(bytes(40)), "b": raising(AbsentError("b lacks it"))}, DamagedSourcesError, "b lacks it"),
        ({"a": whole(b"short")}, SilentSourcesError, "broke off after 5 bytes"),
    ],
)
def test_error_says_why_no_source_has_the_file(
    tmp_path: Path,
    answers: dict[str, Callable[[str], tuple[bytes, int | None]]],
    error: type[Exception],
    said: str,
):
    content = random.Random(5).randbytes(40)
    with pytest.raises(error, match=said):
        fetched(FakeTransport(answers), entry_of(content, [40]), tmp_path)
    assert not (tmp_path / "f").exists()


def test_empty_file_needs_no_source(tmp_path: Path):
    assert fetched(FakeTransport({}), FileEntry((), 0), tmp_path) == b""


@given(st.lists(st.text()), st.text())
def test_order_of_sources_names_each_once_and_depends_only_on_the_key(urls: list[str], key: str):
    assert sorted(shuffled(urls, key)) == sorted(set(urls))
    assert shuffled(urls, key) == shuffled(reversed(urls), key)


def test_order_of_sources_differs_between_keepers():
    urls = [f"http://{node}" for node in range(4)]
    first = [shuffled(urls, f"keeper-{number}")[0] for number in range(200)]
    assert all(first.count(url) > 25 for url in urls), "each source is asked first by some keepers"
