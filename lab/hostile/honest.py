"""Those who must not notice anything, as processes: the ranks of a job, and its visitors.

``python -m lab.hostile.honest rank ENDPOINT RANK WORLD_SIZE FOLDER`` runs a barrier at each tenth
of a second, until there is a file ``end`` in FOLDER, and writes what it saw to ``rank-RANK.json``.
``… visitor ENDPOINT RELAY PORT TIMEOUT FOLDER`` comes again and again with a new connection, as a probe, a
viewer and a worker do, and writes how often it was served, or refused, to ``visitor.json``.
"""

import json
import logging
import os
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from lab.hostile.attacker import TEAM_RUN
from lab.patience import PATIENCE

PERIOD = 0.1
"""Seconds between two barriers."""
GENERATION = 1
"""The job's generation. The generation before has left processes behind."""
LAST = b"last"


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def rank(endpoint: str, number: str, world_size: str, folder: str) -> None:
    """Run barriers until rank 0 has seen the file; all ranks stop at the same one."""
    from muster.worker import GrpcBarrier

    warnings = _Warnings()
    logging.getLogger("muster").addHandler(warnings)
    me, end = int(number), Path(folder, "end")
    barrier = GrpcBarrier(
        me,
        int(world_size),
        "checkpoint",
        endpoint,
        PATIENCE,
        PATIENCE,
        run_id=TEAM_RUN,
        generation=GENERATION,
    )
    seen: list[tuple[int, float, float, str]] = []
    stopping = False
    while not stopping:
        time.sleep(PERIOD - time.monotonic() % PERIOD)
        stopping = me == 0 and end.exists()
        arrived = time.monotonic()
        try:
            decision = barrier.vote(payload=LAST if stopping else b"")
        except Exception as error:  # Whatever it is, it must not be.
            seen.append((barrier.sequence, arrived, time.monotonic(), f"{type(error).__name__}: {error}"))
            stopping = stopping or end.exists()
            continue
        seen.append((decision.sequence, arrived, time.monotonic(), decision.outcome.name))
        stopping = stopping or LAST in decision.payloads.values()
    Path(folder, f"rank-{me}.json").write_text(json.dumps({"seen": seen, "warnings": warnings.texts}))


def visitor(endpoint: str, relay: str, http_port: str, within: str, folder: str) -> None:
    """Visit until there is the file; each visit is to be served within so many seconds."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from muster.v1 import barrier_pb2, barrier_pb2_grpc, run_pb2, run_pb2_grpc, store_pb2, store_pb2_grpc

    ca = Path(os.environ["MUSTER_TLS_CA"])
    token = (("authorization", f"Bearer {os.environ['MUSTER_TOKEN']}"),)
    https = ssl.create_default_context(cafile=ca)
    end, timeout = Path(folder, "end"), float(within)
    calls, longest, failed = 0, 0.0, []

    def check(channel: grpc.Channel) -> None:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)

    def look(channel: grpc.Channel) -> None:
        shown = run_pb2_grpc.RunServiceStub(channel).List(
            run_pb2.RunServiceListRequest(), metadata=token, timeout=timeout
        )
        if TEAM_RUN not in [run.run_id for run in shown.runs]:
            raise AssertionError("the team's run is not there")

    def write(channel: grpc.Channel) -> None:
        stub = store_pb2_grpc.StoreServiceStub(channel)
        entry = store_pb2.KeyValue(key="visit", value=str(time.monotonic()).encode())
        request = store_pb2.SetRequest(run_id=TEAM_RUN, entries=[entry])
        stub.Set(request, metadata=token, timeout=timeout)
        read = stub.Get(
            store_pb2.StoreServiceGetRequest(run_id=TEAM_RUN, keys=["visit"], timeout_ms=1_000),
            metadata=token,
            timeout=timeout,
        )
        if list(read.values) != [entry.value]:
            raise AssertionError("the store has another value")

    def arrive(channel: grpc.Channel) -> None:
        request = barrier_pb2.ArriveRequest(
            run_id="team.visits", prefix="p", world_size=1, timeout_ms=5_000, incarnation="visitor"
        )
        barrier_pb2_grpc.BarrierServiceStub(channel).Arrive(request, metadata=token, timeout=timeout)

    def watch(channel: grpc.Channel) -> None:
        for open_stream in (
            lambda: health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=timeout
            ),
            lambda: run_pb2_grpc.RunServiceStub(channel).Watch(
                run_pb2.WatchRequest(run_id=TEAM_RUN), metadata=token, timeout=timeout
            ),
        ):
            stream: Any = open_stream()
            next(stream)
            stream.cancel()

    def page(path: str, *headers: tuple[str, str]) -> Callable[[grpc.Channel], None]:
        def get(_: grpc.Channel) -> None:
            request = urllib.request.Request(f"https://127.0.0.1:{http_port}{path}", headers=dict(headers))
            with urllib.request.urlopen(request, timeout=timeout, context=https) as response:
                response.read()

        return get

    bearer = ("Authorization", f"Bearer {os.environ['MUSTER_TOKEN']}")
    visits: dict[str, tuple[str, Callable[[grpc.Channel], None]]] = {
        "health check": (endpoint, check),
        "list of runs": (endpoint, look),
        "store": (endpoint, write),
        "barrier": (endpoint, arrive),
        "watches": (endpoint, watch),
        "readyz": (endpoint, page("/readyz")),
        "metrics": (endpoint, page("/metrics", bearer)),
        "store through relay": (relay, write),
        "barrier through relay": (relay, arrive),
    }
    while not end.exists():
        for what, (where, visit) in visits.items():
            options = [("grpc.use_local_subchannel_pool", 1)]
            credentials = grpc.ssl_channel_credentials(ca.read_bytes())
            began = time.monotonic()
            with closing(grpc.secure_channel(where, credentials, options=options)) as channel:
                try:
                    visit(channel)
                except Exception as error:
                    said = (
                        f"{error.code().name}: {error.details()}"
                        if isinstance(error, grpc.Call)
                        else repr(error)
                    )
                    failed.append(f"{what}: {said}")
            calls += 1
            longest = max(longest, time.monotonic() - began)
            time.sleep(PERIOD)
    report = {"calls": calls, "longest": longest, "failed": failed}
    Path(folder, "visitor.json").write_text(json.dumps(report))


PROGRAMS: dict[str, Callable[..., None]] = {"rank": rank, "visitor": visitor}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
