"""The state of a random job around the core, and the invariants that hold after each of its steps."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hypothesis.stateful import RuleBasedStateMachine, invariant

from muster.service.core.barriers.checkpoints import MAX_FAILURES
from muster.service.core.membership.process import SUCCESSION_WINDOW, Process
from muster.service.core.run import Run
from muster.service.core.vocabulary.effects import Refused
from muster.service.core.vocabulary.model import MemberState, Outcome
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_client import Client
from tests.support.world.core_world import RUN, World
from tests.support.world.relay_stream import RelayStream

PREFIXES = ("checkpoint", "checkpoint", "eval")
SAVES = "checkpoint"
"""The group whose barriers are those of saves."""
HELPERS = "helper"
"""The group of processes that are not a rank's trainer."""
CALLS = "calls"
"""The group of processes that arrive by unary calls."""


@dataclass(frozen=True, slots=True)
class Succession:
    """One process took over a group from another of its rank."""

    prefix: str
    resets: int
    """How often the group had been created or reset."""
    rank: int
    older: str
    newer: str


class CheckedJob(RuleBasedStateMachine):
    """A job of two to four ranks, its processes and its coordinator, with the invariants of each state."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(3)
        self.generation = 0
        self.judged: dict[Client, int] = {}
        """How many of its refusals have been looked at."""
        self.subset: tuple[int, ...] = ()
        """The participants of the group "eval"; empty: all ranks."""
        self.odd: set[Client] = set()
        """Processes that see another world size than the others."""
        self.relay_streams: dict[tuple[int, int], RelayStream] = {}
        """Each relay's, by relay and generation."""
        self.evicted: set[int] = set()
        """Ranks, at any time."""
        self.helpers: set[Client] = set()
        """Processes of a rank that take part in a group of their own, and in no other."""
        self.called: dict[int, float] = {}
        """When a unary call spoke for a rank last."""
        self.answered: dict[tuple[int, int, str], int] = {}
        """By epoch, resets and incarnation: the barrier of the last decision that answered a call."""
        self.owned: dict[tuple[str, int], tuple[int, Process]] = {}
        """By group and rank: the last owner, and how often the group had been reset by then."""
        self.successions: list[Succession] = []
        """Processes that took over a group from another one in its current membership."""
        self.epoch = self.world.epoch
        """The coordinator's start that the successions were last compared with."""

    # ------------------------------------------------------------------ choosing

    @property
    def alive(self) -> list[Client]:
        return [client for client in self.world.clients if client.alive]

    @property
    def connected(self) -> list[Client]:
        return [client for client in self.alive if client.session is not None]

    @property
    def current(self) -> list[Client]:
        """The processes of the newest generation, those that are connected first."""
        mine = [client for client in self.alive if client.generation == self.generation]
        return sorted(mine, key=lambda client: client.session is None)

    def pick(self, among: list[Client], number: int) -> Client | None:
        return among[number % len(among)] if among else None

    def takes_part(self, client: Client, prefix: str) -> bool:
        if client in self.helpers:
            return prefix == HELPERS
        return prefix != "eval" or not self.subset or client.rank in self.subset

    def shape_of(self, client: Client, prefix: str) -> tuple[int, tuple[int, ...]]:
        size = self.world.world_size + (client in self.odd)
        if prefix == "eval" and self.subset and self.takes_part(client, prefix):
            return size, self.subset
        return max(size, client.rank + 1), ()

    def relay_stream(self, way: int | None, generation: int) -> RelayStream | None:
        """The relay's stream of this way."""
        if way is None:
            return None
        return self.relay_streams.setdefault(
            (way, generation), RelayStream(self.world, RUN, generation, f"relay-{way}")
        )

    # ------------------------------------------------------------------ judging

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        self.world.assert_nobody_waits_in_vain()

    @invariant()
    def nobody_waits_for_the_dead(self) -> None:
        """A successor of a dead process took over a group from it, or came not long ago."""
        for group in (group for run in self.world.coordinator.runs.values() for group in run.groups.values()):
            owners = group.owners if group.open is not None else {}
            for rank in set(owners) - set(group.open.arrivals if group.open is not None else ()):
                dead = owners[rank].process
                if dead.state.gone and group.open is not None and rank in group.open.shape:
                    assert self.may_be_taken_over(dead)

    def may_be_taken_over(self, dead: Process) -> bool:
        of_rank = [client for client in self.world.clients if client.rank == dead.rank]
        newer = [client for client in of_rank if client.ordinal > dead.ordinal]
        # If an earlier process of the rank comes back, all later processes have as long again.
        came = [client.welcomed_at for client in of_rank] + [self.called.get(dead.rank)]
        if (newer or dead.rank in self.called) and self.world.now < SUCCESSION_WINDOW + max(
            moment for moment in came if moment is not None
        ):
            return True
        return any(self.lives(client) and dead.incarnation in self.lineage(client) for client in newer)

    def lives(self, client: Client) -> bool:
        """Whether it does as far as the coordinator knows."""
        process = self.world.coordinator.runs[RUN].roster.find(client.rank, client.incarnation)
        return process is not None and not process.state.gone

    def lineage(self, client: Client) -> set[str]:
        """The incarnations of its rank that are linked by groups which several of them joined."""
        joined = {
            one.incarnation: {
                prefix for prefix, membership in one.memberships.items() if membership.position is not None
            }
            for one in self.world.clients
            if self.is_of_same_rank(one, client)
        }
        groups = joined.pop(client.incarnation)
        linked = {client.incarnation}
        while more := {one for one, prefixes in joined.items() if prefixes & groups}:
            groups = groups.union(*(joined.pop(one) for one in more))
            linked |= more
        return linked

    @invariant()
    def no_successor_counts_as_dead(self) -> None:
        """A living process that took over a group from a dead one is waited for in all groups of the dead."""
        if RUN not in self.world.coordinator.runs:
            return
        run, resets = self.world.coordinator.runs[RUN], self.world.disk.resets
        self.successions = [one for one in self.successions if one.resets == resets[RUN, one.prefix]]
        if self.epoch != self.world.epoch:
            self.epoch = self.world.epoch
            self.successions = list(self.known_after_a_restart(run))
        for prefix, group in run.groups.items():
            for rank, owner in group.owners.items():
                count, process = resets[RUN, prefix], owner.process
                before, last = self.owned.get((prefix, rank), (count, process))
                if before == count and last.incarnation != process.incarnation:
                    self.successions.append(
                        Succession(prefix, count, rank, last.incarnation, process.incarnation)
                    )
                self.owned[prefix, rank] = count, process
        for group in run.groups.values():
            for rank, owner in group.owners.items():
                dead = owner.process
                if dead.state.gone and group.generation == run.generation:
                    successors = (
                        run.roster.find(rank, one) for one in self.successors(rank, dead.incarnation)
                    )
                    assert not any(
                        successor is not None and not successor.state.gone for successor in successors
                    ) or (not run.roster.is_gone(rank, dead))

    def known_after_a_restart(self, run: Run) -> Iterator[Succession]:
        """What a restarted coordinator knows of successions: those from processes that own a group.

        A process that lives, and owns no group, has no record. It counts as new when it says hello.
        """
        for group in run.groups.values():
            for rank, owner in group.owners.items():
                older = owner.process.incarnation
                links = {older, *self.successors(rank, older)}
                for one in self.successions:
                    if one.rank == rank and one.older in links:
                        yield replace(one, older=older)

    def successors(self, rank: int, incarnation: str) -> set[str]:
        """The processes that took over a group from this one, or from one of its successors."""
        found, looking = set[str](), {incarnation}
        while looking:
            one = looking.pop()
            found.add(one)
            looking |= {s.newer for s in self.successions if (s.rank, s.older) == (rank, one)} - found
        return found - {incarnation}

    @invariant()
    def each_relay_stream_speaks_for_its_clients_alone(self) -> None:
        """The end of one rank does not affect the other ranks of its relay."""
        sessions = self.world.coordinator.sessions
        for stream in self.relay_streams.values():
            assert not stream.refused
            assert not stream.unanswered
            if stream.session is not None:
                speaks = {r: p.incarnation for r, p in sessions.open[stream.session].processes.items()}
                assert speaks == {rank: client.incarnation for rank, client in stream.clients.items()}
        assert sessions.relayed == sum(len(s.processes) for s in sessions.open.values() if s.relay)

    @invariant()
    def who_is_connected_has_a_stream_and_who_is_not_is_waited_for_until_the_ttl(self) -> None:
        coordinator = self.world.coordinator
        for process in (p for run in coordinator.runs.values() for p in run.roster):
            assert (process.session is not None) == (process.state is MemberState.CONNECTED)
            if process.session is not None:
                session = coordinator.sessions.open[process.session]
                assert session.processes[process.rank] is process
                assert session.relay == process.relay
            if process.state is MemberState.DISCONNECTED:
                assert some(coordinator.next_deadline()) <= process.since + coordinator.session_ttl

    @invariant()
    def each_release_of_a_save_is_a_commit_and_each_failure_a_failed_save(self) -> None:
        if RUN not in self.world.coordinator.runs:
            return
        decided = self.world.disk.decided.get((RUN, SAVES), [])
        released = [one for one in decided if one.outcome is Outcome.RELEASED]
        history = self.world.coordinator.runs[RUN].checkpoints.history
        assert history.committed == len(released)
        if released:
            newest = some(history.newest)
            last = released[-1]
            assert (newest.sequence, newest.committed_at) == (last.sequence, last.decided_at)
            assert newest.step == 10 * last.sequence
        # Of a barrier whose arrivals were all withdrawn nobody has told anything.
        failed = {one.sequence: one for one in decided if one.outcome is not Outcome.RELEASED}
        sequences = [one.sequence for one in history.failures]
        assert sequences == sorted(set(sequences), reverse=True)
        assert len(sequences) <= MAX_FAILURES
        assert failed.keys() >= set(sequences)

    @invariant()
    def refusals_are_expected(self) -> None:
        for client in self.world.clients:
            while self.judged.setdefault(client, 0) < len(client.refusals):
                self.judge(client, client.refusals[self.judged[client]])
                self.judged[client] += 1

    def judge(self, client: Client, refused: Refused) -> None:
        """What a process that behaves may be refused for. It is never ahead, and nothing is forgotten."""
        match refused.refusal.reason:
            case Reason.STALE_GENERATION:
                assert client.generation < self.generation
            case Reason.EVICTED:
                assert client.rank in self.evicted
            case Reason.SESSION_REPLACED:
                assert client.broken_session is None or client.session is not None
            case Reason.SUPERSEDED | Reason.NOT_JOINED:
                assert self.was_superseded(client, refused.prefix)
            case Reason.SEQUENCE_BEHIND:
                # A reset of the group may forget the process that took its place. Then it goes on at the
                # sequence in the answer. Otherwise it must hear the release that it arrived at.
                assert self.was_superseded(client, refused.prefix) or any(
                    other.arrived_at(refused.prefix, some(refused.sequence))
                    for other in self.world.clients
                    if other is not client and self.is_of_same_rank(other, client)
                )
            case _:
                raise AssertionError(refused.refusal.message)

    def was_superseded(self, client: Client, prefix: str) -> bool:
        """Whether a newer process of its rank has taken part in a group."""
        return any(
            prefix in other.memberships and other.ordinal > client.ordinal
            for other in self.world.clients
            if self.is_of_same_rank(other, client)
        )

    @staticmethod
    def is_of_same_rank(one: Client, other: Client) -> bool:
        return (one.rank, one.generation) == (other.rank, other.generation)
