"""A job with local checkpoints around a core: nodes, keepers, ranks, and a coordinator that restarts."""

from collections.abc import Iterable, Sequence
from itertools import count, islice

from muster.service.core.coordinator import Coordinator
from muster.service.core.local.tier import ORDERS_PAUSE
from muster.service.core.vocabulary.effects import Effects, Message, Refused
from muster.service.core.vocabulary.events import Disconnected, Event, Tick
from muster.service.core.vocabulary.local import (
    Attachment,
    Attempt,
    CommitLocal,
    ConnectKeeper,
    Disk,
    Holding,
    Level,
    LocalCheckpoint,
    LocalCommitted,
    Order,
    Orders,
    Peers,
    Permitted,
    Recover,
    Recovered,
    ReportKeeper,
    ReportTaken,
    RequestPermit,
)
from muster.service.core.vocabulary.model import Instant, SessionId
from muster.service.core.vocabulary.refusal import Reason
from muster.service.storage.codec import decode_all, encode_all
from tests.support.expect import some
from tests.support.keepers.nodes import Folder, Node
from tests.support.keepers.rules import NONE, Rules
from tests.support.keepers.told import check_told_levels

RUN = "job"
WALL = 1e9
PATIENT = 400.0
"""Seconds after which a decision waits for nothing any more."""
CALL = 4.0
"""Seconds for which a rank waits for an answer, before it asks again."""


