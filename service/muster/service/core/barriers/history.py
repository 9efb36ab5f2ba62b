"""The decisions that a group keeps, and the payload bytes that it holds."""

from dataclasses import replace

from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.limits import ByteTotal, Limits
from muster.service.core.vocabulary.model import Decision
from muster.service.core.vocabulary.records import ForgetDecision


class DecisionHistory:
    """Keeps every decision that a rank may still ask for, and a few more for people.

    Args:
        run_id: the run.
        prefix: the group's name within it.
        limits: the coordinator's bounds.
        gathered: payload bytes of all groups of all runs.
    """

    def __init__(self, run_id: str, prefix: str, limits: Limits, gathered: ByteTotal) -> None:
        self.decisions: dict[int, Decision] = {}
        """By sequence, ascending."""
        self._run_id = run_id
        self._prefix = prefix
        self._limits = limits
        self._gathered = gathered
        self.bytes = 0
        """Payload bytes of the group: of the open barrier and of the kept decisions."""

    def oldest(self, next_sequence: int) -> int:
        """Return the sequence of the oldest kept decision, or ``next_sequence`` if none is kept."""
        return next(iter(self.decisions), next_sequence)

    def add(self, decision: Decision) -> None:
        """Keep a decision; its sequence is higher than all before."""
        self.decisions[decision.sequence] = decision
        self.count_bytes(decision.payload_bytes)

    def count_bytes(self, more: int) -> None:
        """Add to the payload bytes that the group holds, or subtract if ``more`` is negative."""
        self.bytes += more
        self._gathered.bytes += more

    def release_bytes(self) -> None:
        """Subtract all bytes of this group from the total, because the run was removed."""
        self.count_bytes(-self.bytes)

    def trim_heard(self, start: int, sequence: int, next_sequence: int, effects: Effects) -> None:
        """Trim the decisions from ``start`` to before ``sequence``, which every rank has heard.

        A decision with payloads may be large, so it is dropped immediately. The newest decision stays in
        any case, because it tells a restarted coordinator which sequence comes next.
        """
        for heard in range(start, sequence):
            decision = self.decisions.get(heard)
            if decision is not None and decision.payloads and heard != next_sequence - 1:
                self._drop(heard, effects)
        largest = max((one.required for one in self.decisions.values()), default=1)
        self.trim(self._limits.history(largest), sequence - 1, effects)

    def trim_before(self, sequence: int, effects: Effects) -> None:
        """Trim the decisions before ``sequence``, which every rank has heard, before the bound is reached."""
        largest = max(one.required for one in self.decisions.values())
        self.trim(max(1, self._limits.unheard_decisions(largest) // 2), sequence, effects)

    def trim(self, count: int, before: int, effects: Effects) -> None:
        """Drop the oldest decisions before sequence ``before`` while more than ``count`` are kept."""
        while len(self.decisions) > count and (oldest := next(iter(self.decisions))) < before:
            self._drop(oldest, effects)

    def drop_payloads(self, effects: Effects) -> int:
        """Drop the payloads of all kept decisions. Returns how many bytes that frees."""
        freed = 0
        if not self.bytes:
            return freed
        for sequence, decision in self.decisions.items():
            if decision.payloads:
                freed += decision.payload_bytes
                self.decisions[sequence] = replace(decision, payloads=(), payloads_dropped=True)
                effects.records.append(self.decisions[sequence])
        self.count_bytes(-freed)
        return freed

    def _drop(self, sequence: int, effects: Effects) -> None:
        self.count_bytes(-self.decisions.pop(sequence).payload_bytes)
        effects.records.append(ForgetDecision(self._run_id, self._prefix, sequence))
