"""The rendezvous of one run: its nodes form one round after the other.

A round is complete as soon as ``max_nodes`` have joined, or ``last_call_timeout`` after ``min_nodes`` have. A
node that joins during a complete round waits, or stands by if the round is full. The coordinator tells the
nodes of the round how many nodes wait. They then join again, and the next round forms when all have left.
The behaviour follows torch's dynamic rendezvous; docs/rendezvous.md lists the differences.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from muster.service.core.elapsed import elapsed
from muster.service.core.membership.outage import Outages
from muster.service.core.rendezvous import refusals, reports
from muster.service.core.rendezvous.agreement import Agreement, nodes_that_disagree
from muster.service.core.rendezvous.evictions import Evictions
from muster.service.core.rendezvous.losses import Losses
from muster.service.core.rendezvous.nodes import TIMED_OUT, Departed, Node, Places, assign_ranks
from muster.service.core.timers import WakeUps
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import (
    NO_RANKS,
    Delivery,
    Effects,
    Message,
    NodesWaiting,
    Notice,
    Refused,
    RoundComplete,
    RoundStopped,
    Standing,
)
from muster.service.core.vocabulary.events import Disconnected, JoinRendezvous
from muster.service.core.vocabulary.model import Closed, Instant, NodeStanding, RendezvousSettings, Stopped
from muster.service.core.vocabulary.records import (
    ForgetParticipant,
    ForgetRound,
    ParticipantRecord,
    RoundRecord,
)
from muster.service.core.vocabulary.refusal import Reason, Refusal

ROUND_HISTORY = 64
"""Number of completed rounds that a run keeps for people."""
MAX_DEPARTED = 64
"""Number of departed nodes that a run keeps, so that reports can name them."""
ANNOUNCE_INTERVAL = 1.0
"""Seconds between two messages about how many nodes wait or have gone, so that a whole job causes few."""


class Rendezvous:
    """The nodes of one run, and the round that they are in or wait for.

    Args:
        run_id: the run.
        timers: wakes the rendezvous.
    """

    def __init__(self, run_id: str, timers: "WakeUps[Rendezvous]") -> None:
        self.run_id = run_id
        self.round = 0
        """The number of the round that is complete or forms."""
        self.complete = False
        self.settings: RendezvousSettings | None = None
        """The settings that the nodes agree on; None before the first node."""
        self.agreement = Agreement(run_id)
        self.rounds: deque[RoundRecord] = deque()
        """The last completed rounds, oldest first."""
        self.departed: deque[Departed] = deque(maxlen=MAX_DEPARTED)
        """The last departed nodes, newest first."""
        self._timers = timers
        self._places = Places()
        self._outages = Outages()
        self._ranks: dict[str, int] = {}
        """The ranks of the last completed round, by incarnation."""
        self._arrivals = 0
        self._min_round = 0
        """The lowest number that the next round may have."""
        self._last_call: float | None = None
        """When the last call ends, on the monotonic clock; None: fewer than ``min_nodes`` are there."""
        self.losses = Losses(run_id)
        self._announced = (0, 0)
        self._announced_at = float("-inf")
        self.stopped: Stopped | None = None
        """How the complete round was stopped."""
        self.evictions = Evictions()
        """The nodes that may never join again."""

    # ------------------------------------------------------------------ looking

    def __iter__(self) -> Iterator[Node]:
        yield from self._places

    def __len__(self) -> int:
        return len(self._places)

    def of(self, standing: NodeStanding) -> list[Node]:
        """Return the nodes with a standing, in order."""
        return list(self._places.of(standing).values())

    def count(self, standing: NodeStanding) -> int:
        """Return how many nodes have a standing."""
        return len(self._places.of(standing))

    @property
    def without_round(self) -> int:
        """How many nodes have no complete round yet, and do not stand by."""
        forming = 0 if self.complete else self.count(NodeStanding.PARTICIPANT)
        return forming + self.count(NodeStanding.WAITING)

    def find(self, incarnation: str) -> Node | None:
        """Return the node of this incarnation, if it has a place."""
        return self._places.find(incarnation)

    def holds_round(self, incarnation: str, attempt: int) -> bool:
        """Whether the node is in the complete round by this attempt."""
        node = self._places.participants.get(incarnation)
        return self.complete and node is not None and node.attempt == attempt

    def is_on_node(self, node_name: str) -> bool:
        """Whether an agent of the complete round is on a node."""
        participants = self._places.participants.values()
        return self.complete and any(node.info.node_name == node_name for node in participants)

    @property
    def restarts(self) -> bool:
        """Whether agents restart their workers, for waiting nodes, or without evicted ones.

        While a later round forms, only workers of the past round are left, and their agents end them.
        """
        if not self.complete:
            return len(self.rounds) > 0
        return self.stopped is None and (self._announced[0] > 0 or self.evictions.count(self.round) > 0)

    # ------------------------------------------------------------------ joining and leaving

    def raise_next_round(self, round: int) -> None:
        """Number all later rounds above ``round``."""
        self._min_round = round + 1
        if not self.complete:
            self.round = max(self.round, self._min_round)

    def join(self, ask: JoinRendezvous, now: Instant, effects: Effects) -> Node:
        """Give a node a place, or tell it the place that it already has.

        Raises:
            Refusal: NODE_EVICTED, NODE_REMOVED, SETTINGS_DIFFER, or SUPERSEDED by a later join.
        """
        if ask.node.incarnation in self.evictions:
            raise refusals.node_evicted(self.run_id, ask.node)
        node = self.find(ask.node.incarnation)
        if node is not None and ask.attempt < node.attempt:
            raise refusals.superseded(ask, node)
        if ask.round is not None and not (
            self.holds_round(ask.node.incarnation, ask.attempt) and ask.round == self.round
        ):
            departed = (one for one in self.departed if one.info.incarnation == ask.node.incarnation)
            raise refusals.not_in_round(ask, next(departed, None))
        if node is not None and ask.attempt == node.attempt:
            self._move_to(ask, node, now, effects)
            self._send_place(node, effects)
            if self.complete and node.standing is NodeStanding.PARTICIPANT:
                # The count may have changed while the stream was lost, even to 0.
                effects.send(ask.session, self._count_message(*self._announced))
            self._advance(now, effects)
            return node
        joined_at = now.monotonic - elapsed(ask.waited, ask.settings.join_timeout)
        others = [other for other in self if other is not node]
        for other in nodes_that_disagree(ask, joined_at, others, self.settings, complete=self.complete):
            self._refuse(other, refusals.settings_of_earlier(self.run_id, other, ask), effects)
            self._record_departure(other, "it asked for other settings", now.monotonic, effects)
            self._last_call = None
        is_alone = all(other is node for other in self)
        if is_alone:
            self.settings = ask.settings
        self.agreement.add(ask.settings, effects, is_alone=is_alone)
        if node is None:
            node = Node(ask.node, ask.attempt, ask.settings, ask.session, now.monotonic, 0.0, 0)
        else:
            self._vacate(node, effects)
            self._move_to(ask, node, now, effects)
            node.info, node.attempt = ask.node, ask.attempt
        self._arrivals += 1
        node.arrival, node.settings, node.joined_at = self._arrivals, ask.settings, joined_at
        self._place(node)
        self._send_place(node, effects)
        self._timers.arm(self, node.joined_at + ask.settings.join_timeout)
        self._advance(now, effects)
        return node

    def disconnect(self, node: Node, event: Disconnected, reset_grace: float, now: Instant) -> None:
        """Keep the place of a node whose stream broke, for its keep-alive timeout or the reset grace."""
        if node.session == event.session and self.find(node.info.incarnation) is node:
            grace, outage = reset_grace if event.reset else None, self._outages.at(now.monotonic)
            node.wait_back(grace, now.monotonic, outage)
            self._timers.arm(self, node.back_by)

    def leave(self, incarnation: str, reason: str, now: Instant, effects: Effects, *, over: bool) -> bool:
        """Give up a node's place; return whether it had one. Unless ``over``, its round has lost it."""
        node = self.find(incarnation)
        if node is None:
            return False
        why = f"left ({report.shown(reason)})" if reason else "left"
        self._refuse(node, refusals.left(self.run_id, node), effects, lost=self.stopped is None and not over)
        self._record_departure(node, why, now.monotonic, effects)
        self._advance(now, effects)
        return True

    def evict(self, nodes: Iterable[Node], why: str, now: Instant, effects: Effects) -> None:
        """Give up the places of nodes for good. The others of the complete round hear of it at once.

        Args:
            nodes: nodes that have a place.
            why: the requester and the reason, for people.
            now: the current time.
            effects: receives what follows.
        """
        for node in nodes:
            in_round = self.complete and node.standing is NodeStanding.PARTICIPANT
            self.evictions.add(node.info.incarnation, self.round if in_round else None)
            self._refuse(node, refusals.node_evicted(self.run_id, node.info, why), effects)
            self._record_departure(node, f"evicted {why}", now.monotonic, effects)
        self._announced_at = float("-inf")
        self._advance(now, effects)

    def close(self, closed: Closed, now: Instant, effects: Effects) -> None:
        """End every wait for a round, because the run was closed. The complete round continues."""
        forming = [] if self.complete else self.of(NodeStanding.PARTICIPANT)
        for node in self.of(NodeStanding.WAITING) + forming:
            self._refuse(node, refusals.run_closed(self.run_id, closed), effects)
        for node in self.of(NodeStanding.REDUNDANT):
            self._refuse(node, refusals.not_needed(self.run_id, closed, node), effects)
        self._last_call = None
        if self.complete:
            self._tell(closed, effects)
        self._announce(now, effects)

    def stop(self, stopped: Stopped, effects: Effects) -> None:
        """End the waits of nodes without a place, and tell the complete round that its run was stopped."""
        ended = self.of(NodeStanding.WAITING) + self.of(NodeStanding.REDUNDANT)
        if not self.complete:
            ended += [node for node in self.of(NodeStanding.PARTICIPANT) if node.attempt > 1]
        for node in ended:
            self._refuse(node, refusals.run_stopped(self.run_id, stopped), effects)
        if self.complete:
            self.stopped = stopped
            # The first departure is told at once.
            self._announced_at = float("-inf")
            self._tell_count(effects)

    # ------------------------------------------------------------------ time

    def on_time(self, now: Instant, effects: Effects) -> None:
        """Remove lost nodes, end the last call, and end waits after their join timeout."""
        self.agreement.end_binding(self, now, effects)
        for node in [n for n in self if n.session is None and now.monotonic >= n.back_by]:
            self._vacate(node, effects, lost=True)
            self._record_departure(node, "connection lost", node.since, effects)
        self._advance(now, effects)
        self._end_waits(now, effects)
        self._advance(now, effects)
        times = [self.agreement.binds_until, *(n.back_by for n in self if n.session is None)]
        times += [n.joined_at + n.settings.join_timeout for n in self if self._waits(n)]
        self._timers.arm(self, min(times))

    def _end_waits(self, now: Instant, effects: Effects) -> None:
        """Refuse the nodes whose join timeout is over. The refusal names all of them."""
        late = [
            (node, reports.timeout_report(self, node, now), reports.nodes_gone(self, now))
            for node in self
            if self._waits(node) and now.monotonic >= node.joined_at + node.settings.join_timeout
        ]
        for node, line, gone in late:
            text = f"{line}{gone}\n  next: {report.command('get rounds', self.run_id)}"
            self._refuse(node, Refusal(Reason.RENDEZVOUS_TIMED_OUT, text), effects)
            self.departed.appendleft(Departed(node.info, self.round, TIMED_OUT, now.monotonic))
            effects.notices.append(Notice("rendezvous.timed_out", self.run_id, line))

    def _waits(self, node: Node) -> bool:
        """Whether its join timeout runs. A node on standby has no timeout, as in torch."""
        forms = node.standing is NodeStanding.PARTICIPANT and not self.complete
        return forms or node.standing is NodeStanding.WAITING

    # ------------------------------------------------------------------ places

    def _place(self, node: Node) -> None:
        """Give a place to a node without one."""
        assert self.settings is not None
        node.rank = None
        if self.count(NodeStanding.PARTICIPANT) >= self.settings.max_nodes:
            node.standing = NodeStanding.REDUNDANT
        elif self.complete:
            node.standing = NodeStanding.WAITING
        else:
            node.standing = NodeStanding.PARTICIPANT
        self._places.of(node.standing)[node.info.incarnation] = node

    def _vacate(self, node: Node, effects: Effects, *, lost: bool = False) -> None:
        """Take a node's place away. If it is lost, the others of its round are to hear of it."""
        del self._places.of(node.standing)[node.info.incarnation]
        if self.complete and node.standing is NodeStanding.PARTICIPANT:
            if lost:
                self.losses.add(node.record(self.run_id, lost=True), effects)
            else:
                effects.records.append(ForgetParticipant(self.run_id, node.info.incarnation))

    def _record_departure(self, node: Node, reason: str, at: float, effects: Effects) -> None:
        self.departed.appendleft(Departed(node.info, self.round, reason, at))
        effects.notices.append(
            Notice("node.gone", self.run_id, f"node {node} of round {self.round}: {reason}")
        )

    def _refuse(self, node: Node, refusal: Refusal, effects: Effects, *, lost: bool = False) -> None:
        self._vacate(node, effects, lost=lost)
        if node.session is not None:
            effects.send(node.session, Refused(refusal, final=True))

    def _move_to(self, ask: JoinRendezvous, node: Node, now: Instant, effects: Effects) -> None:
        """Move a node to a new stream, and end the one before."""
        if node.session is not None:
            effects.send(node.session, Refused(refusals.replaced(node), final=True))
        node.connect(ask.session, now.monotonic)

    def _send_place(self, node: Node, effects: Effects) -> None:
        if node.session is None:
            return
        if self.complete and node.standing is NodeStanding.PARTICIPANT:
            assert node.rank is not None
            size = self.rounds[-1].world_size
            effects.send(node.session, RoundComplete(self.round, node.rank, size))
        else:
            effects.send(node.session, Standing(node.standing, self.round, reports.state(self)))

    # ------------------------------------------------------------------ rounds

    def _advance(self, now: Instant, effects: Effects) -> None:
        """Advance the rendezvous as far as the current places allow."""
        self.agreement.end_without(self, effects)
        if self.complete and not self.count(NodeStanding.PARTICIPANT):
            self._begin_round(now, effects)
        if self.complete:
            self._let_redundant_wait(now, effects)
        elif self.settings is not None:
            self._let_redundant_in(self.settings, now, effects)
            self._update_last_call(self.settings, now, effects)
        self._announce(now, effects)

    def _begin_round(self, now: Instant, effects: Effects) -> None:
        """Form the next round after the last node left: first its nodes, then the others by join."""
        self.complete = False
        self.stopped = None
        self.round = max(self.round + 1, self._min_round)
        self._last_call = None
        self.losses.end_round(effects)
        self._announced = (0, 0)
        assert self.settings is not None
        comers = self.of(NodeStanding.WAITING) + self.of(NodeStanding.REDUNDANT)
        comers.sort(key=lambda node: (node.info.incarnation not in self._ranks, node.arrival))
        self._places = Places()
        for index, node in enumerate(comers):
            before = node.standing
            fits = index < self.settings.max_nodes
            node.standing = NodeStanding.PARTICIPANT if fits else NodeStanding.REDUNDANT
            self._places.of(node.standing)[node.info.incarnation] = node
            if node.standing is not before:
                if fits and before is NodeStanding.REDUNDANT:
                    self._wait_from(now, node)
                self._send_place(node, effects)

    def _let_redundant_in(self, settings: RendezvousSettings, now: Instant, effects: Effects) -> None:
        """Give free places of the forming round to nodes on standby."""
        places = self._places
        while places.redundant and len(places.participants) < settings.max_nodes:
            node = places.redundant.pop(next(iter(places.redundant)))
            self._wait_from(now, node)
            self._place(node)
            self._send_place(node, effects)

    def _wait_from(self, now: Instant, node: Node) -> None:
        """Start the join timeout of a node that stood by."""
        node.joined_at = now.monotonic
        self._timers.arm(self, now.monotonic + node.settings.join_timeout)

    def _let_redundant_wait(self, now: Instant, effects: Effects) -> None:
        """Let nodes on standby wait for the next round if the complete round has a free place."""
        assert self.settings is not None
        places = self._places
        if not places.redundant or len(places.participants) >= self.settings.max_nodes:
            return
        for node in places.redundant.values():
            node.standing = NodeStanding.WAITING
            self._wait_from(now, node)
            self._send_place(node, effects)
        places.waiting.update(places.redundant)
        places.redundant.clear()

    def _update_last_call(self, settings: RendezvousSettings, now: Instant, effects: Effects) -> None:
        """Complete the round if it is due, or start or cancel its last call."""
        count = self.count(NodeStanding.PARTICIPANT)
        if count < settings.min_nodes:
            self._last_call = None
            return
        if self._last_call is None:
            self._last_call = now.monotonic + settings.last_call_timeout
        due = now.monotonic if count >= settings.max_nodes else self._last_call
        due = max(due, self.agreement.earliest(settings))
        if now.monotonic < due:
            self._timers.arm(self, due)
        elif self._places.accept_round():
            self._complete_round(now, effects)

    def _complete_round(self, now: Instant, effects: Effects) -> None:
        nodes = self.of(NodeStanding.PARTICIPANT)
        assign_ranks(nodes, self._ranks)
        self._ranks = {node.info.incarnation: node.rank for node in nodes if node.rank is not None}
        self.complete = True
        self._last_call = None
        waited = now.monotonic - min(node.joined_at for node in nodes)
        record = RoundRecord(self.run_id, self.round, len(nodes), now.wall, waited)
        self.rounds.append(record)
        effects.records.append(record)
        effects.rounds.append(record)
        if len(self.rounds) > ROUND_HISTORY:
            effects.records.append(ForgetRound(self.run_id, self.rounds.popleft().round))
        for node in nodes:
            effects.records.append(node.record(self.run_id))
            self._send_place(node, effects)
        text = report.round_completed(self.run_id, self.round, [n.info for n in nodes], waited)
        effects.notices.append(Notice("round.completed", self.run_id, text))

    def _announce(self, now: Instant, effects: Effects) -> None:
        """Tell the nodes of the complete round how many nodes wait and are lost, if that changed.

        Nodes that wait must not interrupt a stopped round, which ends by itself. It hears how many have gone.
        """
        if not self.complete or self._count == self._announced:
            return
        if now.monotonic < self._announced_at + ANNOUNCE_INTERVAL:
            self._timers.arm(self, self._announced_at + ANNOUNCE_INTERVAL)
            return
        self._announced_at = now.monotonic
        self._tell_count(effects)
        self.losses.tell(self._announced[1], now.monotonic)

    @property
    def _count(self) -> tuple[int, int]:
        """How many nodes wait for the next round or were evicted, and how many are lost.

        Losses count if the next round can form without the lost nodes. Else the round ends when others come.
        In a stopped round: how many nodes have gone, and 0.
        """
        places, agreed = self._places, self.settings
        if self.stopped is not None:
            return self.rounds[-1].world_size - len(places.participants), 0
        enough = agreed is not None and len(places.participants) + len(places.waiting) >= agreed.min_nodes
        waiting = len(places.waiting) + self.evictions.count(self.round)
        return waiting, len(self.losses) if enough else 0

    def _tell_count(self, effects: Effects) -> None:
        self._announced = self._count
        self._tell(self._count_message(*self._announced), effects)

    def _count_message(self, count: int, lost: int) -> NodesWaiting | RoundStopped:
        return NodesWaiting(count, lost) if self.stopped is None else RoundStopped(self.stopped, count)

    def _tell(self, message: Message, effects: Effects) -> None:
        audience = {n.session: NO_RANKS for n in self._places.participants.values() if n.session is not None}
        effects.deliveries.append(Delivery(audience, message))

    # ------------------------------------------------------------------ restoring

    def restore(
        self, rounds: Iterable[RoundRecord], participants: Iterable[ParticipantRecord], now: Instant
    ) -> None:
        """Restore the last rounds, and the nodes of the complete one. Waiting nodes join again."""
        self.rounds.extend(sorted(rounds, key=lambda record: record.round))
        if not self.rounds:
            return
        self.round = self.rounds[-1].round
        for record in sorted(participants, key=lambda record: record.rank):
            if record.lost:
                self.losses.restore(record)
                continue
            self._arrivals += 1
            asked, at = (record.node, record.attempt, record.settings), now.monotonic
            restored = Node(*asked, None, at, at, self._arrivals, rank=record.rank)
            self._places.participants[record.node.incarnation] = restored
            self._ranks[record.node.incarnation] = record.rank
            self.settings = record.settings
        self.complete = bool(self._places.participants)
        if not self.complete:
            self.round += 1

    def serve(self, now: Instant) -> None:
        """Give every node its keep-alive timeout, from now, to come back."""
        self.agreement.serve(now)
        self._timers.arm(self, self.agreement.binds_until)
        for node in [n for n in self if n.session is None]:
            node.wait_back(None, now.monotonic, self._outages.at(now.monotonic))
            self._timers.arm(self, node.back_by)
