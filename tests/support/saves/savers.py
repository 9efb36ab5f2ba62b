"""Ranks that save, as real processes that a test tells what to do."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from muster.checkpoint.committed import SaveAttempt
from tests.support.ranks import RankProcess, obey
from tests.support.saves.save_history import Event, weight_at


@dataclass(frozen=True, slots=True)
class Failed:
    """An :class:`AsyncSaveError`, as the test gets it."""

    kind: str
    message: str
    call_idx: int = -1
    failures: tuple[Any, ...] = ()
    missing: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a process."""

    endpoint: str
    rank: int
    world_size: int
    folder: str
    meeting: str
    """A file at which the process group meets."""
    place: str = ""
    """Where its checkpoints go; default: the folder."""
    options: dict[str, Any] | None = None
    """Storage options of a bucket."""
    kind: str = "checkpointer"
    """Or ``queue``: one file of each rank, with the queue alone."""
    blind: bool = False
    """Whether its caller ignores how children end."""
    copy: bool = False
    """Whether the state is copied before the fork."""
    stateful: bool = False
    """Whether a ``Stateful`` object has the state, as in torch's tutorial."""
    generation: int = 0
    timeout: float = 60.0


class Saver(RankProcess):
    """One rank's process.

    Args:
        identity: of the rank.
    """

    def __init__(self, identity: Identity) -> None:
        super().__init__(_main, identity)


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


class _App:
    """A ``Stateful`` object: what is loaded counts only when it was handed back.

    Args:
        state: its state, which it fills.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Return a new dictionary with the object's own tensors."""
        return {"model": {"weight": self._state["weight"]}, "step": self._state["step"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state over."""
        self._state |= {"weight": state["model"]["weight"], "step": state["step"]}


@dataclass
class _Worker:
    identity: Identity
    saver: Any = None
    barrier: Any = None
    by_call: list[int] = field(default_factory=list)
    """The steps, in the order of the calls."""
    events: list[Event] = field(default_factory=list)
    weight: Any = None

    def begin(self) -> None:
        """Meet the others, and make the checkpointer."""
        import torch.distributed as dist

        from muster.worker import Checkpointer, GrpcBarrier
        from muster.worker.saves.writers.callers import ForkCaller
        from tests.support.saves.file_saver import BlindCaller, FileSaver

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
            caller = BlindCaller() if who.blind else ForkCaller()
            self.saver = FileSaver(Path(who.folder), self.barrier, caller, who.timeout)
        else:
            self.saver = Checkpointer(
                who.place or who.folder,
                copy=who.copy,
                barrier=self.barrier,
                timeout=who.timeout,
                storage_options=who.options,
            )

    def _state(self, step: int) -> dict[str, Any]:
        """After the first one, made without a word to the other ranks."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        world_size = self.identity.world_size
        if self.weight is None:
            mesh = init_device_mesh("cpu", (world_size,))
            self.weight = distribute_tensor(weight_at(step), mesh, [Shard(0)])
        part = torch.tensor_split(weight_at(step), world_size)[self.identity.rank]
        self.weight.to_local().copy_(part)
        return {"weight": self.weight, "step": step}

    def _given(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what is handed to the checkpointer for a state."""
        return {"app": _App(state)} if self.identity.stateful else state

    def save(
        self, step: int, doom: str = "", gate: str = "", kill_after: float | None = None, more: str = ""
    ) -> int:
        """Begin to save a step, then overwrite the state; the child's process id, or -1.

        Args:
            step: the step.
            more: the name of something else in the state.
            doom: ``kill``: the child kills itself before its end; ``exit``: it exits with status 9.
            gate: the child goes on when this file is there.
            kill_after: seconds after which the child is killed, if it is still there.
        """
        state = self._state(step)
        if more:
            state[more] = torch.full((100,), float(step))

        def before() -> None:
            if doom == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if doom == "exit":
                os._exit(9)
            while gate and not Path(gate).exists():
                time.sleep(0.005)

        self.by_call.append(step)
        if self.identity.kind == "queue":
            self.saver.save(step, state, before)
        else:
            with _when_written(self.saver, before):
                self.saver.save(step, self._given(state))
        write = self.saver._queue._loop.ledger.saves()[-1][0].write
        # None where the save had failed on another rank before this one had its plan.
        if kill_after is not None and write is not None:
            _kill_later(write.pid, kill_after)
        state["weight"].to_local().fill_(-1)
        return int(write.pid) if write is not None else -1

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
            return [*heard, *done]

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
        return self.barrier._session._dialogue.groups["save"].pending is not None

    def has_contact(self) -> bool:
        """Whether it is connected with the coordinator, or with its relay."""
        return bool(self.barrier.has_contact)

    def latest(self) -> Any:
        """The last committed checkpoint."""
        return self.saver.latest()

    def load(self) -> tuple[int, bool]:
        """Load the last committed one, into this world's shards: its step, and whether it is right."""
        state = self._state(0)
        state["weight"].to_local().zero_()
        found = self.saver.load(self._given(state))
        # Each rank judges its own shard: a collective would fail for a rank that has died since.
        mine = torch.tensor_split(weight_at(found.step), self.identity.world_size)[self.identity.rank]
        return found.step, torch.equal(state["weight"].to_local(), mine) and state["step"] == found.step

    def resume(self, doom: str = "", vote: int = 0, gate: str = "") -> Any:
        """Resume: the step, and whether the state is right; or why not.

        Args:
            doom: ``opening``, ``reading`` or ``voted``: this process kills itself there. At the last one it
                has arrived at a barrier of the load, and never acts on the decision.
            vote: the number of that barrier in this load, from 1. Each checkpoint that is tried has three:
                what to load, whether its metadata is whole, and whether all that was read is.
            gate: this rank arrives there when this file is there.
        """
        from muster.worker import MusterError
        from muster.worker.saves import loading
        from muster.worker.saves.storage.reading import VerifyingReader

        def die(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if doom == "opening":
            loading.open_checkpoint = die  # type: ignore[attr-defined,assignment]
        if doom == "reading":
            VerifyingReader.read_data = die  # type: ignore[assignment,method-assign]
        if vote:
            self._at_vote(vote, Path(gate) if gate else None, die if doom == "voted" else lambda: None)
        try:
            return self.load()
        except (MusterError, RuntimeError) as error:
            return _failed(error)

    def _at_vote(self, number: int, gate: Path | None, then: Callable[[], None]) -> None:
        """Let a vote of the next load wait for a file, and do something before it returns."""
        barrier, votes = self.saver._load._barrier, itertools.count(1)
        arrive = barrier.vote

        def vote(*given: Any) -> Any:
            here = next(votes) == number
            while here and gate is not None and not gate.exists():
                time.sleep(0.005)
            decision = arrive(*given)
            if here:
                then()
            return decision

        barrier.vote = vote

    def close(self) -> list[int]:
        """Close; the children that are left."""
        from tests.support.saves.child_processes import children

        self.saver.close()
        return sorted(children())


@contextmanager
def _when_written(saver: Any, before: Callable[[], None]) -> Iterator[None]:
    """What a child that is forked meanwhile does when it has written, and has not said so."""
    kind = type(saver._storage.pending(0, SaveAttempt(0, 0)))
    leave = kind.leave

    def leave_after(pending: Any, note: str, data: bytes) -> None:
        if note.startswith("written"):
            before()
        leave(pending, note, data)

    kind.leave = leave_after
    try:
        yield
    finally:
        kind.leave = leave


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


def _main(identity: Identity, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    worker = _Worker(identity)
    obey(worker, pipe)
