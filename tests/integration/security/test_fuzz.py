"""Random bytes, and messages and sequences that no client should send: nobody is disturbed, nothing leaks.

``tests/support/hostile/fuzzer.py`` speaks, and everything that it says follows from ``SEED``.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import muster.worker
from lab.patience import until
from lab.processes.coordinator import Coordinator
from muster.service.rpc.server import METHODS
from muster.worker import GrpcBarrier
from tests.support.hostile.fuzzer import ALL_METHODS, GOOD, SESSION

SEED = 20_260
MESSAGES = 10_000
MANY_MESSAGES = 100_000
"""Where there is time."""
REQUESTS = 4_000
BOUNDS = (
    "--keep-closed-runs=1",
    "--keep-idle-runs=1",
    "--max-runs=200",
    "--max-groups-per-run=3",
    "--max-payload-bytes=4096",
    "--max-gather-bytes=16384",
    "--max-unheard-decisions=50",
    "--max-store-keys=20",
    "--max-store-bytes=1000000",
    "--max-store-value-bytes=65536",
    "--max-store-clients=100",
    "--max-store-waits=100",
)
"""Small, so that they are reached, and memory is bounded."""
GROWTH_MIB = 100.0
"""How much more memory the second half of the messages may take than the first. The allocator's high-water
mark still rises by some 10 to 50 MiB then; it stands at about 230 MiB after 300,000. This counts where there
is time; what else a message may leave behind is counted one by one."""
FILES = 5
"""Descriptors that may come and go: the database's, and our own question's."""
OF_LIBRARIES = re.compile(
    r"^(asyncio|grpc\b.*|aiohttp\b.*|py\.warnings|concurrent\b.*|uncaught|failed|log\.dropped)$"
)
"""Events that stand for an exception that nobody expected, or for lines that nobody can look at."""


@pytest.fixture
def fuzzed(tmp_path: Path) -> Iterator[Coordinator]:
    """Lives through it, and its log holds nothing that should not have happened."""
    with Coordinator(tmp_path, session_ttl=1.0, extra=BOUNDS) as running:
        meets(running, "before")
        yield running
        meets(running, "after")
        assert running.get("/readyz")[0] == 200
        muster.worker.close()
        assert running.stop() == 0
        bad = [line for line in running.log() if is_bad(line)]
        assert not bad, f"{len(bad)} lines, the first:\n{bad[0]}"


def is_bad(line: dict[str, Any]) -> bool:
    return (
        line["level"] in ("error", "critical")
        or "exception" in line
        or "Traceback (most" in str(line)
        or OF_LIBRARIES.match(line["event"]) is not None
    )


def meets(coordinator: Coordinator, prefix: str) -> None:
    """A rank that wants nothing unusual gets it."""
    GrpcBarrier(0, 1, prefix, coordinator.endpoint, 20, 20, run_id="good").execute_barrier()


def metric(coordinator: Coordinator, name: str) -> dict[str, float]:
    """The values of a metric, by its labels."""
    lines = coordinator.get("/metrics")[1].splitlines()
    return {
        line[len(name) :].rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if re.match(rf"{name}[{{ ]", line)
    }


def test_nothing_that_is_said_on_the_wire_does_harm(fuzzed: Coordinator, thorough: bool):
    messages = MANY_MESSAGES if thorough else MESSAGES
    process = psutil.Process(fuzzed.pid)
    muster.worker.close()
    files, tasks = process.num_fds(), calls_under_way(fuzzed)
    rss = [process.memory_info().rss / 2**20]
    fuzzer = subprocess.Popen(
        [sys.executable, "-m", "tests.support.hostile.fuzzer", fuzzed.endpoint, str(SEED), str(messages)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with fuzzer:
        assert fuzzer.stdout is not None
        assert fuzzer.stdout.readline() == "half\n"
        rss.append(process.memory_info().rss / 2**20)
        report = json.loads(fuzzer.stdout.readline())
    rss.append(process.memory_info().rss / 2**20)
    show(report, rss)
    assert fuzzer.returncode == 0
    assert not report["wrong"], next(iter(report["wrong"].items()))
    assert sum(report["sent"].values()) >= messages
    assert report["sent"].keys() == ALL_METHODS.keys() >= set(METHODS)
    assert min(report["sent"].values()) >= messages / 250, "each method has its part"
    # Deep enough to be decided, welcomed and refused.
    assert report["answers"][SESSION].keys() >= GOOD
    assert any("LIMIT_EXCEEDED" in answer for answers in report["answers"].values() for answer in answers)

    handled = metric(fuzzed, "grpc_server_handled_total")
    faults = {labels: count for labels, count in handled.items() if re.search('"(Unknown|Internal)"', labels)}
    assert handled
    assert not any(faults.values()), faults
    # All that has gone is forgotten: streams, calls, sessions, and the runs with all that they had.
    until(lambda: calls_under_way(fuzzed) == tasks)
    until(lambda: sum(metric(fuzzed, "muster_sessions").values()) == 0)
    until(lambda: sum(metric(fuzzed, "muster_runs").values()) == 0)
    until(lambda: process.num_fds() <= files + FILES)
    assert rss[2] - rss[1] < GROWTH_MIB, rss


def calls_under_way(coordinator: Coordinator) -> float:
    """How many calls have begun and not ended."""
    begun, ended = (metric(coordinator, f"grpc_server_{what}_total") for what in ("started", "handled"))
    return sum(begun.values()) - sum(ended.values())


def show(report: dict[str, Any], rss: list[float]) -> None:
    """The table, for those who ask with ``-s``."""
    print(f"\nseed {SEED}; the coordinator's memory, MiB: before, after half, after all:", *map(round, rss))
    for method, count in sorted(report["sent"].items()):
        print(f"{count:>7,} {method}")
        for answer, times in sorted(report["answers"][method].items(), key=lambda item: -item[1]):
            print(f"{'':>12} {times:>7,} {answer}")
    print(f"{sum(report['sent'].values()):>7,} messages")


# ---------------------------------------------------------------------- the HTTP port

PATHS = ["/", "/metrics", "/healthz", "/readyz", "/status.json", "/runs/a", "/runs/a.json", "/static/app.css"]
ODD = [
    b"/../../etc/passwd",
    b"//",
    b"/%00",
    b"/%ff%fe",
    b"/runs/%2e%2e%2f",
    b"/runs/" + b"%F0%9F%92%A9" * 100,
    b"/runs/%0d%0aSet-Cookie:%20a",
    b"/runs/\xff\xfe",
    b"/" + b"a" * 20_000,
    b"*",
    b"http://elsewhere/",
    b"http://[",
    b"?" + b"a=b&" * 500,
    b"/runs/<script>",
    b"/static/../app.css",
    b"",
]
METHODS_OF_HTTP = [
    b"GET",
    b"HEAD",
    b"POST",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"get",
    b"\x00",
    b"G" * 9_000,
]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.", b"", b"ICY"]
HEADERS = [
    b"Host: a",
    b"Host:",
    b"Content-Length: -1",
    b"Content-Length: 5\r\nContent-Length: 6",
    b"Content-Length: 99999999999999999999",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, gzip\r\nContent-Length: 3",
    b"Expect: 100-continue",
    b"Expect: the worst",
    b"Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA",
    b"Connection: close",
    b"Accept-Encoding: gzip",
    b"Accept-Encoding: \xff",
    b"Authorization: Basic !!!",
    b"Authorization: Bearer " + b"x" * 7_000,
    b"Range: bytes=0-0,-1",
    b"If-Modified-Since: never",
    b"Cookie: " + b"a=b;" * 1_000,
    b"X-Long: " + b"x" * 100_000,
    b"no colon",
    b": no name",
    b" folded",
    b"X-\x00: \x01",
    b"\r",
]
ENOUGH = 0.5
"""Seconds for an answer; a request that is not whole gets none, and is gone again before the port minds."""


def http_request(chance: random.Random) -> bytes:
    """A request with something wrong, or everything."""
    if chance.random() < 0.1:
        return chance.randbytes(chance.choice([1, 10, 1_000])) + b"\r\n\r\n"
    path = chance.choice(PATHS).encode() if chance.random() < 0.5 else chance.choice(ODD)
    if chance.random() < 0.2:
        path = b"/runs/" + bytes(chance.choices(range(33, 256), k=chance.randint(1, 60)))
    method, version = (
        likely if chance.random() < 0.8 else chance.choice(others)
        for likely, others in ((b"GET", METHODS_OF_HTTP), (b"HTTP/1.1", VERSIONS))
    )
    host = b"Host: a" if chance.random() < 0.1 else b"Host: localhost"
    headers = [host, *chance.choices(HEADERS, k=chance.choice([0, 0, 1, 2, 5]))]
    if chance.random() < 0.01:
        headers = [b"X: y"] * 20_000
    body = chance.choice([b"", b"", b"", b"", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", chance.randbytes(50)])
    return b" ".join([method, path, version]) + b"\r\n" + b"\r\n".join([*headers, b"", b""]) + body


async def ask(port: int, data: bytes, *, half_close: bool) -> str:
    """What is answered: a status, nothing, or silence."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(ENOUGH):
            writer.write(data)
            if half_close:
                writer.write_eof()
            first = await reader.readline()
    except TimeoutError:
        return "silence"
    except ConnectionError:
        return "let go"
    finally:
        writer.transport.abort()
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", first)
    return found[1].decode() if found else f"{first[:20]!r}"


async def test_nothing_that_is_asked_of_the_http_port_does_harm(fuzzed: Coordinator):
    chance = random.Random(SEED)
    requests = [(http_request(chance), chance.random() < 0.1) for _ in range(REQUESTS)]
    files = psutil.Process(fuzzed.pid).num_fds()
    answers: Counter[str] = Counter()
    waiting = iter(requests)

    async def work() -> None:
        for data, half_close in waiting:
            answer = await ask(fuzzed.http_port, data, half_close=half_close)
            assert not answer.startswith("5") or answer in ("501", "505"), (answer, data[:500])
            answers[answer] += 1

    await asyncio.gather(*(work() for _ in range(50)))
    print(f"\nseed {SEED}:", dict(answers.most_common()))
    assert answers.total() == REQUESTS
    assert {"200", "400", "404", "405", "421"} <= answers.keys()
    await asyncio.to_thread(until, lambda: psutil.Process(fuzzed.pid).num_fds() <= files + FILES)
