"""Barriers of a job with one rank, which needs no coordinator."""

import os
import socket

from muster.worker.decision import Decision, Failure, Outcome
from muster.worker.groups.pending import EarlyWarning
from muster.worker.groups.voting import VotingBarrier
from muster.worker.groups.write_report import WriteReport


class LocalBarrier(VotingBarrier):
    """Replaces a :class:`~muster.worker.GrpcBarrier` if the world has one rank.

    Args:
        prefix: the group.
        run_id: the training job.
        generation: the job's life between two restarts.
    """

    rank = 0
    world_size = 1

    participants: tuple[int, ...] = ()

    def __init__(self, prefix: str, run_id: str, generation: int) -> None:
        self.prefix = prefix
        self.run_id = run_id
        self.generation = generation
        self.sequence = 0

    def sibling(self, barrier_prefix: str) -> "LocalBarrier":
        """Return a barrier of another group."""
        return LocalBarrier(barrier_prefix, self.run_id, self.generation)

    def vote(
        self,
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: EarlyWarning | None = None,
        report: WriteReport | None = None,
    ) -> Decision:
        """Arrive with a vote, which alone makes the decision. The report is dropped."""
        sequence, self.sequence = self.sequence, self.sequence + 1
        payloads = {0: payload} if payload else {}
        if failure is None:
            return Decision(self.prefix, sequence, Outcome.RELEASED, "released", payloads=payloads)
        message = f"rank 0 failed: {failure}"
        failures = (Failure(0, socket.gethostname(), os.getpid(), failure),)
        return Decision(self.prefix, sequence, Outcome.ABORTED, message, (), failures, payloads)

    def execute_barrier(self, timeout_secs: float | None = None) -> None:
        """Arrive."""
        self.vote()

    def gather(self, payload: bytes, timeout_secs: float | None = None) -> list[bytes]:
        """Arrive with a payload, and return it."""
        self.vote(payload=payload)
        return [payload]

    def abort(self, reason: str) -> Decision:
        """Vote that this rank failed."""
        return self.vote(reason or "no reason given")
