"""A barrier without a coordinator: the test says what is decided, and hears what was said."""

import queue
from dataclasses import replace

from lab.patience import PATIENCE
from muster.worker.decision import Decision, MissingRank, MissingState, Outcome
from muster.worker.groups.voting import VotingBarrier
from muster.worker.groups.write_report import WriteReport


class ScriptedBarrier(VotingBarrier):
    """A group of two ranks, of which the other one says what the test does."""

    prefix, world_size, run_id, generation = "checkpoint/dcp", 2, "job", 0
    participants: tuple[int, ...] = ()
    gives_timeouts = True
    """Whether its rank says at each vote how long it waits."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.sequence = 0
        self.timeouts: list[float] = []
        """The timeouts of its votes, in seconds."""
        self.reports: list[WriteReport | None] = []
        """The reports of its votes."""
        self.said: queue.SimpleQueue[bytes | str] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Decision | Exception | str] = queue.SimpleQueue()
        """A word: released, and the other rank says that."""

    def vote(
        self,
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: object = None,
        report: WriteReport | None = None,
    ) -> Decision:
        if self.gives_timeouts:
            assert timeout_secs is not None
            self.timeouts.append(timeout_secs)
        self.reports.append(report)
        self.said.put(failure if failure is not None else payload)
        answer = self.answers.get(timeout=PATIENCE)
        if isinstance(answer, Exception):
            raise answer
        self.sequence += 1
        if isinstance(answer, str):
            payloads = {self.rank: payload, 1 - self.rank: answer.encode()}
            answer = Decision(self.prefix, 0, Outcome.RELEASED, "", payloads=payloads)
        return replace(answer, sequence=self.sequence - 1)

    def heard(self) -> bytes | str:
        """What this rank said next: its payload, or why it has failed."""
        return self.said.get(timeout=PATIENCE)


def decided(outcome: Outcome = Outcome.RELEASED, *missing: int, **payloads: bytes) -> Decision:
    said = {int(rank.removeprefix("rank_")): word for rank, word in payloads.items()}
    absent = tuple(MissingRank(rank, "there", 7, MissingState.NOT_ARRIVED, 0.0) for rank in missing)
    message = "rank 1 (there, pid 7) is to blame"
    return Decision("checkpoint/dcp", 0, outcome, message, missing=absent, payloads=said)
