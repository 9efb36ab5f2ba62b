"""A run: one training job, its processes, its groups, and the rendezvous of its nodes."""

import math

from muster.service.core.barriers.checkpoints import Checkpoints
from muster.service.core.barriers.group import Group
from muster.service.core.barriers.payload_total import PayloadTotal
from muster.service.core.local.tier import LocalTier
from muster.service.core.membership import refusals
from muster.service.core.membership.process import SUCCESSION_WINDOW, VERBS, Process, audience
from muster.service.core.membership.roster import Roster
from muster.service.core.rendezvous.nodes import Node
from muster.service.core.rendezvous.refusals import run_closed
from muster.service.core.rendezvous.rendezvous import Rendezvous
from muster.service.core.saves.saving import Saving
from muster.service.core.saves.stopping import Stopping
from muster.service.core.store import Store, Waiter
from muster.service.core.timers import Timers
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Delivery, Effects, Notice, Refused
from muster.service.core.vocabulary.events import (
    ArriveOnce,
    CloseRun,
    JoinRendezvous,
    ProcessInfo,
)
from muster.service.core.vocabulary.limits import ByteTotal, Limits
from muster.service.core.vocabulary.model import Closed, Decision, Instant, MemberState, SessionId, Shape
from muster.service.core.vocabulary.records import EvictionRecord, RunRecord
from muster.service.core.vocabulary.refusal import limit_exceeded


