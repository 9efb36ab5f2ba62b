"""Replicas without a coordinator around them: they lead, and write."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lab.patience import PATIENCE
from muster.service.etcd.client import Etcd
from muster.service.etcd.location import Access, Location
from muster.service.leadership.election import Lead, campaign
from muster.service.leadership.lease import Lease
from muster.service.storage.etcd import EtcdEngine
from muster.v1 import state_pb2

TTL = round(PATIENCE)
"""Seconds: nobody loses a lead here because the machine is slow."""


def client(location: Location) -> Etcd:
    """A client that nobody observes."""
    return Etcd(location.endpoints, Access(), attempt_timeout=PATIENCE / 10)


def take_the_lead(etcd: Etcd, location: Location) -> Lead:
    """Lead, where nobody else does; the lease is not renewed."""
    record = state_pb2.ReplicaRecord(address="127.0.0.1:1")
    lead = campaign(etcd, location.prefix, Lease(etcd, TTL), record)
    assert lead is not None
    return lead


@contextmanager
def successive_leaders(state: str) -> Iterator[Callable[[], EtcdEngine]]:
    """Makes engines, of which the last leads: the one before gives the lead up."""
    location = Location.parse(state)
    etcd = client(location)
    leads: list[Lead] = []

    def another() -> EtcdEngine:
        for lead in leads:
            lead.lease.give_up()
        leads.append(take_the_lead(etcd, location))
        return EtcdEngine(etcd, location, leads[-1])

    yield another
    for lead in leads:
        lead.lease.give_up()
    etcd.close()
