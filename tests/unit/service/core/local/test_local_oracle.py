"""Local checkpoints against a model that knows which bytes are where.

Invariant 21 (one recovery decision for each round) and invariant 22 (copies are verified before use).
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from muster.service.core.vocabulary.local import Level
from tests.support.keepers.job import Job
from tests.support.keepers.nodes import Node
from tests.support.keepers.settling import settle

NODES = 5
INDEX = st.integers(0, 1_000)
SOME = st.lists(st.booleans(), min_size=NODES, max_size=NODES)


class LocalCheckpoints(RuleBasedStateMachine):
    """Keepers and ranks of one job in any order, with losses, damage, partitions and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.job = Job([""], 0, "")

    @initialize(
        domains=st.lists(st.sampled_from(["", "", "a", "b"]), min_size=NODES, max_size=NODES),
        replicas=st.sampled_from([0, 1, 1, 1, 2]),
        is_persisted=st.booleans(),
    )
    def begin(self, domains: list[str], replicas: int, is_persisted: bool) -> None:
        self.job = Job(domains, replicas, "/shared" if is_persisted else "")
        for node in self.job.nodes.values():
            self.job.connect(node)
            self.job.verify_all(node)
        self.job.start([(node, 1) for node in list(self.job.nodes.values())[:3]], self.job.nodes.values())

    def node(self, index: int) -> Node:
        nodes = list(self.job.nodes.values())
        return nodes[index % len(nodes)]

    # ------------------------------------------------------------------ keepers

    @rule(index=INDEX, attaches=st.booleans())
    def connect(self, index: int, attaches: bool) -> None:
        node = self.node(index)
        if attaches:
            self.job.attach(node)
        self.job.connect(node)

    @rule(index=INDEX)
    def attach(self, index: int) -> None:
        self.job.attach(self.node(index))

    @rule(index=INDEX)
    def cut_off(self, index: int) -> None:
        self.job.disconnect(self.node(index))

    @rule(index=INDEX, wiped=st.booleans())
    def lose_keeper(self, index: int, wiped: bool) -> None:
        node = self.node(index)
        node.stop()
        if wiped:
            node.disk.clear()
        self.job.disconnect(node)

    @rule(index=INDEX)
    def restart_keeper(self, index: int) -> None:
        node = self.node(index)
        node.stop()
        self.job.connect(node)

    @rule(index=INDEX)
    def lose_keeper_and_manifest(self, index: int) -> None:
        """The node died before the manifest of its newest parts had come."""
        node = self.node(index)
        node.stop()
        if node.disk:
            node.disk[max(node.disk)].has_head = False
        self.job.disconnect(node)

    @rule(index=INDEX)
    def verify(self, index: int) -> None:
        self.job.verify_all(self.node(index))

    @rule(index=INDEX)
    def work(self, index: int) -> None:
        self.job.work(self.node(index))

    @rule(index=INDEX)
    def work_and_stall(self, index: int) -> None:
        """What it is permitted to commit in shared storage takes effect later."""
        self.job.work(self.node(index), is_quick=False)

    @rule(index=INDEX)
    def commit_late(self, index: int) -> None:
        self.job.rules.finish_commits(self.node(index))

    @rule()
    def work_everywhere(self) -> None:
        for node in self.job.nodes.values():
            self.job.work(node)

    @rule(index=INDEX, which=INDEX)
    def damage(self, index: int, which: int) -> None:
        parts = [(folder, rank) for folder in self.node(index).disk.values() for rank in sorted(folder.parts)]
        if parts:
            folder, rank = parts[which % len(parts)]
            folder.parts[rank] = False

    @rule(index=INDEX, which=INDEX)
    def find_damage(self, index: int, which: int) -> None:
        node = self.node(index)
        if node.disk:
            node.verify(sorted(node.disk)[which % len(node.disk)])
            self.job.report(node)

    # ------------------------------------------------------------------ the job

    @precondition(lambda self: self.job.is_training)
    @rule(wanted=st.sampled_from(Level), commits=st.sampled_from([True, True, True, False]))
    def save(self, wanted: Level, commits: bool) -> None:
        checkpoint = self.job.save()
        if commits:
            self.job.commit(checkpoint, min(wanted, self.job.most))

    @precondition(lambda self: self.job.is_training)
    @rule()
    def save_and_work(self) -> None:
        self.job.commit(self.job.save())
        for _ in range(2):
            self.work_everywhere()

    @precondition(lambda self: self.job.is_training and self.job.most is Level.PERSISTED)
    @rule(lost=SOME)
    def lose_nodes_while_one_commits(self, lost: list[bool]) -> None:
        """The keeper that is permitted to commit may be among them, and cut off rather than dead."""
        self.job.commit(self.job.save())
        for _ in range(3):
            for node in self.job.nodes.values():
                self.job.work(node, is_quick=False)
        for node, is_lost in zip(list(self.job.nodes.values()), lost, strict=True):
            if is_lost:
                node.disk.clear()
                self.job.disconnect(node)

    @precondition(lambda self: self.job.is_training and self.job.most is Level.PERSISTED)
    @rule()
    def save_without_room(self) -> None:
        self.job.save_without_room()

    @rule(tells=st.booleans())
    def finish_save_without_room(self, tells: bool) -> None:
        self.job.finish_shared_save(tells=tells)

    @precondition(lambda self: self.job.written)
    @rule(which=st.integers(1, 8))
    def commit_what_was_written(self, which: int) -> None:
        self.job.commit(self.job.written[-min(which, len(self.job.written))])

    @rule(chosen=SOME, two=SOME, attached=SOME)
    def start(self, chosen: list[bool], two: list[bool], attached: list[bool]) -> None:
        nodes = list(self.job.nodes.values())
        placed = [(node, 1 + more) for node, more, is_in in zip(nodes, two, chosen, strict=True) if is_in]
        placed = placed or [(nodes[0], 1)]
        self.job.start(placed, [node for node, is_in in zip(nodes, attached, strict=True) if is_in])

    @precondition(lambda self: self.job.is_training)
    @rule(verified=SOME, without_manifest=SOME)
    def restart_all(self, verified: list[bool], without_manifest: list[bool]) -> None:
        """All nodes restart after a save, and some take long to verify what is on their disks."""
        self.job.commit(self.job.save())
        nodes = list(self.job.nodes.values())
        for node, is_without in zip(nodes, without_manifest, strict=True):
            node.stop()
            if node.disk:
                node.disk[max(node.disk)].has_head = not is_without
            self.job.disconnect(node)
        placed = [(self.job.nodes[name], len(ranks)) for name, ranks in self.job.ranks.items()]
        self.job.start(placed, [])
        for node in nodes:
            self.job.attach(node)
            self.job.connect(node)
        self.ask_from_all()
        for node, is_verified in zip(nodes, verified, strict=True):
            if is_verified:
                self.job.work(node)
                self.job.verify_all(node)
        self.job.wait(6.0)

    @precondition(lambda self: not self.job.is_training)
    @rule(rank=INDEX)
    def ask(self, rank: int) -> None:
        self.job.ask(rank % self.job.world_size, self.job.generation, self.job.number)

    @precondition(lambda self: not self.job.is_training)
    @rule()
    def ask_from_all(self) -> None:
        for rank in range(self.job.world_size):
            self.job.ask(rank, self.job.generation, self.job.number)

    @precondition(lambda self: self.job.rules.decisions)
    @rule(which=INDEX)
    def ask_again(self, which: int) -> None:
        decided = sorted(self.job.rules.decisions)
        self.job.ask(0, *decided[which % len(decided)])

    @precondition(lambda self: len(self.job.answered) == self.job.world_size and not self.job.is_training)
    @rule()
    def load(self) -> None:
        self.job.load()

    @rule()
    def hang_up(self) -> None:
        self.job.hang_up()

    @rule()
    def restart_coordinator(self) -> None:
        self.job.restart_coordinator()

    @rule(seconds=st.sampled_from([1.0, 6.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.job.wait(seconds)

    @rule()
    def settle(self) -> None:
        settle(self.job)


TestLocalCheckpoints = LocalCheckpoints.TestCase
TestLocalCheckpoints.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
