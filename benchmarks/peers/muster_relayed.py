"""Muster's ranks behind relays: a session each, to the relay of its node; the relays are processes beside."""

import asyncio
import atexit
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc.aio

from benchmarks.peers.base import LoadSpec
from benchmarks.peers.muster import CHANNEL_OPTIONS, Rank, SessionLoad
from benchmarks.peers.muster_relays import nodes_of

REPORTS = "MUSTER_BENCH_RELAY_REPORTS"
"""Names a folder for what the relays have to tell at their end."""


def open_load(spec: LoadSpec) -> "RelayedLoad":
    """Return ranks that hold a session each, through relays."""
    return RelayedLoad(spec)


class RelayedLoad(SessionLoad):
    """The ranks of one load process, and the process of their nodes' relays."""

    def __init__(self, spec: LoadSpec) -> None:
        super().__init__(spec)
        self._folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
        self._nodes = list(nodes_of(spec.ranks))
        report = Path(os.environ.get(REPORTS) or self._folder) / f"relays-{spec.ranks.start}.json"
        self._relays = subprocess.Popen(
            [
                sys.executable,
                *("-m", "benchmarks.processes.relay_host"),
                f"127.0.0.1:{spec.port}",
                *(str(len(self._nodes)), str(self._folder), str(report)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self._relays.kill)
        assert self._relays.stdout is not None
        if self._relays.stdout.readline() != b"ready\n":
            raise RuntimeError("the relays did not start")

    async def _connect(self) -> list[Rank]:
        ranks = []
        for number, node in enumerate(self._nodes):
            for rank in node:
                channel = grpc.aio.insecure_channel(
                    f"unix://{self._folder}/{number}.sock", options=CHANNEL_OPTIONS
                )
                ranks.append(Rank(rank, channel))
        await asyncio.gather(*(rank.join(self._spec.world_size) for rank in ranks))
        return ranks
