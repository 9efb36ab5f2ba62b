"""Ranks that save, as real processes; and a judge of what they wrote down.

The state at a step is a function of the step alone, so that anybody can tell whether a checkpoint holds it.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import CONTEXT

ANSWER_TIMEOUT = 60.0
ROWS = 600


def weight_at(step: int) -> torch.Tensor:
    """The whole weight at a step."""
    return torch.arange(ROWS * 4, dtype=torch.float32).reshape(ROWS, 4) + 10_000 * step


@dataclass(frozen=True, slots=True)
class Event:
    """What one rank saw of one step."""

    rank: int
    what: str
    """``finalized``, ``failed`` or ``latest``."""
    step: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """An :class:`AsyncSaveError`, as the test gets it."""

    kind: str
    message: str
    call_idx: int = -1
    failures: tuple[Any, ...] = ()
    missing: tuple[Any, ...] = ()


# ---------------------------------------------------------------------- the judge


def verdict(events: list[Event], whole: Callable[[Path, int], str | None]) -> list[str]:
    """What is wrong with a history.

    Args:
        events: of all ranks; those of one rank in their order.
        whole: says what is wrong with a checkpoint that should hold the state at a step; None if nothing is.
    """
    wrong = []
    finalized = {event.step: event.rank for event in events if event.what == "finalized"}
    for event in events:
        if event.what == "failed" and event.step in finalized:
            wrong.append(
                f"step {event.step}: rank {finalized[event.step]} finalized it, rank {event.rank} saw it fail"
            )
    returned = {(event.path, event.step) for event in events if event.what == "latest"}
    for path, step in sorted(returned):
        fault = whole(Path(path), step)
        if fault is not None:
            wrong.append(f"step {step}: latest() returned {path}, but {fault}")
    for rank in {event.rank for event in events}:
        newest = -1
        for event in events:
            if event.rank != rank or event.what == "failed":
                continue
            if event.what == "latest" and event.step < newest:
                wrong.append(f"rank {rank}: latest() returned step {event.step} after step {newest}")
            newest = max(newest, event.step)
    return wrong


def whole_checkpoint(path: Path, step: int) -> str | None:
    """The judge's look at one of torch's checkpoints."""
    from torch.distributed.checkpoint.state_dict_loader import load

    into = {"weight": torch.zeros(ROWS, 4), "step": -1}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(into, checkpoint_id=path, no_dist=True)
    except Exception as error:
        return f"it does not load: {error!r}"
    same = torch.equal(into["weight"], weight_at(step)) and into["step"] == step
    return None if same else "it is not the state at that step"


def whole_files(path: Path, step: int, world_size: int) -> str | None:
    """The judge's look at a folder with one file of each rank."""
    try:
        parts = [torch.load(path / f"rank-{rank}.pt") for rank in range(world_size)]
    except Exception as error:
        return f"it does not load: {error!r}"
    return None if torch.equal(torch.cat(parts), weight_at(step)) else "it is not the state at that step"


