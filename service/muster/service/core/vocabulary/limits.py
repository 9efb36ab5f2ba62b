"""The bounds of one coordinator: invariant 15 (every bound is a named limit)."""

from dataclasses import dataclass

MIN_DECISIONS = 16
"""Of a group, that are kept however many ranks are missing from each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one coordinator holds; past a bound it answers RESOURCE_EXHAUSTED with the field's name."""

    max_runs: int = 1_000
    max_groups_per_run: int = 256
    max_world_size: int = 65_536
    max_sessions: int = 20_000
    """Open streams: of processes, of relays and of nodes."""
    max_relayed_processes: int = 131_072
    """Processes that speak through relays; each costs far less than a stream."""
    max_processes_per_rank: int = 64
    """Living processes that may speak for one rank at once, each in its own groups."""
    max_name_bytes: int = 256
    """Length of a run id, prefix, host or incarnation, in UTF-8."""
    max_reason_bytes: int = 16_384
    """Length of a reason, in UTF-8. That of a vote or an abort is cut, not refused."""
    max_payload_bytes: int = 1_048_576
    """One rank's payload."""
    max_gather_bytes: int = 4_194_304
    """All payloads of one barrier; each waiting rank is sent all of them."""
    max_total_gather_bytes: int = 134_217_728
    """The payloads of all runs in memory: of open barriers, and of kept decisions."""
    max_timeout_seconds: float = 30 * 86_400.0
    max_unheard_decisions: int = 1_000
    """Decisions in a row that some rank may still have to hear, since none of them was a release."""
    max_kept_missing: int = 1_000_000
    """Missing ranks in all kept decisions of one group: fewer decisions are kept when each is large."""
    decision_history: int = 64
    """Decisions of a group that are kept for people to look at when no rank needs them any more."""
    max_store_keys: int = 262_144
    """Keys in the store of one run."""
    max_store_bytes: int = 67_108_864
    """All keys and values in the store of one run; and as much again, the answers kept for its clients."""
    max_total_store_bytes: int = 536_870_912
    """What the stores of all runs hold in memory: keys, values, kept answers, and calls that wait."""
    max_store_value_bytes: int = 1_048_576
    """One value in a store."""
    max_store_key_bytes: int = 4_096
    """Length of a store's key, in UTF-8."""
    max_store_clients: int = 65_536
    """Clients of a run's store whose last change is remembered; the one heard least recently is forgotten."""
    max_store_waits: int = 65_536
    """Calls that wait for keys of one run."""

    def unheard_decisions(self, ranks: int) -> int:
        """``max_unheard_decisions`` for barriers of so many ranks, each of which may be missing."""
        return min(self.max_unheard_decisions, max(MIN_DECISIONS, self.max_kept_missing // ranks))

    def history(self, ranks: int) -> int:
        """``decision_history`` for barriers of so many ranks, each of which may be missing."""
        return min(self.decision_history, max(MIN_DECISIONS, self.max_kept_missing // ranks))


@dataclass(slots=True)
class ByteTotal:
    """Bytes that all runs hold together, of one bound."""

    bytes: int = 0
