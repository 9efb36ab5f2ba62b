"""From a notice until all ranks have saved, for each source of notices: ``python -m benchmarks.notices``.

Four agents of torchrun with two ranks each train, on one machine; each agent has the name of a node. A
watcher of the last node reads a fake API server, metadata server or ``scontrol`` on loopback, at its default
interval. The time counts from the notice until all ranks have saved. Steps count from the notice to the
agreed step, and from the request to it. No step may be trained after the agreed one.
"""

import argparse
import os
import random
import stat
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from lab.patience import PATIENCE, until
from lab.processes import fork_client
from lab.processes.coordinator import MUSTER, Coordinator
from lab.processes.torchrun import agents
from lab.processes.watcher import Watcher
from lab.watching import kubernetes_api
from lab.watching.metadata import FakeAws, FakeAzure, FakeGoogle
from muster.watcher.kubernetes.evictions import RESPONDER

PROGRAM = Path(__file__).parents[1] / "lab" / "noticed.py"
NODES = ("node-1", "node-2", "node-3", "node-4")
RANKS_PER_NODE = 2
RANKS = len(NODES) * RANKS_PER_NODE
LOST = NODES[-1]
"""The node that the notices are about."""
SECONDS = 60.0
"""From the notice until the node goes, where the source says it."""


@dataclass(frozen=True)
class Bench:
    """One source, its arguments, and what gives the notice and takes it back."""

    name: str
    sources: tuple[str, ...]
    arguments: tuple[str, ...]
    give: Callable[[int], None]
    """Called with the number of the repeat."""
    take_back: Callable[[], None]
    path: str = ""
    """A folder before ``PATH``."""


@dataclass(frozen=True)
class Found:
    """What became of one notice."""

    seconds: float
    between: int
    """Steps that ended after the notice, up to the agreed step."""
    asked: int
    """Those of them that ended after the coordinator had the request."""
    after: int
    """Steps that any rank trained beyond the agreed one."""


@contextmanager
def cluster() -> Iterator[tuple[kubernetes_api.KubernetesApi, str]]:
    """An API server with the node, and the watcher's argument that leads to it."""
    with kubernetes_api.running() as api, tempfile.TemporaryDirectory() as folder:
        api.put("nodes", kubernetes_api.node(LOST))
        config = Path(folder) / "kubeconfig"
        config.write_text(yaml.safe_dump(kubernetes_api.kubeconfig(api.url)))
        yield api, f"--kubeconfig={config}"


@contextmanager
def kubernetes() -> Iterator[Bench]:
    """A taint of the cluster autoscaler."""
    with cluster() as (api, kubeconfig):

        def taint(repeat: int) -> None:
            key, value = "ToBeDeletedByClusterAutoscaler", str(repeat)
            one = {"key": key, "value": value, "effect": "NoSchedule", "timeAdded": _now()}
            api.edit("nodes", LOST, spec={"taints": [one]})

        yield Bench(
            "kubernetes",
            ("kubernetes",),
            (kubeconfig,),
            taint,
            lambda: api.edit("nodes", LOST, spec={"taints": []}),
        )


@contextmanager
def evictions() -> Iterator[Bench]:
    """An EvictionRequest for the pod with the ranks of the node."""
    with cluster() as (api, kubeconfig):

        def request(_: int) -> None:
            api.put("evictions", kubernetes_api.eviction("train", RESPONDER))

        api.put("pods", kubernetes_api.pod("train", LOST))
        yield Bench(
            "evictions",
            ("kubernetes",),
            (kubeconfig, "--namespace=team-a", "--evictions"),
            request,
            lambda: api.delete("evictions", "evict-train", "team-a"),
        )


@contextmanager
def aws() -> Iterator[Bench]:
    """The interruption of a spot instance."""
    with FakeAws() as server:
        yield Bench(
            "aws",
            ("aws",),
            (f"--metadata-url={server.base}",),
            lambda _: server.interrupt(seconds=SECONDS),
            server.documents.clear,
        )


@contextmanager
def google() -> Iterator[Bench]:
    """The preemption of a spot VM."""
    with FakeGoogle() as server:
        before = dict(server.documents)
        yield Bench(
            "google",
            ("google",),
            (f"--metadata-url={server.base}",),
            lambda _: server.preempt(),
            lambda: server.documents.update(before),
        )


@contextmanager
def azure() -> Iterator[Bench]:
    """The preemption of a VM."""
    with FakeAzure() as server:
        before = dict(server.documents)
        yield Bench(
            "azure",
            ("azure",),
            (f"--metadata-url={server.base}",),
            lambda _: server.schedule("Preempt", seconds=SECONDS),
            lambda: server.documents.update(before),
        )


@contextmanager
def slurm() -> Iterator[Bench]:
    """A node that is drained; its ``scontrol`` prints a file."""
    with tempfile.TemporaryDirectory() as folder:
        shown, command = Path(folder) / "node", Path(folder) / "scontrol"
        command.write_text(f"#!/bin/sh\ncat {shown}\n")
        command.chmod(command.stat().st_mode | stat.S_IXUSR)

        def show(state: str, reason: str = "") -> None:
            new = shown.with_suffix(".new")
            new.write_text(f"NodeName={LOST} Arch=x86_64 CoresPerSocket=1 State={state}{reason}\n")
            new.rename(shown)

        show("ALLOCATED")
        yield Bench(
            "slurm",
            ("slurm",),
            (),
            lambda _: show("ALLOCATED+DRAIN", f" Reason=disk [root@{time.strftime('%Y-%m-%dT%H:%M:%S')}]"),
            lambda: show("ALLOCATED"),
            folder,
        )