# ---------------------------------------------------------------------- the processes


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is."""

    endpoint: str
    rank: int
    world_size: int
    folder: str
    meeting: str
    """A file at which the process group meets."""
    kind: str = "checkpointer"
    """Or ``queue``: one file of each rank, with the queue alone."""
    blind: bool = False
    """Whether its caller ignores how children end."""
    copy: bool = False
    """Whether the state is copied before the fork."""
    generation: int = 0
    timeout: float = 60.0


class Saver:
    """One rank's process.

    Args:
        identity: whom it speaks for.
    """

    def __init__(self, identity: Identity) -> None:
        self.rank = identity.rank
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_main, args=(identity, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def tell(self, operation: str, **arguments: Any) -> None:
        """Start an operation of :class:`_Worker`."""
        self._pipe.send((operation, arguments))

    def answer(self) -> Any:
        """What the last operation told has come to."""
        assert self._pipe.poll(ANSWER_TIMEOUT), f"rank {self.rank} did not answer"
        return self._pipe.recv()

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Tell, and wait for the answer."""
        self.tell(operation, **arguments)
        return self.answer()

    def end(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def savers(endpoint: str, world_size: int, folder: Path, **identity: Any) -> Iterator[list[Saver]]:
    """Processes for all ranks of a world."""
    meeting = str(
        folder.parent / f"meeting-{world_size}-{identity.get('generation', 0)}-{time.monotonic_ns()}"
    )
    processes = [
        Saver(Identity(endpoint, rank, world_size, str(folder), meeting, **identity))
        for rank in range(world_size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


def all_of(processes: list[Saver], operation: str, **arguments: Any) -> list[Any]:
    """Tell all the same, and wait for all answers."""
    for process in processes:
        process.tell(operation, **arguments)
    return [process.answer() for process in processes]


class _Files:
    """As simple a checkpointer as can be: one file of each rank, rank 0 commits."""

    def __init__(self, identity: Identity, barrier: Any, caller: Any) -> None:
        from muster.worker.saves import AsyncCallsQueue
        from muster.worker.saves.directory import CheckpointDirectory

        self._barrier = barrier
        self._queue = AsyncCallsQueue(barrier=barrier, caller=caller, timeout=identity.timeout)
        self._directory = CheckpointDirectory(Path(identity.folder))
        self._steps: dict[int, int] = {}
        self.latest = self._directory.latest

    def save(self, step: int, state: dict[str, Any], before: Callable[[], None]) -> None:
        from muster.worker.saves import AsyncRequest
        from muster.worker.saves.directory import Committed

        unfinished = self._directory.unfinished(step, "0")

        def write() -> None:
            before()
            unfinished.mkdir(exist_ok=True)
            torch.save(state["weight"].to_local().clone(), unfinished / f"rank-{self._barrier.rank}.pt")

        def commit(decision: Any) -> None:
            if self._barrier.rank == 0:
                unfinished.mkdir(exist_ok=True)
                made = Committed(
                    step,
                    self._barrier.world_size,
                    "job",
                    "save",
                    decision.sequence,
                    self._directory.path(step),
                )
                self._directory.commit(unfinished, made)

        idx = self._queue.schedule_async_request(AsyncRequest(write, (), []), commit=commit)
        self._steps[idx] = step

    def finalize(self, blocking: bool) -> list[int]:
        done = self._queue.maybe_finalize_async_calls(blocking, no_dist=True)
        return [self._steps[idx] for idx in done]

    def close(self) -> None:
        self._queue.close()


@dataclass
class _Worker:
    identity: Identity
    saver: Any = None
    barrier: Any = None
    by_call: list[int] = field(default_factory=list)
    """The steps, in the order of the calls."""
    events: list[Event] = field(default_factory=list)

    def begin(self) -> None:
        """Meet the others, and make the checkpointer."""
        import torch.distributed as dist

        from muster.worker import Checkpointer, GrpcBarrier
        from muster.worker.saves.callers import ForkCaller

        who = self.identity
        dist.init_process_group(
            "gloo", init_method=f"file://{who.meeting}", rank=who.rank, world_size=who.world_size
        )
        self.barrier = GrpcBarrier(
            who.rank,
            who.world_size,
            "save",
            who.endpoint,
            20,
            60,
            "saves",
            who.generation,
            host=f"node-{who.rank}",
        )
        if who.kind == "queue":
            self.saver = _Files(who, self.barrier, _blind_caller() if who.blind else ForkCaller())
        else:
            self.saver = Checkpointer(who.folder, copy=who.copy, barrier=self.barrier, timeout=who.timeout)

    def _state(self, step: int) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (self.identity.world_size,))
        return {"weight": distribute_tensor(weight_at(step), mesh, [Shard(0)]), "step": step}

    def save(self, step: int, doom: str = "", gate: str = "", kill_after: float | None = None) -> int:
        """Begin to save a step, then overwrite the state; the child's process id.

        Args:
            step: the step.
            doom: ``kill``: the child kills itself before its end; ``exit``: it exits with status 9.
            gate: the child goes on when this file is there.
            kill_after: seconds after which the child is killed, if it is still there.
        """
        from muster.worker.saves import checkpointer

        state = self._state(step)

        def before() -> None:
            if doom == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if doom == "exit":
                os._exit(9)
            while gate and not Path(gate).exists():
                time.sleep(0.005)

        keep = checkpointer._keep_results

        def keep_results(*arguments: Any) -> None:
            before()
            keep(*arguments)

        self.by_call.append(step)
        if self.identity.kind == "queue":
            self.saver.save(step, state, before)
        else:
            checkpointer._keep_results = keep_results
            self.saver.save(step, state)
            checkpointer._keep_results = keep
        write = self.saver._queue._state.calls[-1].write
        if kill_after is not None:
            _kill_later(write.pid, kill_after)
        state["weight"].to_local().fill_(-1)
        return int(write.pid)

    def finalize(self, blocking: bool = True) -> list[Any]:
        """Learn of all saves there is news of: steps that were finalized, and failures."""
        from muster.worker import AsyncSaveError, MusterError

        heard: list[Any] = []
        while True:
            before = self.saver._queue.get_num_unfinalized_calls()
            try:
                done = self.saver.finalize(blocking)
            except AsyncSaveError as error:
                first = len(self.by_call) - before
                done = self.by_call[first : error.call_idx]
                self._remember(done, self.by_call[error.call_idx])
                heard += [*done, _failed(error)]
                continue
            except MusterError as error:
                return [*heard, _failed(error)]
            self._remember(done, None)
            latest = self.saver.latest()
            if latest is not None:
                self.events.append(Event(self.identity.rank, "latest", latest.step, str(latest.path)))
            return heard + done

    def _remember(self, done: list[int], failed: int | None) -> None:
        rank = self.identity.rank
        self.events += [Event(rank, "finalized", step) for step in done]
        if failed is not None:
            self.events.append(Event(rank, "failed", failed))

    def finalize_together(self, times: int) -> list[list[int]]:
        """Ask so many times, at the same points as the other ranks, and do not wait; what each call gave."""
        return [self.saver._queue.maybe_finalize_async_calls() for _ in range(times)]

    def history(self) -> list[Event]:
        """What this rank saw."""
        return self.events

    def waits(self) -> bool:
        """Whether it has arrived at the barrier of a save, and has no decision."""
        return self.barrier._session._groups["save"].pending is not None

    def latest(self) -> Any:
        """The last committed checkpoint."""
        return self.saver.latest()

    def load(self) -> tuple[int, bool]:
        """Load the last committed one, into this world's shards: its step, and whether it is right."""
        state = self._state(0)
        state["weight"].to_local().zero_()
        found = self.saver.load(state)
        right = (
            torch.equal(state["weight"].full_tensor(), weight_at(found.step)) and state["step"] == found.step
        )
        return found.step, right

    def close(self) -> list[int]:
        """Close; the children that are left."""
        from tests.support.judge import children

        self.saver.close()
        return sorted(children())


def _failed(error: Exception) -> Failed:
    return Failed(
        type(error).__name__,
        str(error),
        getattr(error, "call_idx", -1),
        tuple(getattr(error, "failures", ())),
        tuple(getattr(error, "missing", ())),
    )


def _kill_later(pid: int, seconds: float) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return

    def kill() -> None:
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)

    threading.Timer(seconds, kill).start()


def _blind_caller() -> Any:
    from muster.worker.saves.callers import Ending, ForkCaller

    class Blind(ForkCaller):
        """Ignores how children end."""

        def start(self, request: Any) -> Any:
            write = super().start(request)
            wait = write.wait
            write.wait = lambda timeout: Ending(None, wait(timeout).seconds)  # type: ignore[method-assign]
            return write

    return Blind()


def _main(identity: Identity, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    worker = _Worker(identity)
    while True:
        try:
            operation, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(getattr(worker, operation)(**arguments))
