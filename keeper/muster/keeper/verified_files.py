"""Which files a keeper has verified since it started. The record is lost with the process."""

from dataclasses import dataclass, field

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.manifest import ManifestReference
from muster.keeper.folder import KeeperFolder, Signature
from muster.keeper.orders import Kept
from muster.keeper.vocabulary import HEAD, Head


@dataclass(slots=True)
class _Attempt:
    """The verified files of one attempt."""

    head: Head
    verified: dict[str, Signature] = field(default_factory=dict)
    """By name: the signature that the file had when it was verified."""
    unsynced: set[str] = field(default_factory=set)
    """The verified files that may not be on the disk yet."""
    persisted: set[int] = field(default_factory=set)
    persisted_as: str = ""


class VerifiedFiles:
    """The files that a keeper has verified. Only the event loop's thread uses it.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: KeeperFolder) -> None:
        self._folder = folder
        self._attempts: dict[SaveAttempt, _Attempt] = {}

    def attempts(self) -> set[SaveAttempt]:
        """Return the attempts with a verified head."""
        return set(self._attempts)

    def head(self, attempt: SaveAttempt) -> Head | None:
        """Return the verified head of an attempt; None if it has none."""
        found = self._attempts.get(attempt)
        return None if found is None else found.head

    def put_head(self, attempt: SaveAttempt, head: Head) -> None:
        """Record a verified head, whose two files are in the attempt's folder."""
        found = self._attempts.get(attempt)
        if found is None or found.head.reference != head.reference:
            found = self._attempts[attempt] = _Attempt(head)
        for name in HEAD:
            if (signature := Signature.of(self._folder.file(attempt, name))) is not None:
                found.verified[name] = signature

    def put(
        self, attempt: SaveAttempt, head: Head, name: str, signature: Signature, *, synced: bool = True
    ) -> None:
        """Record a verified file.

        Args:
            attempt: the attempt.
            head: by which it was verified. If the attempt has another one by now, nothing is recorded.
            name: the file.
            signature: of the file when its verification began.
            synced: whether it is on the disk. It stays so until it changes.
        """
        if (found := self._of(attempt, head)) is None:
            return
        if synced:
            found.unsynced.discard(name)
        elif found.verified.get(name) != signature:
            found.unsynced.add(name)
        found.verified[name] = signature

    def _of(self, attempt: SaveAttempt, head: Head) -> _Attempt | None:
        found = self._attempts.get(attempt)
        return found if found is not None and found.head.reference == head.reference else None

    def drop(self, attempt: SaveAttempt, name: str) -> None:
        """Remove a file from the record. If it belongs to the head, remove the whole attempt."""
        found = self._attempts.get(attempt)
        if found is None:
            return
        found.verified.pop(name, None)
        found.unsynced.discard(name)
        if name in HEAD:
            del self._attempts[attempt]

    def drop_attempt(self, attempt: SaveAttempt) -> None:
        """Remove an attempt from the record."""
        self._attempts.pop(attempt, None)

    def drop_other(self, attempt: SaveAttempt, reference: ManifestReference) -> None:
        """Remove an attempt whose manifest is not the named one."""
        found = self._attempts.get(attempt)
        if found is not None and found.head.reference != reference:
            del self._attempts[attempt]

    def has(self, attempt: SaveAttempt, name: str) -> bool:
        """Return whether a file is here and unchanged since it was verified. Drop it if it has changed."""
        found = self._attempts.get(attempt)
        known = None if found is None else found.verified.get(name)
        if known is None:
            return False
        if Signature.of(self._folder.file(attempt, name)) == known:
            return True
        self.drop(attempt, name)
        return False

    def put_persisted(self, attempt: SaveAttempt, head: Head, rank: int) -> None:
        """Record that a rank's part of the checkpoint with this head is in shared storage."""
        if (found := self._of(attempt, head)) is not None:
            found.persisted.add(rank)

    def put_committed(self, attempt: SaveAttempt, head: Head, path: str) -> None:
        """Record where the checkpoint with this head was committed in shared storage."""
        if (found := self._of(attempt, head)) is not None:
            found.persisted_as = path

    def kept(self, attempt: SaveAttempt) -> Kept:
        """Return what is here of an attempt."""
        files = self._folder.files(attempt)
        found = self._attempts.get(attempt)
        if found is None:
            return Kept(unverified=files)
        verified = frozenset(found.verified) & files
        return Kept(
            found.head.parts,
            bytes.fromhex(found.head.reference.digest),
            verified - found.unsynced,
            verified & found.unsynced,
            files - verified,
            frozenset(found.persisted),
            found.persisted_as,
        )
