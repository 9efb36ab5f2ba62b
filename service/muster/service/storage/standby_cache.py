"""The state of the leader at a standby: read, followed and decoded before it is needed."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from muster.service.core.vocabulary.effects import Kept
from muster.service.etcd.client import Etcd
from muster.service.etcd.location import Location
from muster.service.leadership.mirror import Mirror
from muster.service.storage import codec
from muster.service.storage.engine import StorageError
from muster.service.storage.etcd import STATE, whole_key


class StandbyCache:
    """What a replica must have at hand to take over at once.

    Args:
        etcd: the client.
        location: where the state is.
    """

    def __init__(self, etcd: Etcd, location: Location) -> None:
        self._decoded: dict[bytes, tuple[bytes, Kept]] = {}
        """By key: the very value that it was decoded from."""
        self._mirror = Mirror(etcd, location.prefix + STATE, took=self._take)

    def rows(self, revision: int, timeout: float) -> Mapping[bytes, bytes]:
        """The rows behind ``STATE`` as they are at a revision or later; this ends with it.

        Raises:
            EtcdError: the news of that revision did not come in time.
        """
        rows = self._mirror.rows(revision, timeout)
        self._mirror.close()
        return rows

    def records(self, rows: Iterable[tuple[bytes, bytes]]) -> Iterator[Kept]:
        """The records of an engine's rows; what was decoded before is not decoded again.

        Raises:
            StorageError: a row is not one that this version writes.
        """
        for key, value in rows:
            before = self._decoded.pop(key, None)  # Who leads needs it no longer.
            # A value of several parts is put together anew, so it is never the same object.
            yield before[1] if before is not None and before[0] is value else codec.decode(key, value)

    def close(self) -> None:
        """Follow no longer."""
        self._mirror.close()

    def _take(self, row: bytes, value: bytes | None) -> None:
        key = whole_key(row)
        if key is None:
            return
        self._decoded.pop(key, None)
        if value is not None:
            # It may be the first part of several; or damaged, and who takes over says so.
            with suppress(StorageError):
                self._decoded[key] = value, codec.decode(key, value)
