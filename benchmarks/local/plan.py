"""Measure the core's part in a save and in a recovery of 512 nodes with 8 ranks each: time and memory.

Run it from the root of the repository: `python -m benchmarks.local.plan`. It uses no sockets and no disk.
"""

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable
from itertools import count

from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.events import Event
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.local import (
    Attachment,
    Attempt,
    CommitLocal,
    ConnectKeeper,
    Disk,
    Holding,
    KeeperInfo,
    Level,
    LocalCheckpoint,
    Orders,
    Recover,
    Recovered,
    ReportKeeper,
)
from muster.service.core.vocabulary.model import Instant
from muster.service.core.vocabulary.records import Record
from muster.service.storage.codec import decode_all, encode_all

RUN = "job"
DOMAINS = 16
CHECKPOINTS = 3
MIB = 1 << 20


class Job:
    """A core, and keepers that do what they are told.

    Args:
        nodes: the number of nodes.
        ranks: the number of ranks on each.
    """

    def __init__(self, nodes: int, ranks: int) -> None:
        self._nodes, self._ranks = nodes, ranks
        self._core = Coordinator(limits=Limits())
        self._rows: dict[bytes, bytes] = {}
        self._ids = count(1)
        self._streams: dict[int, int] = {}
        """The node of each stream."""
        self._orders: dict[int, Orders] = {}
        self._holdings: dict[int, dict[Attempt, Holding]] = {node: {} for node in range(nodes)}
        self.records: list[Record] = []
        self.answers = 0

    def step(self, event: Event) -> None:
        """Feed one event in, and take note of orders and answers."""
        effects = Effects()
        self._core.step(event, Instant(0.0, 1e9), effects)
        self.records += effects.records
        for delivery in effects.deliveries:
            message = delivery.message
            for session in delivery.audience:
                if isinstance(message, Orders):
                    self._orders[self._streams[session]] = message
                self.answers += isinstance(message, Recovered) and message.checkpoint is not None

    def restart(self) -> None:
        """The coordinator starts again from its records; all streams are over."""
        batch = encode_all(self.records)
        rows = [(key, value) for key, value in batch.writes.items() if value is not None]
        self._core, self._streams, self._orders = Coordinator(limits=Limits()), {}, {}
        self._core.restore(decode_all(rows), Instant(0.0, 1e9))
        self._core.serve(Instant(0.0, 1e9))

    def connect(self, generation: int, lost: int | None = None) -> None:
        """All keepers connect with all that they have; one of them has lost its disk."""
        if lost is not None:
            self._holdings[lost] = {}
        for node in range(self._nodes):
            session = next(self._ids)
            self._streams[session] = node
            keeper = KeeperInfo(f"k{node:04}", f"http://10.0.{node // 256}.{node % 256}:40000")
            keeper = KeeperInfo(keeper.id, keeper.url, f"rack-{node % DOMAINS}")
            own = Attachment(generation, self._nodes * self._ranks, frozenset(self._own(node)), 1)
            holdings = tuple(self._holdings[node].values())
            self.step(ConnectKeeper(session, RUN, keeper, holdings, Disk(), "secret", own))

    def save(self, attempt: Attempt) -> None:
        """Commit a checkpoint. All keepers report their own parts, and then the copies that they fetch."""
        digest = attempt.number.to_bytes(16, "big")
        checkpoint = LocalCheckpoint(
            attempt, attempt.number, self._nodes * self._ranks, 1000, digest, replicas=1
        )
        self.step(CommitLocal(next(self._ids), RUN, checkpoint, "k0000", Level.LOCAL))
        for node in range(self._nodes):
            self._report(node, Holding(attempt, digest, frozenset(self._own(node))))
        for node in range(self._nodes):
            (order,) = (one for one in self._orders[node].checkpoints if one.checkpoint.attempt == attempt)
            self._report(node, Holding(attempt, digest, frozenset(order.ranks)))

    def recover(self, generation: int) -> None:
        """All ranks ask what to resume from."""
        for _ in range(self._nodes * self._ranks):
            self.step(Recover(next(self._ids), RUN, generation, 0, self._nodes * self._ranks))

    def _report(self, node: int, holding: Holding) -> None:
        self._holdings[node][holding.attempt] = holding
        self.step(ReportKeeper(next(self._ids), RUN, f"k{node:04}", (holding,), 0))

    def _own(self, node: int) -> range:
        return range(node * self._ranks, (node + 1) * self._ranks)


def measure(nodes: int, ranks: int, show: Callable[[str], None]) -> None:
    """Save, lose a node and the coordinator, recover; say how long each takes."""
    job = Job(nodes, ranks)
    began = [time.perf_counter()]

    def done(what: str) -> None:
        seconds = time.perf_counter() - began[0]
        memory = ""
        if tracemalloc.is_tracing():
            now, peak = tracemalloc.get_traced_memory()
            memory = f"; {now / MIB:.0f} MiB of objects, at most {peak / MIB:.0f}"
        show(f"{what}: {seconds:.2f} s{memory}")
        gc.collect()
        if tracemalloc.is_tracing():
            tracemalloc.reset_peak()
        began[0] = time.perf_counter()

    job.connect(1)
    done("all keepers connect")
    for number in range(CHECKPOINTS):
        job.save(Attempt(1, number))
        done(f"save {number}: commit, and two reports of each keeper")
    job.restart()
    done("restart")
    job.connect(2, lost=nodes // 2)
    done("all keepers come back with their inventories, one of them with an empty disk")
    job.recover(2)
    assert job.answers == nodes * ranks
    done("recovery: all ranks ask; the decision and the orders of all keepers")
    job.save(Attempt(2, 0))
    done("the next save")


def main() -> None:
    """Measure once for the times, and once for the memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8, help="on each node")
    options = parser.parse_args()
    measure(options.nodes, options.ranks, print)
    print("The same with tracemalloc, which makes it slower:")
    tracemalloc.start()
    measure(options.nodes, options.ranks, print)


if __name__ == "__main__":
    main()
