"""The bounds of one coordinator: invariant 15 (every bound is a named limit)."""

from dataclasses import dataclass

MIN_DECISIONS = 16
"""Decisions that a group keeps in any case, however many missing ranks each of them names."""

SMALL_GATHER_BYTES = 65_536
"""Payloads of one barrier for which the last eighth of ``max_total_gather_bytes`` is reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one coordinator.

    Beyond a bound, it answers RESOURCE_EXHAUSTED with the field's name, unless the field says otherwise.
    """

    max_runs: int = 1_000
    max_groups_per_run: int = 256
    max_world_size: int = 65_536
    """Ranks of one world. Beyond it: INVALID_ARGUMENT."""
    max_sessions: int = 20_000
    """Open streams: of processes, of relays and of nodes."""
    max_relayed_processes: int = 131_072
    """Processes that speak through relays; each costs far less than a stream."""
    max_processes_per_rank: int = 64
    """Living processes of one rank, each of which may own the rank in other groups."""
    max_name_bytes: int = 256
    """Length of a run id, prefix, host or incarnation, in UTF-8. Beyond it: INVALID_ARGUMENT."""
    max_reason_bytes: int = 16_384
    """Length of a reason, in UTF-8. A longer reason of a vote or an abort is cut, others are refused with
    INVALID_ARGUMENT."""
    max_payload_bytes: int = 1_048_576
    """One rank's payload."""
    max_gather_bytes: int = 4_194_304
    """All payloads of one barrier, sent to each waiting rank. Beyond it, the barrier is ABORTED."""
    max_total_gather_bytes: int = 134_217_728
    """The payloads of all runs in memory: of open barriers, and of kept decisions. Beyond it, the barrier is
    ABORTED."""
    max_timeout_seconds: float = 30 * 86_400.0
    """Longest timeout that a caller may give. Beyond it: INVALID_ARGUMENT."""
    max_unheard_decisions: int = 1_000
    """Decisions in a row without a release, which some rank may still have to hear."""
    max_kept_missing: int = 1_000_000
    """Missing ranks in all kept decisions of one group. A large group keeps fewer decisions; nothing is
    refused."""
    decision_history: int = 64
    """Decisions of a group that people see after every rank has heard them. Older ones are dropped."""
    max_store_keys: int = 262_144
    """Keys in the store of one run."""
    max_store_bytes: int = 67_108_864
    """All keys and values in the store of one run. The answers kept for its clients may have as much."""
    max_total_store_bytes: int = 536_870_912
    """Memory of the stores of all runs: keys, values, kept answers and waiting calls."""
    max_store_value_bytes: int = 1_048_576
    """One value in a store."""
    max_store_key_bytes: int = 4_096
    """Length of a store's key, in UTF-8."""
    max_store_clients: int = 65_536
    """Clients of a run's store whose last change is kept. Beyond it, the least recent client is forgotten."""
    max_store_waits: int = 65_536
    """Calls that wait for keys of one run."""

    def total_gather_bytes(self, own: int) -> int:
        """Return ``max_total_gather_bytes`` for a barrier with ``own`` bytes of payloads.

        The last eighth is for small ones, so small barriers of other runs still succeed when one run has used
        the rest.
        """
        reserved = 0 if own <= SMALL_GATHER_BYTES else self.max_total_gather_bytes // 8
        return self.max_total_gather_bytes - reserved

    def unheard_decisions(self, ranks: int) -> int:
        """Return ``max_unheard_decisions`` for barriers of ``ranks`` ranks, each of which may be missing."""
        return min(self.max_unheard_decisions, max(MIN_DECISIONS, self.max_kept_missing // ranks))

    def history(self, ranks: int) -> int:
        """Return ``decision_history`` for barriers of ``ranks`` ranks, each of which may be missing."""
        return min(self.decision_history, max(MIN_DECISIONS, self.max_kept_missing // ranks))


@dataclass(slots=True)
class ByteTotal:
    """Bytes of all runs together that count towards one bound."""

    bytes: int = 0