class Run:
    """The state of one run.

    Args:
        run_id: its id.
        limits: the coordinator's bounds.
        timers: wakes its groups, processes, rendezvous and store.
        generation: its newest generation.
        active: when it was last used.
        stored: bytes in the stores of all runs.
        gathered: payload bytes of all groups of all runs.
    """

    def __init__(
        self,
        run_id: str,
        limits: Limits,
        timers: Timers[Group | Process | Rendezvous | Saving | Waiter | LocalTier],
        generation: int,
        active: Instant,
        stored: ByteTotal,
        gathered: PayloadTotal,
    ) -> None:
        self.run_id = run_id
        self.last_used = active
        """When it was last used: a call, a connection, or the end of one."""
        self.recorded_use: Instant | None = None
        """The last use that is on disk."""
        self.roster = Roster(generation)
        self.groups: dict[str, Group] = {}
        self.rendezvous = Rendezvous(run_id, timers)
        self.closed: Closed | None = None
        """How it was closed, for good."""
        self.stopping = Stopping(run_id, self.roster, self.rendezvous)
        self.saving = Saving(run_id, self.groups, self.roster, timers)
        self.checkpoints = Checkpoints(run_id)
        self.local = LocalTier(run_id, timers)
        self.evictions: dict[int, EvictionRecord] = {}
        """By rank. An eviction of an older generation no longer counts."""
        self.store = Store(run_id, limits, timers, stored)
        self._limits = limits
        self._timers = timers
        self._gathered = gathered

    @property
    def generation(self) -> int:
        """The newest generation that said hello."""
        return self.roster.generation

    def restore(self, record: RunRecord) -> None:
        """Restore how the run ended, if it did."""
        self.closed = record.closed
        self.stopping.stored = record.stopped
        self.rendezvous.evictions.restore(record.evicted_nodes)

    def write_record(self, now: Instant, effects: Effects) -> None:
        """Make the run's own record durable; this counts as a use."""
        self.last_used = self.recorded_use = now
        stopped, evicted = self.stopping.stopped, self.rendezvous.evictions.nodes
        effects.records.append(
            RunRecord(self.run_id, self.generation, self.closed, now.wall, stopped, evicted)
        )

    def is_on_node(self, node_name: str) -> bool:
        """Whether a living process is on a node, or an agent of the complete round.

        A node that waits or stands by trains nothing. A round that forms may complete without its nodes.
        While agents restart their workers, these do not count: those of an evicted node live on for some
        seconds, and a request that they lead to would be one of the next round, which is not on that node.

        Args:
            node_name: the name of the node as the scheduler knows it.
        """
        if self.rendezvous.restarts and len(self.rendezvous):
            return self.rendezvous.is_on_node(node_name)
        return self.roster.is_on_node(node_name) or self.rendezvous.is_on_node(node_name)

    @property
    def in_use(self) -> bool:
        """Whether a process is connected or may come back, or a node, call or barrier waits."""
        return bool(
            len(self.rendezvous)
            or self.store.waiters
            or self.local.in_use
            or not self.roster.deserted
            or any(group.open is not None and group.open.arrivals for group in self.groups.values())
        )

    def end(self) -> None:
        """Cancel all timers and free all bytes, because the run was removed."""
        self.store.end()
        self._timers.disarm(self.rendezvous)
        self._timers.disarm(self.saving)
        self.local.end()
        for group in self.groups.values():
            group.end()
        for process in self.roster:
            self._timers.disarm(process)

    # ------------------------------------------------------------------ generations

    def admit_generation(self, generation: int, now: Instant, effects: Effects) -> None:
        """Admit a generation: refuse an older one; a newer one ends all open barriers."""
        if generation < self.generation:
            raise refusals.stale_generation(self.run_id, generation, self.generation)
        if generation == self.generation:
            return
        for group in self.groups.values():
            group.abort(report.superseded(generation), now, effects)
        effects.notices.append(
            Notice(
                "generation.advanced",
                self.run_id,
                f"generation {generation} takes over from generation {self.generation}",
            )
        )
        self.roster.clear()
        self.roster.generation = generation
        self.saving.renew(generation - 1, now, effects)
        self.write_record(now, effects)

    def _restart_if_deserted(self, newcomer: ProcessInfo, now: Instant, effects: Effects) -> None:
        """Reset all groups if no process is left, by invariant 8 (disagreement fails every rank).

        The job was restarted under its old name if the newcomer's rank had a process before, or if the whole
        world had. The coordinator then forgets the old processes. Otherwise the newcomer may belong to the
        same job and come late. If it was already running when an old process was last seen, that process
        counts as gone. If it started later, either is possible: the old processes stay known, and barriers
        wait for their ranks.
        """
        if not self._is_deserted:
            return
        name = report.process_name(newcomer.rank, newcomer.host, newcomer.pid)
        for group in self.groups.values():
            group.abort(report.abandoned(name), now, effects)
        if self.roster.of_rank(newcomer.rank) or self._was_complete:
            self.roster.clear()
        else:
            # A process with an ordinal was welcomed before a restart of the coordinator.
            self.roster.mark_past(None if newcomer.ordinal else now.monotonic - newcomer.age)
        for group in self.groups.values():
            group.reset_membership(effects)
        self.saving.renew(self.generation, now, effects)

    @property
    def _was_complete(self) -> bool:
        """Whether every rank of the largest known world had a process."""
        owners = (
            owner
            for group in self.groups.values()
            if group.generation == self.generation
            for owner in group.owners.values()
        )
        return len(self.roster) >= max((s.shape.world_size for s in owners), default=math.inf)

    @property
    def _is_deserted(self) -> bool:
        """Whether the run had processes, and none is living."""
        return len(self.roster) > 0 and self.roster.deserted

    # ------------------------------------------------------------------ processes

    def add_process(
        self,
        info: ProcessInfo,
        ordinal: int,
        session: SessionId,
        unary: bool,
        now: Instant,
        effects: Effects,
        relay: str = "",
    ) -> Process:
        """Add a process that says hello, or connect a known one again."""
        process = self.roster.find(info.rank, info.incarnation)
        if process is None:
            self._restart_if_deserted(info, now, effects)
            if self.stopping.start_again():
                self.write_record(now, effects)
            successor_until = now.monotonic + SUCCESSION_WINDOW if self.roster.of_rank(info.rank) else None
            process = Process(
                run_id=self.run_id,
                rank=info.rank,
                incarnation=info.incarnation,
                ordinal=ordinal,
                host=info.host,
                pid=info.pid,
                node_name=info.node_name or info.host,
                generation=self.generation,
                unary=unary,
                session=session,
                state=MemberState.CONNECTED,
                since=now.monotonic,
                last_seen=now.monotonic,
                lineage=ordinal,
                relay=relay,
                node_rank=info.node_rank,
            )
            self.roster.add(process)
            if successor_until is not None:
                # If an older process comes back, the newer ones of its rank may take over from it.
                for successor in self.roster.of_rank(info.rank):
                    if successor.ordinal >= ordinal:
                        successor.successor_until = successor_until
                        self._timers.arm(successor, successor_until)
            self._refresh(process)
        else:
            was_gone = not process.state.living
            process.connect(session, now.monotonic, relay)
            if was_gone:
                self._record_state_change(process, effects)
        return process

    def check_room(self, generation: int, info: ProcessInfo) -> None:
        """Refuse a new process if its rank has too many living ones.

        Raises:
            Refusal: LIMIT_EXCEEDED.
        """
        if generation > self.generation or self.roster.find(info.rank, info.incarnation):
            return
        # A unary call that has ended does not count.
        living = sum(
            process.state.living and not (process.unary and process.session is None)
            for process in self.roster.of_rank(info.rank)
        )
        if living >= self._limits.max_processes_per_rank:
            raise limit_exceeded(
                "max_processes_per_rank",
                self._limits.max_processes_per_rank,
                f"{living} living processes speak for rank {info.rank} of run {self.run_id} already",
            )

    def check_newcomer(self, generation: int, info: ProcessInfo) -> None:
        """Refuse a process that was evicted, or that is new to a closed run.

        A closed run still admits the workers of its complete round, and new processes of ranks that have a
        living one. Invariant 13 (closing is final) lets barriers go on: a last save may need a new process.

        Raises:
            Refusal: EVICTED or RUN_CLOSED.
        """
        if generation < self.generation:
            return
        known = self.roster.find(info.rank, info.incarnation) if generation == self.generation else None
        eviction = self.evictions.get(info.rank)
        if eviction is not None and eviction.generation == generation:
            ordinal = known.ordinal if known is not None else info.ordinal
            if 0 < ordinal <= eviction.ordinal:
                raise refusals.evicted(self.run_id, self.generation, info)
        if self.closed is None or known is not None:
            return
        if self.rendezvous.complete and generation == self.rendezvous.round:
            # A worker of the last round, so that its last checkpoint may commit.
            return
        if generation > self.generation or not (
            info.ordinal or any(process.state.living for process in self.roster.of_rank(info.rank))
        ):
            raise run_closed(self.run_id, self.closed)

    def is_current(self, process: Process) -> bool:
        """Whether the process is in the roster of the newest generation."""
        return self.roster.find(process.rank, process.incarnation) is process

    def mark_gone(self, process: Process, effects: Effects, reason: str = "") -> None:
        """Record that a process left or was lost. The caller checks the barriers afterwards."""
        self._record_state_change(process, effects)
        why = f": {report.shown(reason)}" if reason else ""
        effects.notices.append(Notice("member.gone", self.run_id, f"{process} {VERBS[process.state]}{why}"))

    def end_heir(self, process: Process) -> None:
        """End the succession window of a process. The caller checks the barriers afterwards."""
        process.successor_until = None
        self._refresh(process)

    def fail_barriers_of_gone_ranks(self, now: Instant, effects: Effects) -> None:
        """Fail every open barrier that needs a rank without living processes."""
        for group in self.groups.values():
            group.fail_if_rank_gone(now, effects)

    def _refresh(self, process: Process) -> None:
        self.roster.refresh(process)
        for group in self.groups.values():
            group.refresh(process.rank)

    def _record_state_change(self, process: Process, effects: Effects) -> None:
        self._refresh(process)
        for prefix in process.prefixes:
            self.groups[prefix].record_state_change(process.rank, effects)

    # ------------------------------------------------------------------ nodes, closing and eviction

    def join_rendezvous(self, ask: JoinRendezvous, now: Instant, effects: Effects) -> Node:
        """Give a node a place in a round, or tell it the place that it already has.

        Raises:
            Refusal: RUN_CLOSED, or as :meth:`Rendezvous.join`.
        """
        if self.groups or self.generation:
            # The workers use the round as their generation, so its number must be new.
            self.rendezvous.raise_next_round(self.generation)
        if self.closed and not self.rendezvous.holds_round(ask.node.incarnation, ask.attempt):
            raise run_closed(self.run_id, self.closed)
        self.stopping.refuse_old_agent(ask, now, effects)
        node = self.rendezvous.join(ask, now, effects)
        if self.closed:
            effects.send(ask.session, self.closed)
        return node

    def close(self, event: CloseRun, now: Instant, effects: Effects) -> bool:
        """Close the run, by invariant 13 (closing is final); the first call counts.

        A stopped run is closed only if the event says so.

        Returns:
            Whether it had been closed before.
        """
        was_closed = self.closed is not None
        if not event.even_if_stopped and self.stopping.stopped is not None:
            return was_closed
        if self.closed is None:
            self.closed = Closed(event.by, event.reason, now.wall)
            self.stopping.stored = None
            self.write_record(now, effects)
            effects.deliveries.append(Delivery(audience(self.roster), self.closed))
            self.rendezvous.close(self.closed, now, effects)
            effects.notices.append(
                Notice("run.closed", self.run_id, report.run_closed(self.run_id, self.closed))
            )
        if event.abort_barriers:
            for group in self.groups.values():
                group.abort(report.run_closed(self.run_id, self.closed), now, effects)
        return was_closed

    def apply_save_decision(self, now: Instant, effects: Effects) -> None:
        """Apply a decision of the group in which ranks agree on saves. It may stop an open run."""
        if (save := self.saving.apply_decision(now, effects)) is not None and self.closed is None:
            self.stopping.stop(save, now, effects)
            self.write_record(now, effects)

    def evict(self, rank: int, reason: str, now: Instant, effects: Effects) -> None:
        """Evict the processes of a rank, and fail the barriers that need them.

        Raises:
            Refusal: MEMBER_NOT_FOUND: the rank has no such process.
        """
        processes = self.find_evictable(rank)
        newest = max(process.ordinal for process in processes)
        eviction = self.evictions[rank] = EvictionRecord(self.run_id, rank, self.generation, newest)
        effects.records.append(eviction)
        for process in processes:
            if process.session is not None:
                info = ProcessInfo(rank, process.incarnation, process.host, process.pid)
                over = not process.relay and self._speaks_alone(process)
                effects.send(
                    process.session,
                    Refused(refusals.evicted(self.run_id, self.generation, info), rank=rank, final=over),
                )
            process.evict(now.monotonic)
            self.mark_gone(process, effects, reason)
        self.fail_barriers_of_gone_ranks(now, effects)

    def _speaks_alone(self, process: Process) -> bool:
        """Whether the process is the only one on its stream."""
        return not any(p is not process and p.session == process.session for p in self.roster)

    def find_evictable(self, rank: int) -> list[Process]:
        """Return the processes that :meth:`evict` would evict.

        Raises:
            Refusal: MEMBER_NOT_FOUND: the rank has no such process.
        """
        processes = [process for process in self.roster.of_rank(rank) if not process.state.gone]
        if not processes:
            raise refusals.member_not_found(self.run_id, rank, self.roster)
        return processes

    # ------------------------------------------------------------------ groups

    def join(self, process: Process, prefix: str, shape: Shape, now: Instant, effects: Effects) -> int:
        """Let a process join a group, and create the group if needed.

        Returns:
            The first sequence that it may arrive at.

        Raises:
            Refusal: as :meth:`Group.check_join`; or LIMIT_EXCEEDED.
        """
        group = self.groups.get(prefix) or self._check_new_group(prefix)
        group.check_join(process, shape)
        if prefix not in self.groups:
            self.groups[prefix] = group
            effects.records.append(group.record)
        lineage = group.lineage(process.rank)
        if lineage is not None and lineage != process.lineage:
            older, newer = sorted((lineage, process.lineage))
            self._merge_lineages(process.rank, older, newer, effects)
        return group.join(process, shape, now, effects)

    def _merge_lineages(self, rank: int, older: int, newer: int, effects: Effects) -> None:
        """Merge two lineages of a rank, because a process of one took over a group from the other."""
        for process in self.roster.of_rank(rank):
            if process.lineage == newer:
                process.lineage = older
                self._record_state_change(process, effects)

    def check_unary_arrival(self, call: ArriveOnce, shape: Shape) -> Decision | None:
        """Refuse a unary call before it changes anything, as its hello, join and arrival would be.

        Returns:
            As :meth:`Group.check_unary_arrival`.

        Raises:
            Refusal: as :meth:`admit_generation`, :meth:`join` and :meth:`Group.arrive`.
        """
        if call.generation < self.generation:
            raise refusals.stale_generation(self.run_id, call.generation, self.generation)
        group = self.groups.get(call.prefix) or self._check_new_group(call.prefix)
        info = call.process
        known = self.roster.find(info.rank, info.incarnation)
        if call.generation > self.generation:
            known = None
        resets = call.generation > self.generation or (known is None and self._is_deserted)
        name = report.process_name(info.rank, info.host, info.pid)
        incarnation = info.incarnation if call.generation == self.generation == group.generation else ""
        return group.check_unary_arrival(
            known, incarnation, name, shape, call.sequence, call.arrival, resets=resets
        )

    def find_group(self, prefix: str) -> Group:
        """Return the group of this prefix.

        Raises:
            Refusal: BARRIER_NOT_FOUND.
        """
        if prefix not in self.groups:
            raise refusals.group_not_found(self.run_id, prefix, self.groups)
        return self.groups[prefix]

    def restore_group(self, prefix: str, generation: int, first_sequence: int) -> Group:
        """Restore a group."""
        group = self.groups[prefix] = self._new_group(prefix, generation, first_sequence)
        return group

    def _check_new_group(self, prefix: str) -> Group:
        """Create a group, if the run may have one more. The caller registers it."""
        if len(self.groups) >= self._limits.max_groups_per_run:
            raise limit_exceeded(
                "max_groups_per_run",
                self._limits.max_groups_per_run,
                f'run {self.run_id} has {len(self.groups)} groups and "{prefix}" would be one more',
            )
        return self._new_group(prefix, self.generation, 0)

    def _new_group(self, prefix: str, generation: int, first_sequence: int) -> Group:
        return Group(
            self.run_id,
            prefix,
            roster=self.roster,
            limits=self._limits,
            timers=self._timers,
            checkpoints=self.checkpoints,
            gathered=self._gathered,
            generation=generation,
            first_sequence=first_sequence,
        )
