"""Coordinators with a fault built in, to see that the chaos test finds it: ``KIND serve …``."""

from collections.abc import Iterable

from muster.etcd.v3 import etcd_pb2 as pb
from muster.service import driver
from muster.service.leadership.lease_validity import LeaseValidity
from muster.service.leadership.replica import Replica
from muster.service.storage.etcd import EtcdEngine
from tests.support.chaos.program import muster


def without_fence() -> None:
    """Write without a check that this replica still leads."""

    def change(self: EtcdEngine, operations: Iterable[pb.Operation]) -> None:
        request = pb.TxnRequest(success=list(operations))
        self._etcd.txn(request, timeout=60)

    EtcdEngine._change = change  # type: ignore[method-assign]


def telling_first() -> None:
    """Deliver a decision before its commit."""

    def flush(self: driver.Driver) -> None:
        if self._committing_since is None and not self._batch.empty:
            batch = self._batch
            self._deliver(batch)
            records = batch.effects.records
            self._batch = driver._Batch()
            self._batch.effects.records = records
            original(self)

    original = driver.Driver._flush
    driver.Driver._flush = flush  # type: ignore[method-assign]


def trusting() -> None:
    """Take a lease to last for ever."""
    LeaseValidity.certain = property(lambda self: True)  # type: ignore[assignment, method-assign]
    LeaseValidity.remaining = property(lambda self: 60.0)  # type: ignore[assignment, method-assign]
    Replica._end_lead = lambda self, why: None  # type: ignore[method-assign]


KINDS = {"without-fence": without_fence, "telling-first": telling_first, "trusting": trusting}

if __name__ == "__main__":
    muster(lambda kind: KINDS[kind]())
