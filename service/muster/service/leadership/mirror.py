"""A local copy of the keys under a prefix of etcd, kept up to date by a watch."""

import threading
from collections.abc import Callable, Iterable

from muster.etcd.v3 import etcd_pb2 as pb
from muster.service.etcd.client import DELETED, Etcd
from muster.service.etcd.errors import CompactedError, EtcdError, TransientError

TIMEOUT = 10.0
"""Seconds for one page while all keys are read."""
PAUSE = 1.0
"""Seconds until the next attempt after etcd refused."""


class Mirror:
    """A copy of all keys under a prefix, as of the last message from etcd.

    Args:
        etcd: the client.
        prefix: the keys begin so.
        changed: called on the mirror's thread whenever a key or the connection changed.
        took: called there for each key with its value; None: the key was deleted.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: bytes,
        *,
        changed: Callable[[], None] = lambda: None,
        took: Callable[[bytes, bytes | None], None] = lambda key, value: None,
    ) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._end = prefix[:-1] + bytes([prefix[-1] + 1])
        self._changed = changed
        self._took = took
        self._moved = threading.Condition()
        self._rows: dict[bytes, bytes] = {}
        """Without the prefix."""
        self._revision = 0
        self.fault = "etcd has not answered yet"
        """Why the copy may be outdated; empty if it is up to date."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="muster-mirror", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ reading

    @property
    def now(self) -> dict[bytes, bytes]:
        """All known keys, without the prefix."""
        with self._moved:
            return dict(self._rows)

    def rows(self, revision: int, timeout: float) -> dict[bytes, bytes]:
        """Return all keys, without the prefix, as of a revision or later.

        Args:
            revision: a revision that changed something under the prefix.
            timeout: seconds to wait for it.

        Raises:
            EtcdError: it did not come.
        """
        with self._moved:
            if not self._moved.wait_for(lambda: self._revision >= revision, timeout):
                raise EtcdError(f"no news of revision {revision} within {timeout:g} s: {self.fault}")
            return dict(self._rows)

    def close(self) -> None:
        """Stop following at the next change."""
        self._closed.set()
        with self._moved:
            self._rows = {}

    # ------------------------------------------------------------------ following

    def _follow(self) -> None:
        known = False
        while not self._closed.is_set():
            try:
                if not known:
                    kvs, revision = self._etcd.snapshot(self._prefix, self._end, timeout=TIMEOUT)
                    self._begin(kvs, revision)
                    known = True
                for response in self._etcd.watch(self._prefix, self._end, self._revision + 1):
                    self._take(response)
                    if self._closed.is_set():
                        return
            except CompactedError:
                known = False
            except TransientError as error:
                self._report(str(error))
            except EtcdError as error:
                self._report(str(error))
                self._closed.wait(PAUSE)

    def _begin(self, kvs: Iterable[pb.KeyValue], revision: int) -> None:
        with self._moved:
            rows = {self._short(kv.key): kv.value for kv in kvs}
            for key in self._rows.keys() - rows.keys():
                self._took(key, None)
            for key, value in rows.items():
                self._took(key, value)
            self._rows = rows
            self._revision = revision
            self._moved.notify_all()
        self._set_fault("")

    def _take(self, response: pb.WatchResponse) -> None:
        with self._moved:
            for event in response.events:
                key = self._short(event.kv.key)
                value = None if event.type == DELETED else event.kv.value
                self._took(key, value)
                if value is None:
                    self._rows.pop(key, None)
                else:
                    self._rows[key] = value
            if response.events and not response.fragment:
                self._revision = response.events[-1].kv.mod_revision
                self._moved.notify_all()
        if response.events or self.fault:
            self._set_fault("")

    def _short(self, key: bytes) -> bytes:
        return key[len(self._prefix) :]

    def _report(self, why: str) -> None:
        if why != self.fault:
            self._set_fault(why)

    def _set_fault(self, fault: str) -> None:
        self.fault = fault
        self._changed()
