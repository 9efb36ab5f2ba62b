"""The rules of local checkpoints, held against what nodes have reported, and not against the core's state."""

from collections.abc import Iterable, Mapping, Sequence

from muster.service.core.local.recovery import VERIFY_PATIENCE
from muster.service.core.vocabulary.effects import Refused
from muster.service.core.vocabulary.local import (
    Attempt,
    ForgetLocalCheckpoint,
    Level,
    LocalCheckpoint,
    LocalCheckpointRecord,
    LocalCommitted,
    Order,
    Permit,
    Recovered,
    RecoveryRecord,
)
from muster.service.core.vocabulary.refusal import Reason
from tests.support.keepers.nodes import Node

NONE = Attempt(-1, -1)
"""Before all attempts."""


class Rules:
    """All that has been decided, and the rules for what may be decided next.

    Args:
        nodes: the nodes, by name.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self.known: dict[Attempt, LocalCheckpointRecord] = {}
        """The checkpoints that are kept, as they are on the coordinator's disk."""
        self.made: dict[Attempt, LocalCheckpointRecord] = {}
        """All that were ever committed, with the levels that they have had."""
        self.newest = NONE
        """The newest attempt that was ever committed."""
        self.abandoned: set[Attempt] = set()
        self.decisions: dict[tuple[int, int], LocalCheckpoint | None] = {}
        """By generation and number."""
        self.shared: dict[Attempt, set[int]] = {}
        """The parts in shared storage."""
        self.committed: set[Attempt] = set()
        """The checkpoints that were committed in shared storage."""
        self.committing: LocalCheckpoint | None = None
        """What rank 0 was permitted to commit in shared storage, and is about to."""
        self.absent: set[Attempt] = set()
        """Those of which was made sure that nobody commits them."""
        self.now = 0.0
        """Seconds, on the core's monotonic clock."""
        self.asked_at: dict[tuple[int, int], float] = {}
        """By generation and number of a decision: when a rank asked for it first."""

    # ------------------------------------------------------------------ what there is

    def connected(self) -> list[Node]:
        """The nodes whose keepers have a stream."""
        return [node for node in self._nodes.values() if node.session is not None]

    def holders(self, checkpoint: LocalCheckpoint, rank: int) -> list[Node]:
        """The connected nodes that have reported a part of just this checkpoint."""
        return [
            node
            for node in self.connected()
            if (holding := node.reported.get(checkpoint.attempt)) is not None
            and holding.manifest_digest == checkpoint.manifest_digest
            and rank in holding.ranks
        ]

    def is_whole(self, checkpoint: LocalCheckpoint) -> bool:
        """Whether each part is on a connected node."""
        return all(self.holders(checkpoint, rank) for rank in range(checkpoint.world_size))

    def newest_whole(self) -> Attempt:
        """The newest checkpoint that is whole."""
        whole = (attempt for attempt, one in self.known.items() if self.is_whole(one.checkpoint))
        return max(whole, default=NONE)

    def newest_on_disks(self, nodes: Iterable[Node]) -> Attempt:
        """The newest checkpoint with each part intact on these nodes, and the manifest beside one of them."""
        nodes = list(nodes)

        def is_there(checkpoint: LocalCheckpoint) -> bool:
            found = [node.disk.get(checkpoint.attempt) for node in nodes]
            here = [one for one in found if one is not None and one.digest == checkpoint.manifest_digest]
            parts = {rank for one in here for rank, is_intact in one.parts.items() if is_intact}
            has_manifest = any(one.has_head and any(one.parts.values()) for one in here)
            return has_manifest and parts == set(range(checkpoint.world_size))

        known = (one.checkpoint for one in self.known.values())
        return max((one.attempt for one in known if is_there(one)), default=NONE)

    def newest_persisted(self) -> Attempt:
        """The newest checkpoint that a decision knew to be in shared storage, and that was not abandoned."""
        found = (
            attempt
            for attempt, one in self.made.items()
            if one.level is Level.PERSISTED and attempt not in self.abandoned
        )
        return max(found, default=NONE)

    def doubtful(self) -> list[Attempt]:
        """What may be in shared storage, and would be newer than all that can be resumed from."""
        least = max(self.newest_whole(), self.newest_persisted())
        return [
            attempt
            for attempt, one in self.known.items()
            if one.permit is not Permit.NONE and one.level < Level.PERSISTED and attempt > least
        ]

    # ------------------------------------------------------------------ shared storage

    def commit(self, attempt: Attempt) -> None:
        """A permitted commit takes effect, however late."""
        assert attempt not in self.abandoned, "what a recovery has passed over is committed in shared storage"
        if attempt not in self.committed:
            assert attempt > max(self.committed, default=NONE), "an older commit comes after a newer one"
        self.committed.add(attempt)

    def finish_commits(self, node: Node) -> None:
        """The commits take effect for which a keeper has permits. It may be cut off."""
        committing, node.committing = node.committing, {}
        for attempt, checkpoint in committing.items():
            self.commit(attempt)
            if attempt in node.disk:
                node.disk[attempt].persisted_as = f"step-{checkpoint.step}"

    def settle(self, attempt: Attempt) -> bool:
        """Return whether it is committed. If not, a process with a permit cannot commit it any more."""
        if attempt in self.committed:
            return True
        self.absent.add(attempt)
        if self.committing is not None and self.committing.attempt == attempt:
            self.committing = None
        for node in self._nodes.values():
            node.committing.pop(attempt, None)
        return False

    # ------------------------------------------------------------------ decisions

    def on_record(self, record: object) -> None:
        """A record is written: that is the moment of a decision."""
        if isinstance(record, LocalCheckpointRecord):
            self._on_level(record)
        elif isinstance(record, ForgetLocalCheckpoint):
            self._on_forget(record.attempt)
        elif isinstance(record, RecoveryRecord):
            self._on_recovery(record)

    def _on_level(self, record: LocalCheckpointRecord) -> None:
        checkpoint, attempt = record.checkpoint, record.checkpoint.attempt
        before = self.known.get(attempt)
        if before is None:
            assert attempt > self.newest, "an attempt is committed that is not newer than all others"
            self.newest = attempt
        else:
            assert checkpoint == before.checkpoint
            is_raised = record.level > before.level
            assert is_raised or (record.level == before.level and record.permit != before.permit), (
                "a level does not go back, and is decided once"
            )
            assert record.made_at == before.made_at
        if record.level is Level.REPLICATED and (before is None or before.level < Level.REPLICATED):
            for rank in range(checkpoint.world_size):
                found = len(self.holders(checkpoint, rank))
                assert found > checkpoint.replicas > 0, f"rank {rank} has {found} copies"
        if record.permit is Permit.GIVEN:
            self.absent.discard(attempt)
        if record.level is Level.PERSISTED and (before is None or before.level < Level.PERSISTED):
            assert attempt in self.committed
            assert attempt > self.newest_persisted(), "shared storage goes back to an older checkpoint"
        self.known[attempt] = self.made[attempt] = record

    def _on_forget(self, attempt: Attempt) -> None:
        is_absent = attempt in self.absent and not self.known[attempt].keeper_id
        if attempt not in self.abandoned and not is_absent:
            newest = max(self.newest_whole(), self.newest_persisted())
            assert newest > attempt or len([one for one in self.known if one > attempt]) >= 6
            assert attempt != self.newest_whole(), "the newest whole one is given up"
            assert attempt != max(self.known), "the newest one is given up"
        del self.known[attempt]

    def _on_recovery(self, record: RecoveryRecord) -> None:
        key = record.generation, record.number
        assert key not in self.decisions, "a decision is made twice"
        assert not self.decisions or key > max(self.decisions)
        ranks = {
            rank
            for node in self.connected()
            if node.known is not None and node.known.generation == record.generation
            for rank in node.known.ranks
        }
        assert ranks == set(range(record.world_size)), "a rank has no keeper yet"
        whole, persisted = self.newest_whole(), self.newest_persisted()
        if doubtful := self.doubtful():
            last = max(doubtful)
            assert record.attempt is None, "what may be in shared storage is passed over"
            self.decisions[key] = None
        elif record.attempt is None:
            last = persisted
            assert whole is NONE or whole < persisted, "a whole local checkpoint is not resumed from"
            self.decisions[key] = None
        else:
            last = record.attempt
            assert record.attempt == whole, "it is not the newest whole checkpoint"
            assert record.attempt >= persisted, "a newer one in shared storage is not resumed from"
            self.decisions[key] = self.known[record.attempt].checkpoint
        if self.now < self.asked_at[key] + VERIFY_PATIENCE:
            assert self.newest_on_disks(self.connected()) <= last, "a keeper may still verify a newer one"
        self.abandoned.update(attempt for attempt in self.known if attempt > last)

    # ------------------------------------------------------------------ what is told

    def on_recovered(self, generation: int, number: int, answer: Recovered) -> None:
        """A rank hears what to resume from."""
        assert answer.checkpoint == self.decisions[generation, number], "ranks hear different decisions"
        if answer.checkpoint is not None:
            assert answer.checkpoint.attempt not in self.abandoned

    def on_commit(self, checkpoint: LocalCheckpoint, wanted: Level, answer: LocalCommitted | Refused) -> None:
        """The caller of a commit hears what became of it."""
        if isinstance(answer, Refused):
            kept = self.known.get(checkpoint.attempt)
            assert answer.refusal.reason is Reason.ATTEMPT_SUPERSEDED
            assert kept is None or kept.checkpoint != checkpoint, "it is kept, and refused"
            return
        record = self.made[checkpoint.attempt]
        assert record.checkpoint == checkpoint
        assert answer.level == record.level >= wanted
        assert checkpoint.attempt not in self.abandoned

    # ------------------------------------------------------------------ at any time

    def check(self) -> None:
        """What must be so after each event."""
        assert not self.abandoned & self.known.keys(), "an abandoned attempt is kept"
        uploads: set[tuple[Attempt, int]] = set()
        for node in self.connected():
            assert node.orders is not None, "a keeper is told its orders at once"
            for order in node.orders.checkpoints:
                self._check_order(node, order)
                new = {(order.checkpoint.attempt, rank) for rank in order.persist}
                assert not new & uploads, "two keepers persist one part"
                uploads |= new
            assert node.orders.forget_before > self.newest, "a keeper may delete less than is over"

    def _check_order(self, node: Node, order: Order) -> None:
        checkpoint = order.checkpoint
        record = self.known.get(checkpoint.attempt)
        assert record is not None, "it is given up, or was never committed"
        assert (record.checkpoint, record.level) == (checkpoint, order.level)
        sources: dict[int, set[str]] = {}
        for location in order.sources:
            assert location.url != node.url
            for rank in location.ranks:
                sources.setdefault(rank, set()).add(location.url)
        for rank, urls in sources.items():
            holders = {one.url for one in self.holders(checkpoint, rank)}
            assert urls <= holders, "a source does not have the part"
        held = {rank for rank in range(checkpoint.world_size) if node in self.holders(checkpoint, rank)}
        assert held <= set(order.ranks), "a keeper is told to give up a part of a checkpoint that is kept"
        self._check_sources(checkpoint, set(order.ranks) - held, sources, node)
        with_head = {
            one.url for rank in range(checkpoint.world_size) for one in self.holders(checkpoint, rank)
        }
        committer = self._nodes.get(record.keeper_id)
        if committer is not None and committer.session is not None:
            there = committer.disk.get(checkpoint.attempt)
            if there is not None and there.has_head:
                with_head.add(committer.url)
        # It may have a part that it cannot verify without the manifest.
        if with_head and not held and node is not committer:
            assert with_head & {location.url for location in order.sources}, "nobody has the manifest"
        assert set(order.persist) <= held
        if order.commit:
            in_storage = self.shared.get(checkpoint.attempt, set())
            assert in_storage == set(range(checkpoint.world_size)), "a part is not in shared storage"

    def check_resumed(self, resumed: LocalCheckpoint, node: Node) -> None:
        """A node that is to resume from a checkpoint knows where each part is that it has not."""
        assert node.orders is not None
        orders = [one for one in node.orders.checkpoints if one.checkpoint == resumed]
        assert orders, "the checkpoint to resume from is not in the orders"
        sources: dict[int, set[str]] = {}
        for location in orders[0].sources:
            for rank in location.ranks:
                sources.setdefault(rank, set()).add(location.url)
        held = {rank for rank in range(resumed.world_size) if node in self.holders(resumed, rank)}
        self._check_sources(resumed, set(range(resumed.world_size)) - held, sources, node)

    def _check_sources(
        self, checkpoint: LocalCheckpoint, needed: set[int], sources: Mapping[int, set[str]], node: Node
    ) -> None:
        for rank in needed:
            others: Sequence[Node] = [one for one in self.holders(checkpoint, rank) if one is not node]
            assert not others or sources.get(rank), f"nobody is named that has the part of rank {rank}"
