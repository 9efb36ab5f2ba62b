"""A coordinator that cannot start says why, and one whose output goes nowhere serves."""

import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import muster.worker
from lab.patience import PATIENCE
from lab.processes.coordinator import MUSTER, Coordinator, free_port
from muster.worker import GrpcBarrier


@pytest.fixture(autouse=True)
def _session_is_closed() -> Iterator[None]:
    yield
    muster.worker.close()


def serve(*arguments: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(MUSTER), "serve", *arguments], capture_output=True, text=True, timeout=PATIENCE, **more
    )


def free(name: str) -> str:
    return f"--{name}=127.0.0.1:{free_port()}"


def test_a_port_in_use_is_named(coordinator: Coordinator):
    taken = serve(f"--listen={coordinator.endpoint}", free("http"), "--state=memory:")
    assert taken.returncode == 1
    assert f"cannot listen on {coordinator.endpoint}" in taken.stderr
    taken = serve(free("listen"), f"--http=127.0.0.1:{coordinator.http_port}", "--state=memory:")
    assert taken.returncode == 1
    assert f"cannot listen on 127.0.0.1:{coordinator.http_port}" in taken.stderr


@pytest.mark.parametrize(("opened", "closed"), [("listen", "http"), ("http", "listen")])
def test_port_beyond_loopback_is_not_opened_without_tls_and_tokens(opened: str, closed: str):
    address = f"0.0.0.0:{free_port()}"
    ended = serve(f"--{opened}={address}", free(closed), "--state=memory:")
    assert ended.returncode == 1
    assert f"--{opened} {address} is reachable from other machines without --" in ended.stderr
    assert "--insecure" in ended.stderr


def test_a_database_in_use_is_named(coordinator: Coordinator):
    second = serve(free("listen"), free("http"), f"--state={coordinator.state}")
    assert second.returncode == 1
    assert "in use by another coordinator" in second.stderr


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ("sqlite:////no/such/folder/muster.db", 1, "cannot write"),
        ("postgres://db", 2, "names no storage"),
        ("sqlite:///", 2, "names no storage"),
    ],
)
def test_a_state_that_cannot_be_had_is_explained(state: str, code: int, words: str):
    ended = serve(free("listen"), free("http"), f"--state={state}")
    assert ended.returncode == code
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_corrupt_database_is_explained_and_left_alone(tmp_path: Path):
    path = tmp_path / "corrupt.db"
    path.write_bytes(b"this is not a database " * 1000)
    before = path.read_bytes()
    ended = serve(free("listen"), free("http"), f"--state=sqlite:///{path}")
    assert ended.returncode == 1
    assert "damaged or not a database" in ended.stderr
    assert path.read_bytes() == before


def test_another_programs_database_is_left_alone(tmp_path: Path):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE precious (value TEXT)")
    other.close()
    ended = serve(free("listen"), free("http"), f"--state=sqlite:///{path}")
    assert ended.returncode == 1
    assert "another program" in ended.stderr


@pytest.mark.parametrize("address", ["nonsense", "host:", ":99999", "127.0.0.1:port", "1.2.3.4:70000"])
def test_a_bad_address_is_a_usage_error(address: str):
    ended = serve(f"--listen={address}", free("http"), "--state=memory:")
    assert ended.returncode == 2
    assert "HOST:PORT" in ended.stderr


def test_closed_standard_streams_do_not_hurt(tmp_path: Path):
    """Without them the first files opened would become stdout and stderr."""
    port, http_port = free_port(), free_port()
    command = (
        f"exec {MUSTER} serve --listen=127.0.0.1:{port} --http=127.0.0.1:{http_port} "
        f"--state=sqlite:///{tmp_path}/m.db <&- >&- 2>&-"
    )
    process = subprocess.Popen(["/bin/sh", "-c", command])
    try:
        barrier = GrpcBarrier(0, 1, "p", f"127.0.0.1:{port}", 30, 20, run_id="closed")
        barrier.execute_barrier()
    finally:
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 0


def test_a_log_that_nobody_reads_does_not_stop_the_coordinator(tmp_path: Path):
    port, http_port = free_port(), free_port()
    process = subprocess.Popen(
        [
            str(MUSTER),
            "serve",
            f"--listen=127.0.0.1:{port}",
            f"--http=127.0.0.1:{http_port}",
            "--state=memory:",
        ],
        stderr=subprocess.PIPE,
    )
    try:
        barrier = GrpcBarrier(0, 1, "p", f"127.0.0.1:{port}", 30, 20, run_id="unread")
        # A pipe holds 64 KiB; these lines are several times as much.
        for _ in range(1500):
            barrier.execute_barrier()
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