class Job:
    """A job, its nodes, and the coordinator. Each step is held against the rules.

    Args:
        domains: the failure domain of each node.
        replicas: the copies of each part that it asks for.
        persist_to: where its checkpoints are persisted; empty: nowhere.
    """

    def __init__(self, domains: Sequence[str], replicas: int, persist_to: str) -> None:
        self.nodes = {f"k{index}": Node(f"k{index}", domain) for index, domain in enumerate(domains)}
        self.rules = Rules(self.nodes)
        self.generation = -1
        self.ranks: dict[str, frozenset[int]] = {}
        """The ranks on each node of the current generation."""
        self.is_training = False
        """Whether all ranks of the generation have loaded what they resume from."""
        self.number = 0
        """The decision that the ranks ask for next."""
        self.answered: set[int] = set()
        """The ranks that have heard it."""
        self.unsettled: tuple[LocalCheckpoint, ...] = ()
        """What it says may be in shared storage."""
        self.absent: tuple[Attempt, ...] = ()
        """What the ranks have found not to be there."""
        self._saves = 0
        """The saves of the generation."""
        self.written: list[LocalCheckpoint] = []
        """What all ranks have written, committed or not."""
        self._replicas, self._persist_to = replicas, persist_to
        self._core = Coordinator()
        self._now = 0.0
        self._rows: dict[bytes, bytes] = {}
        self._ids = count(1)
        self._steps = count(0)
        self._sizes_by_generation: dict[int, int] = {}
        self._asking: dict[SessionId, tuple[int, int, int]] = {}
        """The ranks that wait for a decision: generation, number, rank."""
        self._committing: dict[SessionId, tuple[LocalCheckpoint, Level]] = {}

    @property
    def world_size(self) -> int:
        """The ranks of the current generation."""
        return sum(map(len, self.ranks.values()))

    @property
    def most(self) -> Level:
        """The highest level that its checkpoints can have."""
        if self._persist_to:
            return Level.PERSISTED
        return Level.REPLICATED if self._replicas else Level.LOCAL

    @property
    def least(self) -> Level:
        """The level that its checkpoints have once its keepers have come to rest."""
        has_room = self._replicas < len(self.ranks)
        return self.most if has_room or self._persist_to else Level.LOCAL

    def waits_for(self, checkpoint: LocalCheckpoint) -> bool:
        """Return whether the caller of a commit still waits."""
        return any(one == checkpoint for one, _ in self._committing.values())

    @property
    def resumed(self) -> LocalCheckpoint | None:
        """What the current generation was told to resume from last."""
        decided = [key for key in self.rules.decisions if key[0] == self.generation]
        return self.rules.decisions[max(decided)] if decided else None

    # ------------------------------------------------------------------ the coordinator

    def step(self, event: Event) -> list[Message]:
        """Feed an event in, persist, deliver. Returns what the event's own session is told."""
        effects = Effects()
        self.rules.now = self._now
        self._core.step(event, self._instant, effects)
        self._persist(effects)
        commits = {session: checkpoint.attempt for session, (checkpoint, _) in self._committing.items()}
        check_told_levels(self._rows, effects.deliveries, commits)
        for record in effects.records:
            self.rules.on_record(record)
        answers = []
        own = getattr(event, "session", None)
        for delivery in effects.deliveries:
            for session in delivery.audience:
                self._deliver(session, delivery.message)
                if session == own:
                    answers.append(delivery.message)
        if not isinstance(event, Disconnected):  # Orders follow a moment later.
            self.rules.check()
            self._check_current()
        return answers

    @property
    def _instant(self) -> Instant:
        return Instant(self._now, WALL + self._now)

    def _persist(self, effects: Effects) -> None:
        batch = encode_all(effects.records)
        for prefix in batch.cleared:
            self._rows = {key: value for key, value in self._rows.items() if not key.startswith(prefix)}
        for key, value in batch.writes.items():
            self._rows.pop(key, None)
            if value is not None:
                self._rows[key] = value

    def _deliver(self, session: SessionId, message: Message) -> None:
        for node in self.nodes.values():
            if node.session == session:
                if isinstance(message, Orders):
                    node.orders = message
                elif isinstance(message, Peers):
                    node.peers = message
        if session in self._asking and isinstance(message, Recovered):
            generation, number, rank = self._asking.pop(session)
            self.rules.on_recovered(generation, number, message)
            if (generation, number) == (self.generation, self.number):
                self.answered.add(rank)
                self.unsettled = message.unsettled
        elif session in self._asking and isinstance(message, Refused):
            generation, number, _ = self._asking.pop(session)
            assert message.refusal.reason is Reason.RECOVERY_SUPERSEDED
            is_behind = self.is_training or (generation, number) < (self.generation, self.number)
            assert is_behind, "a rank is refused that is not behind the others"
        elif session in self._committing and isinstance(message, LocalCommitted | Refused):
            checkpoint, wanted = self._committing.pop(session)
            self.rules.on_commit(checkpoint, wanted, message)

    def _check_current(self) -> None:
        """The keepers of the generation know one another, and where the parts are that they resume from."""
        current = [node for node in self.rules.connected() if self._is_current(node)]
        if sum(len(some(node.known).ranks) for node in current) < self.world_size:
            return
        for node in current:
            peers = some(node.peers)
            assert peers.generation == self.generation
            ranks = {location.url: frozenset(location.ranks) for location in peers.keepers}
            assert ranks == {one.url: self.ranks[one.name] for one in current}
            if self.resumed is not None and not self.is_training:
                self.rules.check_resumed(self.resumed, node)

    def _is_current(self, node: Node) -> bool:
        return node.known is not None and node.known.generation == self.generation

    def restart_coordinator(self) -> None:
        """It is killed and starts again: all streams and calls are over."""
        for node in self.nodes.values():
            node.break_stream()
            node.known = None
        self._asking.clear()
        self._committing.clear()
        self._core = Coordinator()
        self._core.restore(decode_all(list(self._rows.items())), self._instant)
        self._core.serve(self._instant)

    def wait(self, seconds: float) -> None:
        """Time passes, with a tick at each deadline."""
        end = self._now + seconds
        while (due := self._core.next_deadline()) is not None and due <= end:
            self._now = max(self._now, due)
            self.step(Tick())
            assert (self._core.next_deadline() or end + 1) > self._now, "it is woken without a pause"
        self._now = end

    # ------------------------------------------------------------------ keepers

    def connect(self, node: Node) -> None:
        """The keeper opens its stream."""
        if node.session is not None:
            self.disconnect(node)
        node.session = next(self._ids)
        holdings = node.holdings()
        node.reported = {holding.attempt: holding for holding in holdings}
        node.known = node.attachment or node.known
        event = ConnectKeeper(node.session, RUN, node.info, holdings, Disk(1, 2), "secret", node.attachment)
        self.step(event)

    def disconnect(self, node: Node) -> None:
        """Its stream breaks; the keeper may go on, cut off."""
        if node.session is not None:
            session = node.session
            node.break_stream()
            self.step(Disconnected(session))
            self.wait(2 * ORDERS_PAUSE)

    def attach(self, node: Node) -> None:
        """The ranks of the current generation attach to their keeper, if it runs on a node of theirs."""
        known = node.attachment.generation if node.attachment is not None else -1
        if node.name in self.ranks and known < self.generation:
            node.attachment = Attachment(
                self.generation, self.world_size, self.ranks[node.name], self._replicas
            )
            if node.session is not None:
                node.known = node.attachment
                self._report(node, (), attachment=node.attachment)

    def report(self, node: Node) -> None:
        """The keeper tells what has changed since its last report."""
        if node.session is None:
            return
        has = {holding.attempt: holding for holding in node.holdings()}
        changed = [holding for attempt, holding in has.items() if node.reported.get(attempt) != holding]
        gone = [
            Holding(attempt, old.manifest_digest, frozenset())
            for attempt, old in node.reported.items()
            if attempt not in has
        ]
        node.reported = has
        self._report(node, (*changed, *gone))

    def _report(
        self, node: Node, holdings: tuple[Holding, ...], attachment: Attachment | None = None
    ) -> None:
        event = ReportKeeper(next(self._ids), RUN, node.name, holdings, node.confirmed, attachment)
        assert self.step(event) == [ReportTaken()]

    def verify_all(self, node: Node) -> None:
        """The keeper verifies all that is in its folder."""
        for attempt in node.disk:
            node.verify(attempt)
        self.report(node)

    def work(self, node: Node, *, is_quick: bool = True) -> bool:
        """The keeper follows its orders as far as it can.

        Args:
            node: its node.
            is_quick: whether its commits take effect at once.

        Returns:
            Whether it has anything new.
        """
        if node.orders is None:
            return False
        named = {order.checkpoint.attempt for order in node.orders.checkpoints}
        for attempt in [one for one in node.disk if one < node.orders.forget_before and one not in named]:
            del node.disk[attempt]
        for order in node.orders.checkpoints:
            self._follow(node, order, is_quick=is_quick)
        before = node.reported
        self.report(node)
        return node.reported != before

    def _follow(self, node: Node, order: Order, *, is_quick: bool) -> None:
        checkpoint = order.checkpoint
        attempt = checkpoint.attempt
        if attempt not in node.disk or node.disk[attempt].digest != checkpoint.manifest_digest:
            node.disk[attempt] = Folder(checkpoint.manifest_digest)
        folder = node.disk[attempt]
        if not self._get_head(node, order):
            return
        for rank in order.ranks:
            if rank not in folder.verified:
                if folder.parts.get(rank):
                    folder.verified.add(rank)
                elif self.fetch(node, order, rank):
                    folder.parts[rank] = True
                    folder.verified.add(rank)
                else:
                    folder.parts.pop(rank, None)
        stored = self.rules.shared.setdefault(attempt, set())
        for rank in order.persist:
            if folder.parts.get(rank):
                stored.add(rank)
                folder.uploaded.add(rank)
        if order.commit and folder.verified and not folder.persisted_as:
            self.ask_permit(node, checkpoint)
            if is_quick:
                self.rules.finish_commits(node)

    def _get_head(self, node: Node, order: Order) -> bool:
        """Get the manifest, if it is not here, and verify what is here. Returns whether it is here now."""
        attempt = order.checkpoint.attempt
        folder = node.disk[attempt]
        if not folder.has_head:
            sources = [one for one in self.nodes.values() if one.url in {at.url for at in order.sources}]
            folder.has_head = any(
                source.session is not None
                and (there := source.disk.get(attempt)) is not None
                and there.has_head
                and there.digest == folder.digest
                for source in sources
            )
            folder.tried = order.sources
            node.verify(attempt)
        return folder.has_head

    def ask_permit(self, node: Node, checkpoint: LocalCheckpoint) -> None:
        """The keeper asks whether it may commit a checkpoint in shared storage."""
        attempt = checkpoint.attempt
        if node.session is None or attempt in node.committing:
            return
        answers = self.step(RequestPermit(next(self._ids), RUN, node.name, attempt))
        match answers:
            case [Permitted(unsettled)]:
                for one in unsettled:
                    assert one.attempt < attempt
                    self.rules.settle(one.attempt)
                node.committing[attempt] = checkpoint
            case [Refused(refusal)]:
                assert refusal.reason is Reason.ATTEMPT_SUPERSEDED
            case _:
                raise AssertionError(answers)

    def fetch(self, node: Node, order: Order, rank: int) -> bool:
        """Get a part from the sources of an order. A source with a damaged copy finds out, and reports it."""
        for location in order.sources:
            source = next(one for one in self.nodes.values() if one.url == location.url)
            folder = source.disk.get(order.checkpoint.attempt)
            if rank not in location.ranks or source is node or folder is None or source.session is None:
                continue
            if folder.has_head and folder.parts.get(rank):
                return True
            if rank in folder.parts:
                source.verify(order.checkpoint.attempt)
                self.report(source)
        return False

    # ------------------------------------------------------------------ the job

    def start(self, placed: Sequence[tuple[Node, int]], attached: Iterable[Node]) -> None:
        """A new generation begins.

        Args:
            placed: its nodes, each with the number of its ranks.
            attached: the nodes whose ranks attach at once.
        """
        self.generation += 1
        self.is_training, self.number, self.answered = False, 0, set()
        self.unsettled, self.absent, self._saves = (), (), 0
        every = count()
        self.ranks = {node.name: frozenset(islice(every, ranks)) for node, ranks in placed}
        for node in attached:
            self.attach(node)

    def save(self) -> LocalCheckpoint:
        """All ranks write a checkpoint, which is not committed yet."""
        checkpoint = self._next()
        for name, ranks in self.ranks.items():
            for rank in ranks:
                self.nodes[name].write(checkpoint, rank)
        self.written.append(checkpoint)
        return checkpoint

    def _next(self) -> LocalCheckpoint:
        attempt = Attempt(self.generation, self._saves)
        self._saves += 1
        step = next(self._steps)
        digest = step.to_bytes(16, "big")
        return LocalCheckpoint(attempt, step, self.world_size, 100, digest, self._replicas, self._persist_to)

    def save_without_room(self) -> None:
        """All ranks write to shared storage. Rank 0 is permitted to commit it there."""
        checkpoint = self._next()
        answers = self.step(CommitLocal(next(self._ids), RUN, checkpoint, ""))
        match answers:
            case [LocalCommitted(_, unsettled)]:
                for one in unsettled:
                    self.rules.settle(one.attempt)
                self.rules.committing = checkpoint
            case _:
                raise AssertionError(answers)

    def finish_shared_save(self, *, tells: bool) -> None:
        """Rank 0 commits it in shared storage, and perhaps has no time to tell the coordinator."""
        checkpoint, self.rules.committing = self.rules.committing, None
        if checkpoint is None:
            return
        self.rules.commit(checkpoint.attempt)
        if tells and self.is_training:
            event = CommitLocal(next(self._ids), RUN, checkpoint, "", persisted_as=f"step-{checkpoint.step}")
            assert [type(one) for one in self.step(event)] == [LocalCommitted]

    def commit(self, checkpoint: LocalCheckpoint, wanted: Level = Level.LOCAL) -> None:
        """Rank 0 commits a checkpoint, or a process of an earlier generation does."""
        session = next(self._ids)
        newest = self.rules.newest
        self._committing[session] = checkpoint, wanted
        answers = self.step(CommitLocal(session, RUN, checkpoint, min(self.ranks), wanted))
        if checkpoint.attempt > newest and checkpoint.attempt.generation == self.generation:
            assert self.rules.newest == checkpoint.attempt, "a new checkpoint is refused"
        elif checkpoint.attempt.generation < self.generation and checkpoint.attempt > newest:
            # Whether it is known already that there is a newer generation depends on the keepers.
            assert answers
        else:
            assert self.rules.newest == newest

    def ask(self, rank: int, generation: int, number: int) -> None:
        """A rank asks what to resume from."""
        session = next(self._ids)
        self._asking[session] = generation, number, rank
        self.rules.asked_at.setdefault((generation, number), self._now)
        absent = self.absent if (generation, number) == (self.generation, self.number) else ()
        # A rank of an earlier generation asks with the world size of its own.
        world_size = self._sizes_by_generation.setdefault(generation, self.world_size)
        self.step(Recover(session, RUN, generation, number, world_size, absent))

    def hang_up(self) -> None:
        """All calls end without an answer."""
        calls = [*self._asking, *self._committing]
        self._asking.clear()
        self._committing.clear()
        for session in calls:
            self.step(Disconnected(session))

    def recover(self) -> None:
        """All ranks ask, by calls that are short and made again, until they know what to resume from."""
        end = self._now + PATIENT
        while waiting := set(range(self.world_size)) - self.answered:
            assert self._now < end, "a rank waits in vain for a decision"
            for rank in waiting:
                self.ask(rank, self.generation, self.number)
            self.wait(CALL)
            self.hang_up()

    def load(self) -> bool:
        """All ranks load what they were told. Returns whether all can; else they will ask again."""
        resumed = self.rules.decisions[self.generation, self.number]
        absent: tuple[Attempt, ...] = ()
        if resumed is None:
            found = [self.rules.settle(one.attempt) for one in self.unsettled]
            absent = () if any(found) else tuple(one.attempt for one in self.unsettled)
            if not absent:
                # Else what is there is not looked at: the ranks ask again.
                assert max(self.rules.committed, default=NONE) not in self.rules.abandoned
        loaded = [self._load(self.nodes[name], resumed) for name in self.ranks] if resumed else []
        self.is_training = all(loaded) and not absent
        if not self.is_training:
            self.number += 1
            self.answered = set()
            self.absent, self.unsettled = absent, ()
        return self.is_training

    def _load(self, node: Node, resumed: LocalCheckpoint) -> bool:
        if node.orders is None:
            return False
        order = next((one for one in node.orders.checkpoints if one.checkpoint == resumed), None)
        if order is None:
            return False
        resharded = resumed.world_size != self.world_size
        needed = range(resumed.world_size) if resharded else sorted(self.ranks[node.name])
        folder = node.disk.get(resumed.attempt)
        if folder is not None and folder.digest == resumed.manifest_digest:
            self._get_head(node, order)
            node.verify(resumed.attempt)  # What is damaged is found now, and deleted.
            self.report(node)
        found = [
            (folder is not None and rank in folder.verified) or self.fetch(node, order, rank)
            for rank in needed
        ]
        return all(found)
