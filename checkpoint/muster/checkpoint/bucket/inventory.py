"""The checkpoints that are stored in a bucket, for people."""

from collections.abc import Mapping
from typing import Any

from muster.checkpoint.bucket.attempts import Attempt
from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.bucket.protocol import CheckpointBucket, Entry
from muster.checkpoint.bucket.source import BucketSource
from muster.checkpoint.stored import MARKS, NotCommittedError, StoredCheckpoint, content_size


class BucketInventory:
    """The checkpoints below an address, or the one at that address.

    Args:
        url: the address, with a scheme.
        options: options of fsspec's implementation of the scheme, such as an endpoint.

    Raises:
        ValueError: the address or an option is invalid.
        ImportError: the scheme's package is not installed.
        OSError: the store refuses the request.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        above, _, name = url.rstrip("/").rpartition("/")
        self._url = url
        self._only = Attempt.parse(name)
        self._objects = FsspecObjects(url if self._only is None else above, options)
        # The run id only names new attempts. This reader makes none, and sees the attempts of all runs.
        self._bucket = CheckpointBucket(self._objects, self._objects.url, "")

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Return all committed checkpoints, newest commit first."""
        self._bucket.check_kind()
        stored = [
            self._stored(entry)
            for entry in reversed(self._bucket.entries())
            if self._only in (None, entry.attempt)
        ]
        if self._only is not None and not stored:
            raise NotCommittedError(
                f"{self._url} is not a committed checkpoint: it has no verdict that says so. A save that was "
                "not finished is not resumed from."
            )
        return stored

    def _stored(self, entry: Entry) -> StoredCheckpoint:
        source = BucketSource(self._objects, entry.attempt.name)
        sizes = source.sizes()
        return StoredCheckpoint(
            entry.attempt.name,
            entry.attempt.step,
            entry.made,
            entry.made.committed_at if entry.made is not None else 0.0,
            content_size(sizes),
            entry.damage,
            frozenset(sizes.keys() & MARKS),
            source,
        )

    def mark(self, one: StoredCheckpoint, name: str, data: bytes = b"") -> None:
        """Put a mark into a checkpoint."""
        self._bucket.mark(_attempt(one), name, data)

    def unmark(self, one: StoredCheckpoint, name: str) -> None:
        """Take a mark out of a checkpoint."""
        self._bucket.unmark(_attempt(one), name)


def _attempt(one: StoredCheckpoint) -> Attempt:
    attempt = Attempt.parse(one.name)
    assert attempt is not None
    return attempt
