"""A barrier for tests of saves: the test says what it decides, and no coordinator is asked."""

import threading

from lab.patience import PATIENCE
from muster.worker.decision import Decision, Failure, Outcome
from muster.worker.errors import error_for
from muster.worker.groups.pending import EarlyWarning
from muster.worker.groups.voting import VotingBarrier
from muster.worker.groups.write_report import WriteReport


class FakeBarrier(VotingBarrier):
    """One rank's barrier. It is released if its rank has not failed, unless the test decides otherwise.

    Args:
        prefix: the group.
        world_size: the number of ranks.
        rank: this one.
    """

    def __init__(self, prefix: str = "save", world_size: int = 1, rank: int = 0) -> None:
        self.prefix = prefix
        self.world_size = world_size
        self.rank = rank
        self.run_id = "job"
        self.generation = 0
        self.participants: tuple[int, ...] = ()
        self.sequence = 0
        self.votes: list[str | None] = []
        self.early: list[EarlyWarning | None] = []
        self.reports: list[WriteReport | None] = []
        """What it told at its votes."""
        self.said: list[bytes] = []
        """The payloads of its votes."""
        self.others_say: dict[int, bytes] = {}
        """By sequence: the payload of rank 1's vote."""
        self.others_fail: dict[int, str] = {}
        """By sequence: a failure of rank 1."""
        self.raises: dict[int, list[Exception]] = {}
        self.others_payloads: list[bytes] = []
        self.gathered: list[bytes] = []
        self.open = threading.Event()
        self.open.set()
        self.siblings: dict[str, FakeBarrier] = {}

    @property
    def has_contact(self) -> bool:
        return self.open.is_set()

    def sibling(self, prefix: str) -> "FakeBarrier":
        return self.siblings.setdefault(prefix, FakeBarrier(prefix, self.world_size, self.rank))

    def vote(
        self,
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: EarlyWarning | None = None,
        report: WriteReport | None = None,
    ) -> Decision:
        self.early.append(early)
        self.reports.append(report)
        if failure is None:
            assert self.open.wait(PATIENCE)
        if self.raises.get(self.sequence):
            raise self.raises[self.sequence].pop(0)
        self.votes.append(failure)
        self.said.append(payload)
        sequence, self.sequence = self.sequence, self.sequence + 1
        failures = [Failure(self.rank, "here", 1, failure)] if failure is not None else []
        if sequence in self.others_fail:
            failures.append(Failure(1, "there", 2, self.others_fail[sequence]))
        if failures:
            message = "; ".join(f"rank {one.rank} ({one.host}) failed: {one.reason}" for one in failures)
            return Decision(self.prefix, sequence, Outcome.ABORTED, message, (), tuple(failures))
        said = {self.rank: payload, 1: self.others_say.get(sequence, b"")}
        payloads = {rank: data for rank, data in said.items() if data}
        return Decision(self.prefix, sequence, Outcome.RELEASED, "released", payloads=payloads)

    def abort(self, reason: str) -> Decision:
        return self.vote(reason)

    def execute_barrier(self) -> None:
        decision = self.vote()
        if not decision.released:
            raise error_for(decision)

    def gather(self, payload: bytes, timeout_secs: float | None = None) -> list[bytes]:
        self.gathered.append(payload)
        return [payload, *self.others_payloads]
