"""Real worker processes for tests, told over a pipe what to do.

They are forked from a process that has imported torch and has nothing of gRPC's but its code, so that each
starts in milliseconds and none inherits a gRPC state.
"""

import logging
import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Self

from lab.patience import PATIENCE
from tests.support.world import history

CONTEXT = mp.get_context("spawn")
"""Within :func:`lab.processes.fork_client.spawning`, or each takes seconds to begin."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a rank heard of one barrier."""

    outcome: str
    """RELEASED, TIMED_OUT, …, UNKNOWN, or the name of another exception."""
    sequence: int = -1
    message: str = ""
    missing: tuple[Any, ...] = ()
    payloads: tuple[bytes, ...] = ()
    reason: str = ""

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks that were missing."""
        return [one.rank for one in self.missing]


class RankFailed(Exception):
    """An operation of a rank raised what it should not; the rank can still be asked what it saw."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a rank process."""

    endpoint: str
    rank: int
    world_size: int
    run_id: str = "job"
    generation: int = 0


class RankProcess:
    """The process of a rank, which is told over a pipe what to do.

    Args:
        main: what it runs, which is given the identity and a pipe, and calls :func:`obey`.
        identity: of the rank.
    """

    def __init__(self, main: Callable[[Any, Connection], None], identity: Any) -> None:
        self.rank: int = identity.rank
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=main, args=(identity, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def tell(self, operation: str, **arguments: Any) -> Self:
        """Start an operation; its answer is fetched by :meth:`answer`."""
        self._pipe.send((operation, arguments))
        return self

    def answer(self, timeout: float = PATIENCE) -> Any:
        """What the last operation told has come to."""
        assert self._pipe.poll(timeout), f"rank {self.rank} did not answer within {timeout} s"
        return self._pipe.recv()

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Tell, and wait for the answer."""
        return self.tell(operation, **arguments).answer()

    def end(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def obey(worker: object, pipe: Connection, failed: Callable[[Exception], object] | None = None) -> NoReturn:
    """Call the methods that a pipe names, until its other end is closed.

    Args:
        worker: has the methods.
        pipe: takes each method's result.
        failed: makes the answer to an exception; default: it ends the process.
    """
    while True:
        try:
            operation, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = getattr(worker, operation)(**arguments)
        except Exception as error:
            if failed is None:
                raise
            answer = failed(error)
        pipe.send(answer)


class Rank(RankProcess):
    """One worker process.

    Args:
        identity: of the rank.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        super().__init__(_main, identity)

    def answer(self, timeout: float = PATIENCE) -> Any:
        """What the last operation told has come to.

        Raises:
            RankFailed: it raised an exception.
        """
        answer = super().answer(timeout)
        if isinstance(answer, RankFailed):
            raise answer
        return answer

    def has_answered(self) -> bool:
        """Whether an answer waits."""
        return self._pipe.poll()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal."""
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._process.join()


@contextmanager
def ranks(endpoint: str, world_size: int, *only: int, **identity: Any) -> Iterator[list[Rank]]:
    """Worker processes for all ranks of a world, or for those named."""
    processes = [Rank(Identity(endpoint, rank, world_size, **identity)) for rank in only or range(world_size)]
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


def assert_good_history(processes: list[Rank]) -> None:
    """Let the judge read what these processes wrote down."""
    events = [event for process in processes for event in process.ask("history")]
    history.assert_good([event for _, event in sorted(events, key=lambda pair: pair[0])])


def everyone(processes: list[Rank], operation: str = "barrier", **arguments: Any) -> list[Any]:
    """Tell all the same, and wait for all answers."""
    for process in processes:
        process.tell(operation, **arguments)
    return [process.answer() for process in processes]


@dataclass
class _Worker:
    identity: Identity
    warnings: list[str] = field(default_factory=list)
    events: list[tuple[float, history.Event]] = field(default_factory=list)
    joined: set[str] = field(default_factory=set)

    def _barrier(self, prefix: str, timeout: float, init_timeout: float = PATIENCE, **more: Any) -> Any:
        from muster.worker import GrpcBarrier

        who = self.identity
        return GrpcBarrier(
            who.rank,
            who.world_size,
            prefix,
            who.endpoint,
            init_timeout,
            timeout,
            run_id=who.run_id,
            generation=who.generation,
            **more,
        )

    def join(self, prefix: str = "checkpoint", **more: Any) -> Heard:
        """Make the barrier object."""
        try:
            self._barrier(prefix, 60.0, **more)
        except Exception as error:
            return _heard(error)
        return Heard("JOINED")

    def barrier(
        self,
        prefix: str = "checkpoint",
        timeout: float = 60.0,
        payload: bytes = b"",
        failure: str | None = None,
        **more: Any,
    ) -> Heard:
        """Execute one barrier."""
        try:
            barrier = self._barrier(prefix, timeout, **more)
            process, sequence = self._remember_arrival(barrier, payload)
            decision = barrier.vote(failure, timeout, payload)
        except Exception as error:
            return _heard(error)
        self._remember(
            history.Heard(
                process,
                prefix,
                sequence,
                decision.outcome.name,
                decision.message,
                tuple(one.rank for one in decision.missing),
                {rank: said.decode() for rank, said in decision.payloads.items()} if payload else None,
            )
        )
        return Heard(
            decision.outcome.name,
            decision.sequence,
            decision.message,
            decision.missing,
            tuple(payload for _, payload in sorted(decision.payloads.items())),
        )

    def _remember_arrival(self, barrier: Any, payload: bytes) -> tuple[history.RankProcess, int]:
        session, prefix = barrier._session, barrier.prefix
        who = self.identity
        process = history.RankProcess(
            who.run_id,
            who.rank,
            session._dialogue.process.incarnation,
            who.generation,
            float(session._dialogue.process.ordinal),
        )
        sequence = barrier.sequence
        if prefix not in self.joined:
            self.joined.add(prefix)
            self._remember(history.Joined(process, prefix, sequence, tuple(barrier._ranks)))
        self._remember(history.Arrived(process, prefix, sequence, payload.decode()))
        return process, sequence

    def _remember(self, event: history.Event) -> None:
        self.events.append((time.monotonic(), event))

    def history(self) -> list[tuple[float, history.Event]]:
        """What this process did and heard, with the machine's monotonic time."""
        return self.events

    def mixed(self, until: str, pause: float, timeout: float = 60.0) -> list[tuple[float, float]]:
        """Execute barriers until a file is there: plain ones, votes to fail, and gathers.

        Args:
            until: the file.
            pause: seconds between two.
            timeout: seconds of each.

        Returns:
            When each began, on the machine's monotonic clock, and the seconds that it took.
        """
        who = self.identity
        took: list[tuple[float, float]] = []
        while True:
            number = len(took)
            fails = number % 10 == 3 and who.rank == number % who.world_size
            # Everyone stops at the same barrier: the one in which rank 0 says so.
            last = who.rank == 0 and os.path.exists(until)  # noqa: PTH110  # a file, looked at often
            payload = f"{'last' if last else who.rank} {number}".encode()
            began = time.monotonic()
            failure = "as drawn" if fails and not last else None
            while (heard := self.barrier("mixed", timeout, payload, failure)).outcome == "UNKNOWN":
                pass
            took.append((began, time.monotonic() - began))
            time.sleep(pause)
            voted = heard.outcome == "ABORTED" and "as drawn" in heard.message
            if not (voted or heard.outcome == "RELEASED"):
                raise AssertionError(f"rank {who.rank} of {who.run_id}, barrier {number}: {heard}")
            if any(said.startswith(b"last") for said in heard.payloads):
                return took

    def change_store(self, until: str, pause: float) -> tuple[list[int], int]:
        """Add and append until a file is there, with a pause of so many seconds after both.

        Returns:
            What each addition came to, and how many appends were acknowledged.
        """
        from datetime import timedelta

        from muster.worker import CoordinatorStore

        who = self.identity
        store = CoordinatorStore(who.endpoint, who.run_id, timedelta(seconds=PATIENCE))
        sums: list[int] = []
        while not os.path.exists(until):  # noqa: PTH110
            sums.append(store.add("sum", 1))
            store.append(f"log {who.rank}", f"{len(sums)};")
            time.sleep(pause)
        return sums, len(sums)

    def meet(self, until: str, pause: float) -> list[tuple[int, int, int]]:
        """Join round after round until a file is there: the first process that sees it closes the run.

        Args:
            until: the file.
            pause: seconds between two rounds.

        Returns:
            Round, rank and world size of each.
        """
        from muster.worker import RefusedError
        from muster.worker.node.membership import NodeConfig, NodeMembership

        who = self.identity
        node = NodeMembership(
            NodeConfig(
                endpoint=who.endpoint,
                run_id=who.run_id,
                address=f"node-{who.rank}",
                min_nodes=who.world_size,
                max_nodes=who.world_size,
                join_timeout=PATIENCE,
                last_call_timeout=0.1,
                keep_alive_timeout=PATIENCE,
                connect_timeout=PATIENCE,
                call_timeout=1.0,
            )
        )
        places: list[tuple[int, int, int]] = []
        while not os.path.exists(until):  # noqa: PTH110
            try:
                place = node.join()
            except RefusedError as error:
                if error.reason != "RUN_CLOSED":
                    raise
                return places
            places.append((place.round, place.rank, place.world_size))
            time.sleep(pause)
        node.close("the end", PATIENCE)
        node.leave("the end")
        return places

    def fork_and_save(self, folder: str, count: int) -> list[int]:
        """Fork children that write a tensor to a file; their exit statuses."""
        import torch

        statuses = []
        for number in range(count):
            child = os.fork()
            if child == 0:
                torch.save(torch.full((1000,), number), f"{folder}/child-{number}.pt")
                os._exit(0)
            statuses.append(os.waitpid(child, 0)[1])
        return statuses

    def barrier_in_forked_child(self, prefix: str) -> str:
        """What a forked child is told that uses its parent's barrier."""
        barrier = self._barrier(prefix, 5.0)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                barrier.execute_barrier()
            except Exception as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        with os.fdopen(read) as report:
            return report.read()

    def logged(self) -> list[str]:
        """The warnings logged so far."""
        return list(self.warnings)

    def goodbye(self) -> None:
        """End the sessions as a process does that ends normally."""
        import muster.worker

        muster.worker.close("test")


def _heard(error: Exception) -> Heard:
    outcome = getattr(error, "outcome", None)
    return Heard(
        outcome.name if outcome else type(error).__name__,
        getattr(error, "sequence", -1),
        str(error),
        tuple(getattr(error, "missing", ())),
        (),
        getattr(error, "reason", ""),
    )


class _Warnings(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())


def _main(identity: Identity, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = _Worker(identity)
    logging.getLogger("muster").addHandler(_Warnings(worker.warnings))

    def failed(error: Exception) -> RankFailed:
        traceback.print_exc()
        return RankFailed(f"rank {identity.rank} of {identity.run_id}: {type(error).__name__}: {error}")

    obey(worker, pipe, failed)
