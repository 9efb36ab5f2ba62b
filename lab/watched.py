"""A job under torchrun that shows whatever a dashboard can show, while Prometheus looks on.

It reaches the coordinator through a relay. A watcher runs beside it.

Two workers pass barriers and save. One of them is usually late, and one save answers a request. A barrier is
aborted. Three keepers hold a local checkpoint. Another run is closed before it saves as requested. The
coordinator serves with TLS, has its state in etcd, and has been restarted. At the end one rank
stays away from an open barrier.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import grpc

import muster.worker
from lab.authority import Authority
from lab.keepers import Keeper, save
from lab.patience import PATIENCE, until
from lab.processes.agents import Job
from lab.processes.command import output
from lab.processes.coordinator import Coordinator
from lab.processes.etcd import cluster
from lab.processes.prometheus import Prometheus, Series
from lab.processes.relay import Relay
from lab.processes.watcher import Watcher
from lab.watching.metadata import FakeAws
from muster.worker import GrpcBarrier

RUN = "llama-70b"
CLOSED_RUN = "vit-small"
CHECKPOINTS = f'run="{RUN}", prefix="checkpoint"'

SCRAPES = 20.0
"""Seconds, of many scrapes."""

PROGRAM = '''
"""Pass barriers and save, as the plan says; then stay away from one, until a file tells to come."""

import json
import random
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from muster.worker import BarrierError, Checkpointer, GrpcBarrier, SavePoint, WriteReport
from muster.worker import step as note

folder = Path(sys.argv[1])
plan = json.loads((folder / "plan.json").read_text())
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
chance = random.Random(rank)
checkpoint = GrpcBarrier(barrier_prefix="checkpoint", timeout_secs=3600)
evaluation = GrpcBarrier(barrier_prefix="eval", timeout_secs=60)
checkpointer = Checkpointer(folder / "checkpoints", keep_last=2)
point = SavePoint()
state = {"weight": torch.full((1000,), float(rank))}
for step in range(plan["steps"]):
    note(step)
    # A save that is asked for when the job is at its end comes too late for it.
    while step == 2 and not (folder / "asked").exists():
        time.sleep(0.05)
    time.sleep(plan["pace"] * chance.uniform(0.2, 1) * (1 + rank))
    # As a job does that writes its checkpoints itself.
    report = WriteReport(step=step, bytes=4000, seconds=chance.uniform(0, 1), commits=True)
    checkpoint.vote(report=report)
    if point.reached(step):
        point.done()
    if step % 4 == 1:
        checkpointer.save(step, state)
        checkpointer.finalize(blocking=True)
    if step % 4 == 2:
        time.sleep(plan["pace"] * chance.uniform(0, 1))
        try:
            if rank == 0 and step % 8 == 2:
                evaluation.abort("the loss is not a number")
            else:
                evaluation.execute_barrier()
        except BarrierError:
            pass
(folder / f"away-{rank}").touch()
while rank == 1 and not (folder / "finish").exists():
    time.sleep(0.05)
checkpoint.execute_barrier()
point.close()
checkpointer.close()
'''


@dataclass(frozen=True, slots=True)
class Watched:
    """The job at its end, when one rank is missing."""

    coordinator: Coordinator
    relay: Relay
    prometheus: Prometheus
    began: float
    """Seconds since 1970."""

    def finds(self, expr: str) -> None:
        """See that an expression has a number; a failed scrape leaves none for a moment."""
        until(
            lambda: has_a_number(self.prometheus.query(expr)),
            lambda: f"{expr}: {self.prometheus.query(expr)}",
            patience=SCRAPES,
        )


def has_a_number(found: list[Series]) -> bool:
    """Whether any of its samples is one."""
    return any(math.isfinite(value) for series in found for _, value in series.samples)


@contextmanager
def watched_job(folder: Path, *, steps: int, pace: float, interval: float) -> Iterator[Watched]:
    """Run the job until one rank is missing, and watch it.

    Args:
        folder: for all that the processes leave.
        steps: how often its workers pass a barrier.
        pace: seconds that a worker takes for a step, about.
        interval: seconds between two scrapes.
    """
    jobs = folder / "job"
    jobs.mkdir()
    (jobs / "plan.json").write_text(json.dumps({"steps": steps, "pace": pace}))
    authority = Authority(folder)
    pair = authority.issue("coordinator")
    tls = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    with (
        mock.patch.dict(os.environ, MUSTER_TLS_CA=str(authority.ca)),
        # A coordinator that is one of several has some metrics more.
        cluster() as etcd,
        Coordinator(folder, state=etcd.state("watched"), session_ttl=3.0, extra=tls) as coordinator,
        grpc.secure_channel(
            coordinator.endpoint, grpc.ssl_channel_credentials(authority.ca.read_bytes())
        ) as channel,
        Relay(folder, coordinator.endpoint) as relay,
        FakeAws() as cloud,
        Watcher(
            folder, coordinator.endpoint, "node-1", "aws", extra=(f"--metadata-url={cloud.base}",)
        ) as watcher,
        Prometheus(
            folder,
            f"127.0.0.1:{coordinator.http_port}",
            f"127.0.0.1:{relay.http_port}",
            f"127.0.0.1:{watcher.http_port}",
            interval=interval,
        ) as prometheus,
        Job(jobs, relay.endpoint, RUN, PROGRAM) as job,
    ):
        began = time.time()
        until(lambda: bool(prometheus.query("muster_coordinator_epoch == 1")))
        coordinator.stop()
        coordinator.start()
        # It answers before it leads, and refuses keepers until then.
        until(lambda: bool(prometheus.query("muster_coordinator_epoch == 2")))
        agents = [job.agent("2") for _ in range(2)]
        keepers = [Keeper(channel, number, 3, run_id=RUN, domain=f"rack-{number}") for number in range(3)]
        save(keepers, 40, 1, persisted_as="s3://bucket/job1/step-40")
        _close_a_run(coordinator.endpoint)
        until(lambda: bool(prometheus.query(f'muster_sessions{{run="{RUN}"}} > 0')))
        output(coordinator.endpoint, "save", RUN)
        (jobs / "asked").touch()
        job.trace("away-*", 2, patience=PATIENCE + 3 * steps * pace)
        waiting = f"muster_barriers_open{{{CHECKPOINTS}}} == 1"
        done = f'muster_barrier_decisions_total{{{CHECKPOINTS}, outcome="RELEASED"}} == {steps}'
        until(lambda: bool(prometheus.query(f"{waiting} and on (run, prefix) {done}")))
        until(lambda: bool(prometheus.query(f'muster_run_saved_step{{run="{RUN}"}}')))
        yield Watched(coordinator, relay, prometheus, began)
        for keeper in keepers:
            keeper.close()
        job.finish()
        assert [agent.wait() for agent in agents] == [0, 0], job.said()


def _close_a_run(endpoint: str) -> None:
    try:
        GrpcBarrier(0, 1, "checkpoint", endpoint, 20, 20, CLOSED_RUN).execute_barrier()
        output(endpoint, "save", CLOSED_RUN, "--deadline=3600")
    finally:
        muster.worker.close()
    output(endpoint, "close", CLOSED_RUN, "--reason", "the budget is spent")
