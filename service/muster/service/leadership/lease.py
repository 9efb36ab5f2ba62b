"""A lease of etcd, renewed by a thread of its own."""

import threading
from collections.abc import Callable
from contextlib import suppress

from muster.service.etcd.client import Etcd
from muster.service.etcd.errors import EtcdError, TransientError
from muster.service.leadership.lease_validity import LeaseValidity

RENEWALS = 3
"""Renewals within the TTL of a lease: two of them may fail."""


class Lease:
    """A lease that lasts until it is given up, or until etcd is unreachable for too long.

    Args:
        etcd: the client.
        ttl: seconds that the lease lasts without a renewal; etcd may grant more.

    Raises:
        EtcdError: etcd refused, or did not answer.
    """

    def __init__(self, etcd: Etcd, ttl: int) -> None:
        self.validity = LeaseValidity()
        """For how long the lease certainly lasts."""
        self._etcd = etcd
        sent = self.validity.now()
        granted = etcd.grant(ttl, timeout=ttl)
        self.id: int = granted.id
        self.ttl: int = granted.ttl
        self.validity.renewed(sent, granted.ttl)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, lost: Callable[[str], None]) -> None:
        """Renew the lease from now on.

        Args:
            lost: called once, on the renewing thread, with the reason, when the lease may be over. It is not
                called when the lease is given up.
        """
        self._thread = threading.Thread(target=self._renew, args=(lost,), name="muster-lease", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """End the lease now, so that no replica needs to wait for its end. Tell etcd if it is reachable."""
        if self._ended.is_set():
            return
        self._ended.set()
        self.validity.end()
        with suppress(EtcdError):  # Then the lease expires.
            self._etcd.revoke(self.id, timeout=self.ttl / RENEWALS)

    def _renew(self, lost: Callable[[str], None]) -> None:
        interval = self.ttl / RENEWALS
        why = ""
        pause = interval
        while not self._ended.wait(pause):
            sent = self.validity.now()
            try:
                ttl = self._etcd.keep_alive(self.id)
            except (TransientError, EtcdError) as error:
                why = str(error)
                # The next attempt asks another member, so it can come soon.
                pause = interval / 10
            else:
                if ttl <= 0:
                    self.validity.end()
                    why = "etcd says that it is over"
                else:
                    self.validity.renewed(sent, ttl)
                    pause = interval
            if not self.validity.certain and not self._ended.is_set():
                self.validity.end()
                lost(f"the lease of {self.ttl} s is over, or may be: {why or 'this process was stopped'}")
                return
