"""``make demo``: the main job of Muster, shown with real processes in about a minute.

1. A coordinator keeps its state in SQLite, and four ranks train and checkpoint through it.
2. One rank is killed (SIGKILL) before a barrier: all others learn which, where, and stop.
3. The job starts again as a new generation, from the last checkpoint that was committed.
4. The coordinator is killed (SIGKILL) while ranks wait, and started again: the barrier completes.
5. Training goes on to the end.
"""

import multiprocessing as mp
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from training_job import UNCOMMITTED, Job, latest, train

WORLD_SIZE = 4
STEPS = 100
SESSION_TTL = 5
MUSTER = Path(sys.executable).with_name("muster")
PROCESSES = mp.get_context("forkserver")


class Coordinator:
    """``muster serve`` on a SQLite file."""

    def __init__(self, folder: Path) -> None:
        self.endpoint, self._http = (f"127.0.0.1:{_free_port()}" for _ in range(2))
        self._state = f"sqlite:///{folder}/muster.db"
        self._log = (folder / "coordinator.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is ready."""
        flags = [f"--listen={self.endpoint}", f"--http={self._http}", f"--state={self._state}"]
        ttl = f"--session-ttl={SESSION_TTL}"
        self._process = subprocess.Popen([MUSTER, "serve", *flags, ttl], stderr=self._log)
        while True:
            with suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://{self._http}/readyz").close()
                return
            if self._process.poll() is not None:
                sys.exit(f"the coordinator did not start; its log is {self._log.name}")
            time.sleep(0.05)

    def kill(self) -> int:
        """SIGKILL it, without any warning."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        return self._process.pid

    def stop(self) -> None:
        """SIGTERM it."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait()
        self._log.close()


@dataclass
class Rank:
    """One training process, and the pipe on which it reports."""

    rank: int
    process: mp.process.BaseProcess
    pipe: Connection
    heard: list[tuple[str, str]] = field(default_factory=list)
    """What it has reported and nobody has asked for yet: kinds and texts."""

    def listen(self) -> None:
        """Take its next report; what it merely says is printed at once."""
        try:
            kind, text = self.pipe.recv()
        except EOFError:
            kind, text = "died", ""
        if kind == "says":
            say(f"   {text}")
        else:
            self.heard.append((kind, text))


def run_rank(job: Job, rank: int, hold_at: int, pipe: Connection) -> None:
    """A training process. At step ``hold_at`` it waits for a word before it goes to the barrier."""

    def before_barrier(step: int) -> None:
        if step == hold_at:
            pipe.send(("holds", str(step)))
            pipe.recv()

    try:
        loss = train(job, rank, before_barrier, lambda text: pipe.send(("says", text)))
        pipe.send(("done", f"{loss:.2f}"))
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        pipe.close()
        # The other ranks of the process group are gone; there is nobody to say goodbye to.
        os._exit(1)


def start_ranks(job: Job, held: int, hold_at: int) -> list[Rank]:
    """Start all ranks; the one that is ``held`` stops before the barrier of step ``hold_at``."""
    ranks = []
    for rank in range(job.world_size):
        ours, theirs = PROCESSES.Pipe()
        arguments = (job, rank, hold_at if rank == held else -1, theirs)
        process = PROCESSES.Process(target=run_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        ranks.append(Rank(rank, process, ours))
    return ranks


def follow(ranks: list[Rank], rank: Rank, until: str) -> str:
    """Print what all ranks say until one of them reports a certain kind of thing."""
    while not rank.heard:
        open_pipes = {r.pipe: r for r in ranks if ("died", "") not in r.heard}
        for pipe in wait(list(open_pipes)):
            open_pipes[pipe].listen()  # type: ignore[index]
    kind, text = rank.heard.pop(0)
    if kind != until:
        sys.exit(f"rank {rank.rank} {kind}: {text}")
    return text


def say(text: str = "") -> None:
    """Tell the audience."""
    print(text, flush=True)


def headline(text: str) -> None:
    """Begin a chapter."""
    say(f"\n── {text}")


def show(*arguments: str) -> None:
    """Run a ``muster`` command as the audience would."""
    say(f"   $ muster {' '.join(arguments)}")
    result = subprocess.run([MUSTER, *arguments], capture_output=True, text=True, check=True)
    for line in result.stdout.splitlines():
        say(f"   {line.rstrip()}")


def wait_for_arrivals(endpoint: str, arrived: int, run_id: str) -> None:
    """Wait until so many ranks are at the open barrier."""
    # Imported here, so that muster.worker comes first: it turns gRPC's fork handlers off.
    import grpc

    from muster.v1 import barrier_pb2, barrier_pb2_grpc

    with grpc.insecure_channel(endpoint) as channel:
        barriers = barrier_pb2_grpc.BarrierServiceStub(channel)
        request = barrier_pb2.BarrierServiceGetRequest(run_id=run_id, prefix="checkpoint")
        while True:
            with suppress(grpc.RpcError):
                barrier = barriers.Get(request).barrier
                if not barrier.HasField("decision") and barrier.arrived == arrived:
                    return
            time.sleep(0.05)


def kill_a_rank(job: Job) -> None:
    """Chapters 1 and 2."""
    headline(f"{WORLD_SIZE} ranks train on the text of LICENSE and checkpoint through Muster")
    victim = 2
    ranks = start_ranks(job, held=victim, hold_at=60)
    follow(ranks, ranks[victim], until="holds")
    headline(f"rank {victim} (pid {ranks[victim].process.pid}) is killed before the barrier of step 60")
    killed = time.monotonic()
    ranks[victim].process.kill()
    others = [rank for rank in ranks if rank.rank != victim]
    told = [follow(ranks, rank, until="failed") for rank in others]
    say(f"   rank 0 was told: {_indent(told[0])}")
    for rank, text in zip(others, told, strict=True):
        if f"rank {victim} ({socket.gethostname()}, pid {ranks[victim].process.pid}" not in text:
            sys.exit(f"rank {rank.rank} was not told who is missing: {text}")
    say("   and the other ranks the same: each names the rank, its host and its pid")
    say(f"   all were told within {time.monotonic() - killed:.1f} s; the session TTL is {SESSION_TTL} s")
    say(f"   step-60 was not committed, for anyone: the last one is {_name(latest(job.folder))}")
    show("get", "barriers", job.run_id, "--history=3", f"--endpoint={job.endpoint}")


def kill_the_coordinator(job: Job, coordinator: Coordinator) -> None:
    """Chapters 3 to 5."""
    headline("the job starts again, as generation 1")
    late = 3
    ranks = start_ranks(job, held=late, hold_at=60)
    follow(ranks, ranks[late], until="holds")
    wait_for_arrivals(job.endpoint, WORLD_SIZE - 1, job.run_id)
    headline(f"{WORLD_SIZE - 1} ranks wait at the barrier of step 60; the coordinator is killed")
    say(f"   SIGKILL to pid {coordinator.kill()}; it is started again on the same SQLite file")
    coordinator.start()
    say(f"   rank {late} goes to the barrier now")
    ranks[late].pipe.send("go")
    losses = [follow(ranks, rank, until="done") for rank in ranks]
    headline("done")
    say(f"   training finished at step {job.steps}; the losses of the ranks: {', '.join(losses)}")
    show("get", "barriers", job.run_id, "--history=3", f"--endpoint={job.endpoint}")


def main() -> None:
    """Show everything, in a folder that is removed at the end."""
    started = time.monotonic()
    PROCESSES.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory(prefix="muster-demo-") as name:
        folder = Path(name)
        coordinator = Coordinator(folder)
        headline("a coordinator starts, with its state in SQLite")
        coordinator.start()
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir()
        job = Job(coordinator.endpoint, "demo", 0, WORLD_SIZE, STEPS, checkpoints)
        try:
            kill_a_rank(job)
            kill_the_coordinator(replace(job, generation=1), coordinator)
        finally:
            coordinator.stop()
        committed = latest(checkpoints)
        if committed is None or committed[0] != STEPS or list(checkpoints.glob(f"*{UNCOMMITTED}")):
            sys.exit(f"the last checkpoint should be step-{STEPS}, and is {_name(committed)}")
    say(
        f"""
What you saw, in {time.monotonic() - started:.0f} s:
 - A checkpoint became one only when every rank had arrived: one decision, the same for all.
 - A killed rank was named to every other rank, with host and pid, without waiting for a timeout.
 - No rank believed in the checkpoint that the others knew had failed; training resumed from the last
   one that was committed.
 - A coordinator killed while ranks waited lost nothing: it came back, and the barrier completed."""
    )


def _indent(text: str) -> str:
    return text.replace("\n", "\n     ")


def _name(committed: tuple[int, Path] | None) -> str:
    return committed[1].name if committed else "none"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
