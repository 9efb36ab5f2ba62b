"""A lease of etcd's, renewed by a thread of its own for as long as it can be."""

import threading
from collections.abc import Callable
from contextlib import suppress

from muster.service.etcd.client import Etcd
from muster.service.etcd.errors import EtcdError, PassingError
from muster.service.leadership.tenure import Tenure

RENEWALS = 3
"""So many in the time of a lease: two may go astray."""


class Lease:
    """A lease that lasts until it is given up, or etcd cannot be reached for too long.

    Args:
        etcd: the client.
        ttl: seconds that it lasts when it is not renewed; etcd may give more.

    Raises:
        EtcdError: etcd refused, or did not answer.
    """

    def __init__(self, etcd: Etcd, ttl: int) -> None:
        self.tenure = Tenure()
        """For how long it certainly lasts."""
        self._etcd = etcd
        sent = self.tenure.now()
        granted = etcd.grant(ttl, timeout=ttl)
        self.id: int = granted.id
        self.ttl: int = granted.ttl
        self.tenure.renewed(sent, granted.ttl)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, lost: Callable[[str], None]) -> None:
        """Renew it from now on.

        Args:
            lost: called once, on the renewing thread, when it is over or may be, with why; not when it is
                given up.
        """
        self._thread = threading.Thread(target=self._renew, args=(lost,), name="muster-lease", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """End it now, so that nobody needs to wait for its end; etcd is told if it can be reached."""
        if self._ended.is_set():
            return
        self._ended.set()
        self.tenure.over()
        with suppress(EtcdError):  # Then it ends by itself.
            self._etcd.revoke(self.id, timeout=self.ttl / RENEWALS)

    def _renew(self, lost: Callable[[str], None]) -> None:
        interval = self.ttl / RENEWALS
        why = ""
        pause = interval
        while not self._ended.wait(pause):
            sent = self.tenure.now()
            try:
                ttl = self._etcd.keep_alive(self.id)
            except (PassingError, EtcdError) as error:
                why = str(error)
                # The client asks another member at the next attempt, so it need not be far.
                pause = interval / 10
            else:
                if ttl <= 0:
                    self.tenure.over()
                    why = "etcd says that it is over"
                else:
                    self.tenure.renewed(sent, ttl)
                    pause = interval
            if not self.tenure.certain and not self._ended.is_set():
                self.tenure.over()
                lost(f"the lease of {self.ttl} s is over, or may be: {why or 'this process was stopped'}")
                return