SOURCES = {
    "kubernetes": kubernetes,
    "evictions": evictions,
    "aws": aws,
    "google": google,
    "azure": azure,
    "slurm": slurm,
}


def main() -> None:
    """Measure each source, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--step", type=float, default=0.5, help="seconds of a training step")
    parser.add_argument("--source", action="append", choices=[*SOURCES, "command"], help="default: all")
    arguments = parser.parse_args()
    # The start of the ranks is not measured.
    fork_client.forks = True
    print(f"{len(NODES)} agents with {RANKS_PER_NODE} ranks each, steps of {arguments.step:g} s:")
    print(
        "| Source | Repeats | Median, s | p99, s | Steps to the agreed one | After the request | After it |"
    )
    print("|-|-|-|-|-|-|-|")
    for name in arguments.source or [*SOURCES, "command"]:
        with (
            tempfile.TemporaryDirectory() as folder,
            Coordinator(Path(folder), state="memory:") as coordinator,
        ):
            found = measured(name, coordinator, Path(folder), arguments.repeats, arguments.step)
        times = sorted(one.seconds for one in found)
        p99 = times[min(len(times) - 1, int(len(times) * 0.99))]
        between, asked = max(one.between for one in found), max(one.asked for one in found)
        after = sum(one.after for one in found)
        line = [name, str(len(found)), f"{statistics.median(times):.2f}", f"{p99:.2f}"]
        print("|", " | ".join([*line, f"≤ {between}", f"≤ {asked}", str(after)]), "|", flush=True)


def measured(name: str, coordinator: Coordinator, folder: Path, repeats: int, step: float) -> list[Found]:
    """Measure one source."""
    if name == "command":

        def drain(_: int) -> None:
            command = [str(MUSTER), "drain", LOST, f"--endpoint={coordinator.endpoint}"]
            subprocess.run(command, check=True, capture_output=True)

        return [noticed(repeat, drain, coordinator, folder, step) for repeat in range(repeats)]
    with SOURCES[name]() as bench:
        environment = {**os.environ, "PATH": f"{bench.path}:{os.environ['PATH']}"}
        found = []
        for repeat in range(repeats):
            watcher = Watcher(
                folder,
                coordinator.endpoint,
                LOST,
                *bench.sources,
                extra=bench.arguments,
                environment=environment,
            )
            with watcher:
                found.append(noticed(repeat, bench.give, coordinator, folder, step))
            bench.take_back()
        return found


def noticed(
    repeat: int, give: Callable[[int], None], coordinator: Coordinator, folder: Path, step: float
) -> Found:
    """Start a job, give the notice, and read what became of it."""
    own = folder / f"job-{repeat}"
    own.mkdir()
    with job(coordinator.endpoint, own, f"job-{repeat}", step) as agents:
        until(lambda: len(lines(own, "step")) >= 4 * RANKS, (own / "agents.log").read_text)
        # Anywhere between two looks of the watcher, and within a step.
        time.sleep(random.uniform(0.0, 5.0))
        at = time.time()
        give(repeat)
        for agent in agents:
            agent.wait(PATIENCE)
    saved = lines(own, "saved")
    assert len(saved) == RANKS, (own / "agents.log").read_text()
    (agreed,) = {number for number, _ in saved}
    steps = lines(own, "step")
    asked_at = datetime.fromisoformat(coordinator.logged("save.asked")[-1]["timestamp"]).timestamp()
    after = sum(number > agreed for number, _ in steps)
    assert after == 0, f"{after} steps were trained after step {agreed}"
    before, asked = (max(number for number, when in steps if when <= since) for since in (at, asked_at))
    return Found(
        seconds=max(when for _, when in saved) - at,
        between=agreed - before,
        asked=agreed - asked,
        after=after,
    )


def lines(folder: Path, what: str) -> list[tuple[int, float]]:
    """Return what all ranks noted: numbers of steps, and times."""
    found = []
    for rank in range(RANKS):
        path = folder / f"rank-{rank}"
        for line in path.read_text().splitlines() if path.exists() else []:
            kind, number, when = line.split()
            if kind == what:
                found.append((int(number), float(when)))
    return found


@contextmanager
def job(endpoint: str, folder: Path, run: str, step: float) -> Iterator[list[subprocess.Popen[Any]]]:
    """Start an agent on each node, and end them."""
    arguments = [
        *("--rdzv-backend=muster", f"--rdzv-id={run}", f"--rdzv-endpoint={endpoint}"),
        *(f"--nnodes={len(NODES)}", f"--nproc-per-node={RANKS_PER_NODE}", "--local-addr=127.0.0.1"),
        *(str(PROGRAM), str(folder), str(step)),
    ]
    environments = [os.environ | {"OMP_NUM_THREADS": "1", "MUSTER_NODE_NAME": node} for node in NODES]
    with agents(arguments, environments, folder / "agents.log") as started:
        yield started


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


if __name__ == "__main__":
    main()
