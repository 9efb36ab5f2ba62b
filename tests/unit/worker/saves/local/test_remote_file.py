"""Pieces of a file that other keepers have, over real sockets."""

import http.server
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from lab.http_server import serving
from lab.patience import PATIENCE, until
from muster.worker.saves.local.remote_file import RemoteFile, RemotePlace, can_read

TOKEN = "secret"
DATA = bytes(range(256)) * 40


class Keeper(http.server.BaseHTTPRequestHandler):
    """Serves ranges of one file, or nothing."""

    protocol_version = "HTTP/1.1"
    requests: list[str]
    has_file: bool
    may_send: threading.Event

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.headers["Authorization"] != f"Bearer {TOKEN}" or not self.has_file:
            self.send_error(404)
            return
        begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
        piece = DATA[int(begin) : int(end) + 1]
        self.send_response(206 if piece else 416)
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        assert self.may_send.wait(PATIENCE)
        self.wfile.write(piece)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def keeper(
    *, has_file: bool = True, may_send: threading.Event | None = None
) -> Iterator[tuple[str, list[str]]]:
    if may_send is None:
        may_send = threading.Event()
        may_send.set()
    handler = type("Handler", (Keeper,), {"requests": [], "has_file": has_file, "may_send": may_send})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, serving(server):
        yield f"http://127.0.0.1:{server.server_port}/files/1-2/a.distcp", handler.requests  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("offset", "length", "wanted"),
    [(0, 10, DATA[:10]), (300, 5000, DATA[300:5300]), (len(DATA) - 3, 10, DATA[-3:]), (len(DATA), 4, b"")],
)
def test_range_is_read_at_any_offset(offset: int, length: int, wanted: bytes):
    with keeper() as (url, _), closing(RemoteFile(RemotePlace((url,), TOKEN))) as file:
        assert file.read(offset, length) == wanted


def test_next_keeper_is_asked_when_one_lost_the_file():
    with ExitStack() as stack:
        without, asked = stack.enter_context(keeper(has_file=False))
        url, _ = stack.enter_context(keeper())
        file = stack.enter_context(closing(RemoteFile(RemotePlace((without, url), TOKEN))))
        assert file.read(7, 7) == DATA[7:14]
        assert asked


def test_file_that_no_keeper_can_send_is_not_found(unused_tcp_port: int):
    with keeper(has_file=False) as (url, _):
        nobody = f"http://127.0.0.1:{unused_tcp_port}/files/1-2/a.distcp"
        with (
            closing(RemoteFile(RemotePlace((url, nobody), TOKEN))) as file,
            pytest.raises(FileNotFoundError, match=r"no keeper can send it: .*404.*refused"),
        ):
            file.read(0, 1)


def test_damaged_file_is_verified_again_once():
    with keeper() as (url, asked), closing(RemoteFile(RemotePlace((url,), TOKEN), verify=True)) as file:
        file.read(0, 1)
        file.read(1, 1)
    assert [path.endswith("?verify=1") for path in asked] == [True, False]


def test_file_is_not_closed_under_another_threads_read():
    may_send = threading.Event()
    with (
        keeper(may_send=may_send) as (url, asked),
        closing(RemoteFile(RemotePlace((url,), TOKEN))) as file,
        ThreadPoolExecutor(2) as pool,
    ):
        read = pool.submit(file.read, 0, 5000)
        until(lambda: asked)
        closes = pool.submit(file.close)
        may_send.set()
        assert read.result(PATIENCE) == DATA[:5000]
        closes.result(PATIENCE)
        assert file.read(7, 7) == DATA[7:14]


def test_rank_reads_only_from_keepers_without_tls():
    assert can_read(["http://a/x", "http://b/x"])
    assert not can_read(["http://a/x", "https://b/x"])
    assert not can_read([])
