"""The leader's state at a standby: read, followed and decoded before the standby leads."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from muster.service.core.vocabulary.records import StoredRecord
from muster.service.etcd.client import Etcd
from muster.service.etcd.location import Location
from muster.service.leadership.mirror import Mirror
from muster.service.storage import codec
from muster.service.storage.engine import StorageError
from muster.service.storage.etcd import STATE, whole_key


class StandbyCache:
    """Rows and decoded records of the state, so that a replica can take over at once.

    Args:
        etcd: the client.
        location: the state.
    """

    def __init__(self, etcd: Etcd, location: Location) -> None:
        self._decoded: dict[bytes, tuple[bytes, StoredRecord]] = {}
        """By key: the value object that was decoded, and its record."""
        self._mirror = Mirror(etcd, location.prefix + STATE, took=self._take)

    def rows(self, revision: int, timeout: float) -> Mapping[bytes, bytes]:
        """Return the rows behind ``STATE`` as of a revision or later, and stop following.

        Raises:
            EtcdError: that revision did not arrive in time.
        """
        rows = self._mirror.rows(revision, timeout)
        self._mirror.close()
        return rows

    def records(self, rows: Iterable[tuple[bytes, bytes]]) -> Iterator[StoredRecord]:
        """Return the records of an engine's rows, without decoding known rows again.

        Raises:
            StorageError: this version does not write such a row.
        """
        for key, value in rows:
            before = self._decoded.pop(key, None)  # A leader needs it only once.
            # A value of several parts is joined each time, so it is never the same object.
            yield before[1] if before is not None and before[0] is value else codec.decode(key, value)

    def close(self) -> None:
        """Stop following."""
        self._mirror.close()

    def _take(self, row: bytes, value: bytes | None) -> None:
        key = whole_key(row)
        if key is None:
            return
        self._decoded.pop(key, None)
        if value is not None:
            # It may be the first part of several. A damaged row is reported when this replica takes over.
            with suppress(StorageError):
                self._decoded[key] = value, codec.decode(key, value)
