"""The rendezvous of one run: its nodes come together, round by round.

A round is complete at once when the most nodes are there, or a while (the last call) after the fewest are.
Who comes to a complete round waits, or stands by if the round is full. The nodes of the round learn that
someone waits, and begin the next round by joining again; it comes together when all have left the old one.

What is observed follows torch's dynamic rendezvous. What differs is said in docs/rendezvous.md.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from muster.service.core.elapsed import elapsed
from muster.service.core.timers import WakeUps
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import (
    NO_RANKS,
    Delivery,
    Effects,
    ForgetParticipant,
    ForgetRound,
    NodesWaiting,
    Notice,
    ParticipantRecord,
    Refused,
    RoundComplete,
    RoundRecord,
    Standing,
)
from muster.service.core.vocabulary.events import JoinRendezvous, SessionId
from muster.service.core.vocabulary.model import Closed, Instant, NodeInfo, NodeStanding, RendezvousSettings
from muster.service.core.vocabulary.refusal import Reason, Refusal

ROUND_HISTORY = 64
"""Completed rounds of a run that are kept for people to look at."""
MAX_DEPARTED = 64
"""Nodes that went, kept to be named."""
TIMED_OUT = "timed out"
"""Why a node went that got no round."""
WAITING_ANNOUNCE_INTERVAL = 1.0
"""Seconds between two tellings of how many nodes wait, so that a whole job that joins again does not tell
everyone about everyone; and in which those who time out count as one company."""


@dataclass(slots=True, eq=False)
class Node:
    """One life of one agent, and its place."""

    info: NodeInfo
    attempt: int
    settings: RendezvousSettings
    session: SessionId | None
    since: float
    """When its stream was opened or lost, on the monotonic clock."""
    joined_at: float
    """Since when it waits for a round: perhaps since before this coordinator began."""
    arrival: int
    """Its order among all joins."""
    standing: NodeStanding = NodeStanding.PARTICIPANT
    rank: int | None = None
    """In the complete round."""

    def __str__(self) -> str:
        return report.node_name(self.info)


@dataclass(frozen=True, slots=True)
class Departed:
    """A node that lost or gave up its place."""

    info: NodeInfo
    round: int
    reason: str
    at: float
    """On the monotonic clock."""


@dataclass(slots=True)
class _Places:
    """The nodes that have a place, by incarnation, in the order in which they took it."""

    participants: dict[str, Node] = field(default_factory=dict)
    waiting: dict[str, Node] = field(default_factory=dict)
    redundant: dict[str, Node] = field(default_factory=dict)

    def of(self, standing: NodeStanding) -> dict[str, Node]:
        match standing:
            case NodeStanding.PARTICIPANT:
                return self.participants
            case NodeStanding.WAITING:
                return self.waiting
            case NodeStanding.REDUNDANT:
                return self.redundant


class Rendezvous:
    """The nodes of one run, and the round that they are in or wait for.

    Args:
        run_id: the run.
        timers: where it asks to be woken.
    """

    def __init__(self, run_id: str, timers: "WakeUps[Rendezvous]") -> None:
        self.run_id = run_id
        self.round = 0
        """The round that is complete, or comes together."""
        self.complete = False
        self.settings: RendezvousSettings | None = None
        """What the nodes agree on; None before the first one."""
        self.rounds: deque[RoundRecord] = deque()
        """The last completed rounds, oldest first."""
        self.departed: deque[Departed] = deque(maxlen=MAX_DEPARTED)
        """The last nodes that went, newest first."""
        self._timers = timers
        self._places = _Places()
        self._ranks: dict[str, int] = {}
        """The ranks of the last completed round, by incarnation."""
        self._arrivals = 0
        self._min_round = 0
        """What the next round must be numbered at the least."""
        self._last_call: float | None = None
        """When a round with the fewest nodes is complete."""
        self._announced_waiting = 0
        self._announced_at = float("-inf")

    # ------------------------------------------------------------------ looking

    def __iter__(self) -> Iterator[Node]:
        yield from self._places.participants.values()
        yield from self._places.waiting.values()
        yield from self._places.redundant.values()

    def __len__(self) -> int:
        return sum(len(self._places.of(standing)) for standing in NodeStanding)

    def of(self, standing: NodeStanding) -> list[Node]:
        """The nodes that stand so, in order."""
        return list(self._places.of(standing).values())

    def count(self, standing: NodeStanding) -> int:
        """How many nodes stand so."""
        return len(self._places.of(standing))

    @property
    def without_round(self) -> int:
        """How many nodes wait to be told a round."""
        forming = 0 if self.complete else self.count(NodeStanding.PARTICIPANT)
        return forming + self.count(NodeStanding.WAITING)

    def find(self, incarnation: str) -> Node | None:
        """The node of this incarnation, if it has a place."""
        places = self._places
        return (
            places.participants.get(incarnation)
            or places.waiting.get(incarnation)
            or places.redundant.get(incarnation)
        )

    def holds_round(self, incarnation: str, attempt: int) -> bool:
        """Whether this attempt of the node has brought it into the complete round."""
        node = self._places.participants.get(incarnation)
        return self.complete and node is not None and node.attempt == attempt

    def message(self) -> str:
        """How it stands, for people."""
        if self.settings is None:
            return report.no_rendezvous(self.run_id)
        count = self.count(NodeStanding.PARTICIPANT)
        if self.complete:
            return report.round_runs(
                self.run_id,
                self.round,
                count,
                self.count(NodeStanding.WAITING),
                self.count(NodeStanding.REDUNDANT),
            )
        return report.round_forms(self.run_id, self.round, count, self.settings)

    # ------------------------------------------------------------------ what nodes do

    def raise_next_round(self, round: int) -> None:
        """Number the rounds that are not complete yet above this one."""
        self._min_round = round + 1
        if not self.complete:
            self.round = max(self.round, self._min_round)

    def join(self, ask: JoinRendezvous, now: Instant, effects: Effects) -> Node:
        """Give a node a place, or the one back that it has.

        Raises:
            Refusal: NODE_REMOVED, SETTINGS_DIFFER, or SUPERSEDED by a later join of the same node.
        """
        node = self.find(ask.node.incarnation)
        if node is not None and ask.attempt < node.attempt:
            raise Refusal(
                Reason.SUPERSEDED,
                f"attempt {ask.attempt} of node {node} to join run {self.run_id}: it has made attempt "
                f"{node.attempt} since. End the older one.",
            )
        if ask.round is not None and not (
            self.holds_round(ask.node.incarnation, ask.attempt) and ask.round == self.round
        ):
            raise self._removed(ask)
        if node is not None and ask.attempt == node.attempt:
            self._move_to(ask.session, node, now, effects)
            self._send_place(node, effects)
            if self.complete and node.standing is NodeStanding.PARTICIPANT:
                # The count may have changed while the stream was lost, to none perhaps.
                effects.send(ask.session, NodesWaiting(self._announced_waiting))
            self._advance(now, effects)
            return node
        self._check_settings(ask, node)
        if node is None:
            node = Node(ask.node, ask.attempt, ask.settings, ask.session, now.monotonic, 0.0, 0)
        else:
            self._vacate(node, effects)
            self._move_to(ask.session, node, now, effects)
            node.info, node.attempt = ask.node, ask.attempt
        if self._is_alone(node):
            self.settings = ask.settings
        self._arrivals += 1
        node.arrival = self._arrivals
        node.settings = ask.settings
        node.joined_at = now.monotonic - elapsed(ask.waited, ask.settings.join_timeout)
        self._place(node)
        self._send_place(node, effects)
        self._timers.arm(self, node.joined_at + ask.settings.join_timeout)
        self._advance(now, effects)
        return node

    def disconnect(self, node: Node, session: SessionId, now: Instant) -> None:
        """A node's stream broke; its place is kept for its keep-alive timeout."""
        if node.session == session and self.find(node.info.incarnation) is node:
            node.session = None
            node.since = now.monotonic
            self._timers.arm(self, now.monotonic + node.settings.keep_alive_timeout)

    def leave(self, incarnation: str, reason: str, now: Instant, effects: Effects) -> bool:
        """A node gives its place up. Returns whether it had one."""
        node = self.find(incarnation)
        if node is None:
            return False
        if node.session is not None:
            over = Refusal(
                Reason.NODE_REMOVED,
                f"node {node} has left run {self.run_id}; its place is given up. To come back, join anew.",
            )
            effects.send(node.session, Refused(over, final=True))
        self._depart(node, f"left ({report.shown(reason)})" if reason else "left", now, effects)
        self._advance(now, effects)
        return True

    def close(self, closed: Closed, now: Instant, effects: Effects) -> None:
        """The run is closed: every wait for a round ends; the complete round goes on to its end."""
        ended = self.of(NodeStanding.WAITING)
        if not self.complete:
            ended += self.of(NodeStanding.PARTICIPANT)
        for node in ended:
            self._refuse(node, run_closed(self.run_id, closed), effects)
        for node in self.of(NodeStanding.REDUNDANT):
            self._refuse(
                node,
                Refusal(
                    Reason.NODE_NOT_NEEDED,
                    f"{report.run_closed(self.run_id, closed)}, while node {node} stood by; it was not "
                    "needed.",
                ),
                effects,
            )
        self._last_call = None
        if self.complete:
            effects.deliveries.append(Delivery(dict.fromkeys(self._sessions(), NO_RANKS), closed))
        self._announce_waiting(now, effects)

    # ------------------------------------------------------------------ time

    def on_time(self, now: Instant, effects: Effects) -> None:
        """Remove the dead, end the last call, and end the waits that took too long."""
        for node in [n for n in self if n.session is None]:
            if now.monotonic >= node.since + node.settings.keep_alive_timeout:
                self._depart(node, "connection lost", now, effects, at=node.since)
        self._advance(now, effects)
        self._end_waits(now, effects)
        self._advance(now, effects)
        self._arm(now)

    def _end_waits(self, now: Instant, effects: Effects) -> None:
        """Refuse those whose join timeout is over. All are named to each of them."""
        late = [
            (node, self._timeout_report(node, now), self._nodes_gone(now))
            for node in self
            if self._waits(node) and now.monotonic >= node.joined_at + node.settings.join_timeout
        ]
        for node, line, gone in late:
            text = f"{line}{gone}\n  next: {report.command('get rounds', self.run_id)}"
            self._refuse(node, Refusal(Reason.RENDEZVOUS_TIMED_OUT, text), effects)
            self.departed.appendleft(Departed(node.info, self.round, TIMED_OUT, now.monotonic))
            effects.notices.append(Notice("rendezvous.timed_out", self.run_id, line))

    def _arm(self, now: Instant) -> None:
        times = [n.since + n.settings.keep_alive_timeout for n in self if n.session is None]
        times += [n.joined_at + n.settings.join_timeout for n in self if self._waits(n)]
        if self._last_call is not None and self._last_call > now.monotonic:
            times.append(self._last_call)
        if times:
            self._timers.arm(self, min(times))

    def _waits(self, node: Node) -> bool:
        """Whether its join timeout runs; who stands by does so without end, as in torch."""
        if node.standing is NodeStanding.PARTICIPANT:
            return not self.complete
        return node.standing is NodeStanding.WAITING

    # ------------------------------------------------------------------ places

    def _place(self, node: Node) -> None:
        """Give a place to a node that has none."""
        assert self.settings is not None
        node.rank = None
        if self.count(NodeStanding.PARTICIPANT) >= self.settings.max_nodes:
            node.standing = NodeStanding.REDUNDANT
        elif self.complete:
            node.standing = NodeStanding.WAITING
        else:
            node.standing = NodeStanding.PARTICIPANT
        self._places.of(node.standing)[node.info.incarnation] = node

    def _vacate(self, node: Node, effects: Effects) -> None:
        """Take a node's place away."""
        del self._places.of(node.standing)[node.info.incarnation]
        if self.complete and node.standing is NodeStanding.PARTICIPANT:
            effects.records.append(ForgetParticipant(self.run_id, node.info.incarnation))

    def _depart(
        self, node: Node, reason: str, now: Instant, effects: Effects, *, at: float | None = None
    ) -> None:
        self._vacate(node, effects)
        gone = Departed(node.info, self.round, reason, now.monotonic if at is None else at)
        self.departed.appendleft(gone)
        effects.notices.append(
            Notice("node.gone", self.run_id, f"node {node} of round {self.round}: {reason}")
        )

    def _refuse(self, node: Node, refusal: Refusal, effects: Effects) -> None:
        self._vacate(node, effects)
        if node.session is not None:
            effects.send(node.session, Refused(refusal, final=True))

    def _move_to(self, session: SessionId, node: Node, now: Instant, effects: Effects) -> None:
        """A node speaks on another stream than before."""
        if node.session is not None:
            over = Refusal(
                Reason.SESSION_REPLACED, f"node {node} has joined on another stream; this one is over."
            )
            effects.send(node.session, Refused(over, final=True))
        node.session = session
        node.since = now.monotonic

    def _send_place(self, node: Node, effects: Effects) -> None:
        if node.session is None:
            return
        if self.complete and node.standing is NodeStanding.PARTICIPANT:
            assert node.rank is not None
            size = self.rounds[-1].world_size
            effects.send(node.session, RoundComplete(self.round, node.rank, size))
        else:
            effects.send(node.session, Standing(node.standing, self.round, self.message()))

    # ------------------------------------------------------------------ rounds

    def _advance(self, now: Instant, effects: Effects) -> None:
        """Draw the consequences of whatever has changed."""
        if self.complete and not self.count(NodeStanding.PARTICIPANT):
            self._begin_round(now, effects)
        if self.complete:
            self._let_redundant_wait(now, effects)
        elif self.settings is not None:
            self._let_redundant_in(self.settings, now, effects)
            self._update_last_call(self.settings, now, effects)
        self._announce_waiting(now, effects)

    def _begin_round(self, now: Instant, effects: Effects) -> None:
        """The last node has left the round: those who wait make the next one, who was in it first."""
        self.complete = False
        self.round = max(self.round + 1, self._min_round)
        self._last_call = None
        self._announced_waiting = 0
        assert self.settings is not None
        comers = self.of(NodeStanding.WAITING) + self.of(NodeStanding.REDUNDANT)
        comers.sort(key=lambda node: (node.info.incarnation not in self._ranks, node.arrival))
        self._places = _Places()
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
        """A place in the round that comes together is free: who stands by takes it."""
        places = self._places
        while places.redundant and len(places.participants) < settings.max_nodes:
            node = places.redundant.pop(next(iter(places.redundant)))
            self._wait_from(now, node)
            self._place(node)
            self._send_place(node, effects)

    def _wait_from(self, now: Instant, node: Node) -> None:
        """Who stood by waits for a round: its join timeout begins."""
        node.joined_at = now.monotonic
        self._timers.arm(self, now.monotonic + node.settings.join_timeout)

    def _let_redundant_wait(self, now: Instant, effects: Effects) -> None:
        """A place in the complete round is free: who stood by waits to be let in."""
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
        """Complete the round if it is time, or begin or end its last call."""
        count = self.count(NodeStanding.PARTICIPANT)
        if count < settings.min_nodes:
            self._last_call = None
            return
        if self._last_call is None:
            self._last_call = now.monotonic + settings.last_call_timeout
            self._timers.arm(self, self._last_call)
        full = count >= settings.max_nodes
        if (full or now.monotonic >= self._last_call) and self._suits_every_node(count):
            self._complete_round(now, effects)

    def _suits_every_node(self, count: int) -> bool:
        """Whether a round of so many nodes is what every participant asked for, and none may be dead."""
        return all(
            node.session is not None and node.settings.min_nodes <= count <= node.settings.max_nodes
            for node in self._places.participants.values()
        )

    def _complete_round(self, now: Instant, effects: Effects) -> None:
        nodes = self.of(NodeStanding.PARTICIPANT)
        self._rank(nodes)
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
            assert node.rank is not None
            effects.records.append(
                ParticipantRecord(self.run_id, node.info, node.attempt, node.rank, node.settings)
            )
            self._send_place(node, effects)
        effects.notices.append(
            Notice(
                "round.completed",
                self.run_id,
                report.round_completed(self.run_id, self.round, [n.info for n in nodes], waited),
            )
        )

    def _rank(self, nodes: list[Node]) -> None:
        """Who stays keeps its rank where it can; the others follow by address, then arrival."""
        free = dict.fromkeys(range(len(nodes)))
        newcomers: list[Node] = []
        for node in nodes:
            before = self._ranks.get(node.info.incarnation)
            if before in free:
                del free[before]
                node.rank = before
            else:
                newcomers.append(node)
        newcomers.sort(key=lambda node: (natural(node.info.address), node.arrival))
        for node, rank in zip(newcomers, free, strict=True):
            node.rank = rank
        self._ranks = {node.info.incarnation: node.rank for node in nodes if node.rank is not None}

    def _announce_waiting(self, now: Instant, effects: Effects) -> None:
        """Tell the nodes of the complete round how many wait, if that has changed, and not too often."""
        if not self.complete:
            return
        count = self.count(NodeStanding.WAITING)
        if count == self._announced_waiting:
            return
        if now.monotonic < self._announced_at + WAITING_ANNOUNCE_INTERVAL:
            self._timers.arm(self, self._announced_at + WAITING_ANNOUNCE_INTERVAL)
            return
        self._announced_waiting = count
        self._announced_at = now.monotonic
        effects.deliveries.append(Delivery(dict.fromkeys(self._sessions(), NO_RANKS), NodesWaiting(count)))

    def _sessions(self) -> list[SessionId]:
        return [n.session for n in self._places.participants.values() if n.session is not None]

    # ------------------------------------------------------------------ refusals

    def _check_settings(self, ask: JoinRendezvous, own: Node | None) -> None:
        """All nodes must want the same; a node that is alone may want what it likes.

        A node that is away may come back within its keep-alive timeout, so it binds the others until then.
        """
        if self.settings is None or self._is_alone(own):
            return
        wanted = ask.settings.min_nodes, ask.settings.max_nodes
        agreed = self.settings.min_nodes, self.settings.max_nodes
        if wanted == agreed:
            return
        text = (
            f"node {report.node_name(ask.node)} asks for {report.nodes_wanted(ask.settings)}, and the "
            f"nodes of run {self.run_id} for {report.nodes_wanted(self.settings)}. Start every node with "
            "the same --nnodes."
        )
        if all(node.session is None for node in self if node is not own):
            most = max(node.settings.keep_alive_timeout for node in self if node is not own)
            text += (
                " The connections of these nodes are lost at present; their places are given up "
                f"{report.seconds(most)} after that, and then the node may join."
            )
        raise Refusal(Reason.SETTINGS_DIFFER, text)

    def _is_alone(self, own: Node | None) -> bool:
        """Whether no other node has a place."""
        return all(node is own for node in self)

    def _removed(self, ask: JoinRendezvous) -> Refusal:
        gone = next((one for one in self.departed if one.info.incarnation == ask.node.incarnation), None)
        why = f" ({gone.reason})" if gone is not None else ""
        return Refusal(
            Reason.NODE_REMOVED,
            f"node {report.node_name(ask.node)} is not in round {ask.round} of run {self.run_id} any "
            f"more{why}. End its workers, and join anew.",
        )

    def _timeout_report(self, node: Node, now: Instant) -> str:
        others = [n.info for n in self if n is not node and n.standing is node.standing]
        others += [one.info for one in self.departed if self._timed_out_together(one, now)]
        assert self.settings is not None
        return report.rendezvous_timed_out(
            self.run_id,
            self.round,
            node.settings.join_timeout,
            [node.info, *others],
            self.settings,
            running=self.count(NodeStanding.PARTICIPANT) if self.complete else None,
        )

    def _nodes_gone(self, now: Instant) -> str:
        return report.nodes_gone(
            [
                (one.info, one.round, one.reason, now.monotonic - one.at)
                for one in self.departed
                if not self._timed_out_together(one, now)
            ]
        )

    def _timed_out_together(self, gone: Departed, now: Instant) -> bool:
        """Whether a node's time was over so shortly ago that it counts as having joined with the others."""
        recent = now.monotonic - gone.at < WAITING_ANNOUNCE_INTERVAL
        return recent and (gone.round, gone.reason) == (self.round, TIMED_OUT)

    # ------------------------------------------------------------------ restoring

    def restore(
        self, rounds: Iterable[RoundRecord], participants: Iterable[ParticipantRecord], now: Instant
    ) -> None:
        """Take the durable state back: the last rounds, and who was in the complete one.

        Joins that wait are soft: their nodes ask again.
        """
        self.rounds.extend(sorted(rounds, key=lambda record: record.round))
        if not self.rounds:
            return
        self.round = self.rounds[-1].round
        for record in sorted(participants, key=lambda record: record.rank):
            self._arrivals += 1
            node = Node(
                record.node,
                record.attempt,
                record.settings,
                None,
                now.monotonic,
                now.monotonic,
                self._arrivals,
                rank=record.rank,
            )
            self._places.participants[record.node.incarnation] = node
            self._ranks[record.node.incarnation] = record.rank
            self.settings = record.settings
        self.complete = bool(self._places.participants)
        if not self.complete:
            self.round += 1

    def serve(self, now: Instant) -> None:
        """Every node of the round has its keep-alive timeout, counted from now, to come back."""
        for node in self:
            if node.session is None:
                node.since = now.monotonic
                self._timers.arm(self, now.monotonic + node.settings.keep_alive_timeout)


def run_closed(run_id: str, closed: Closed) -> Refusal:
    """The refusal for a newcomer to a closed run: invariant 13 (closing is final)."""
    return Refusal(
        Reason.RUN_CLOSED,
        f"{report.run_closed(run_id, closed)}. A closed run admits no newcomers: start the job under "
        "another run id.",
    )


def natural(address: str) -> list[tuple[int, int, str]]:
    """A key under which ``node-2`` and ``10.0.0.2`` come before ``node-10`` and ``10.0.0.10``."""
    parts = re.split(r"([0-9]+)", address)
    return [(0, int(part), "") if part.isdecimal() and part.isascii() else (1, 0, part) for part in parts]
