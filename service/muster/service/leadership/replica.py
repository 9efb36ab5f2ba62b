"""One replica: it enters itself in the list, follows the leader, and leads when no other replica does."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import structlog

from muster.service.etcd.client import Etcd
from muster.service.etcd.errors import LeaseGoneError, UnreachableError
from muster.service.leadership.election import Lead, NameTakenError, announce, campaign, enlist
from muster.service.leadership.lease import Lease
from muster.service.leadership.members import Members
from muster.service.waiting import first
from muster.v1 import state_pb2

T = TypeVar("T")

PAUSE = 0.5
"""Seconds until the next attempt after a failed one."""


class LeadLost(Exception):
    """This replica may no longer lead, because its lease may be over."""


class Replica:
    """This replica in its cluster, on one event loop.

    Args:
        etcd: the client.
        prefix: the keys of the installation begin so.
        record: the entry of this replica.
        ttl: seconds of its lease.
    """

    def __init__(self, etcd: Etcd, prefix: bytes, record: state_pb2.ReplicaRecord, ttl: int) -> None:
        self.record = record
        self.lead: Lead | None = None
        self._etcd = etcd
        self._prefix = prefix
        self.ttl = ttl
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._lease: Lease | None = None
        self.lost: asyncio.Future[None] = self._loop.create_future()
        """Ends with :class:`LeadLost` when this replica led and may no longer lead."""
        self._lease_lost = asyncio.Event()
        self.trouble = ""
        """Why this replica cannot take part in the election at present; empty if it does."""
        self.members = Members(etcd, prefix, self._notify_threadsafe)

    # ------------------------------------------------------------------ following

    @property
    def news(self) -> asyncio.Event:
        """Set at the next change of the leader, the replicas or the connection to etcd; then replaced."""
        return self._news

    def _notify_threadsafe(self) -> None:
        with suppress(RuntimeError):  # The loop has ended, so nothing waits for news.
            self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def leader_elsewhere(self) -> str:
        """Return the address of the leader that answers calls; empty: there is no leader but this replica."""
        leader = self.members.leader
        return "" if leader is None or leader.address == self.record.address else leader.address

    def addresses(self) -> list[str]:
        """Return the addresses of all replicas."""
        return [record.address for record in self.members.replicas]

    @property
    def leads(self) -> bool:
        """Whether this replica certainly leads at this moment."""
        return self.lead is not None and self.lead.certain

    @property
    def leader(self) -> state_pb2.ReplicaRecord | None:
        """The leader that answers calls; None: no leader does."""
        return self.members.leader

    @property
    def lease_age(self) -> float:
        """Seconds since the last renewal of its lease; 0: it has no lease."""
        return 0.0 if self._lease is None else self._lease.validity.age

    # ------------------------------------------------------------------ leading

    async def elected(self) -> Lead:
        """Take part until this replica leads.

        Raises:
            EtcdError: etcd refuses this replica.
        """
        while self.lead is None:
            try:
                await self._take_part()
            except (UnreachableError, LeaseGoneError) as error:
                self._set_trouble(str(error))
                await asyncio.sleep(PAUSE)
        return self.lead

    async def _take_part(self) -> None:
        """Take part with one lease, until it is lost or this replica leads."""
        self._lease = None  # The end of the previous lease must not count for the next one.
        self._lease_lost.clear()
        lease = self._lease = await self._in_thread(lambda: Lease(self._etcd, self.ttl))

        def lost(why: str) -> None:
            self._loop.call_soon_threadsafe(self._on_lease_lost, lease, why)

        lease.keep(lost)
        try:
            await self._enlist(lease)
            self._set_trouble("")
            self.lead = await self._campaign(lease)
        finally:
            if self.lead is None:
                # A key may have this lease although its answer got lost. It must not stay alive.
                await self._in_thread(lease.give_up)
        if self._lease_lost.is_set():
            self._end_lead("its lease was lost at once")

    async def _enlist(self, lease: Lease) -> None:
        """Enter this replica in the list, and wait while its own earlier entry is there."""
        deadline = self._loop.time() + 2 * self.ttl
        while not self._lease_lost.is_set():
            try:
                await self._in_thread(lambda: enlist(self._etcd, self._prefix, lease, self.record))
            except NameTakenError as error:
                # It may be the entry of this replica's previous process.
                if self._loop.time() > deadline:
                    raise
                self._set_trouble(str(error))
                await asyncio.sleep(PAUSE)
            else:
                return

    async def _campaign(self, lease: Lease) -> Lead | None:
        """Wait for the lead; None if the lease is lost before."""
        while not self._lease_lost.is_set():
            news = self._news
            if self.members.vacant:
                lead = await self._in_thread(lambda: campaign(self._etcd, self._prefix, lease, self.record))
                if lead is not None:
                    return lead
            await first(news.wait(), self._lease_lost.wait())
        self._set_trouble("its lease was lost")
        return None

    def _on_lease_lost(self, lease: Lease, why: str) -> None:
        if lease is self._lease:
            self._lease_lost.set()
            self._end_lead(why)

    def _end_lead(self, why: str) -> None:
        if self.lead is not None and not self.lost.done():
            self.lost.set_exception(LeadLost(why))

    async def announce(self) -> None:
        """Announce that this replica leads and answers calls.

        Raises:
            LeadLost: it no longer leads.
            EtcdError: etcd refused, or did not answer.
        """
        lead = self.lead
        assert lead is not None
        if not await self._in_thread(lambda: announce(self._etcd, self._prefix, lead, self.record)):
            raise LeadLost("its key in etcd is another one's")

    async def step_down(self) -> None:
        """Give the lease up, so that another replica leads at once."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        led = self.leads
        await self._in_thread(lease.give_up)
        if led:
            structlog.get_logger().info("resigned")

    async def resign(self) -> None:
        """Step down and leave the cluster."""
        self.members.close()
        await self.step_down()
        if not self.lost.done():
            self.lost.cancel()

    def _set_trouble(self, why: str) -> None:
        if why and why != self.trouble:
            structlog.get_logger().warning("replica.trouble", reason=why)
        self.trouble = why
        self._notify()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(None, call)
