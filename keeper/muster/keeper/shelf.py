"""What a keeper has verified since it started. Nothing here outlives the process."""

from dataclasses import dataclass, field

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.manifest import ManifestReference
from muster.keeper.folder import KeeperFolder, Signature
from muster.keeper.orders import Kept
from muster.keeper.vocabulary import HEAD, Head


@dataclass(slots=True)
class _Copy:
    """What was verified of one attempt."""

    head: Head
    verified: dict[str, Signature] = field(default_factory=dict)
    """By name, the file as it was when it was verified."""
    persisted: set[int] = field(default_factory=set)
    persisted_as: str = ""


class Shelf:
    """What a keeper has verified. The event loop's thread uses it.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: KeeperFolder) -> None:
        self._folder = folder
        self._copies: dict[SaveAttempt, _Copy] = {}

    def attempts(self) -> set[SaveAttempt]:
        """Return the attempts with a verified head."""
        return set(self._copies)

    def head(self, attempt: SaveAttempt) -> Head | None:
        """Return the verified head of an attempt; None if it has none."""
        copy = self._copies.get(attempt)
        return None if copy is None else copy.head

    def put_head(self, attempt: SaveAttempt, head: Head) -> None:
        """Note a verified head, whose files are in the attempt's folder."""
        copy = self._copies.get(attempt)
        if copy is None or copy.head.reference != head.reference:
            copy = self._copies[attempt] = _Copy(head)
        for name in HEAD:
            if (signature := Signature.of(self._folder.file(attempt, name))) is not None:
                copy.verified[name] = signature

    def put(self, attempt: SaveAttempt, name: str, signature: Signature) -> None:
        """Note a verified file.

        Args:
            attempt: the attempt; nothing happens if it is gone meanwhile.
            name: the file.
            signature: of the file when its verification began.
        """
        if (copy := self._copies.get(attempt)) is not None:
            copy.verified[name] = signature

    def drop(self, attempt: SaveAttempt, name: str) -> None:
        """Note that a file is no longer here. Without its head, nothing of a checkpoint is verified."""
        copy = self._copies.get(attempt)
        if copy is None:
            return
        copy.verified.pop(name, None)
        if name in HEAD:
            del self._copies[attempt]

    def drop_attempt(self, attempt: SaveAttempt) -> None:
        """Note that nothing is left of an attempt."""
        self._copies.pop(attempt, None)

    def drop_other(self, attempt: SaveAttempt, reference: ManifestReference) -> None:
        """Forget an attempt's head if it is not the one that is named."""
        copy = self._copies.get(attempt)
        if copy is not None and copy.head.reference != reference:
            del self._copies[attempt]

    def has(self, attempt: SaveAttempt, name: str) -> bool:
        """Return whether a file is here as it was verified; drop it if it was changed since."""
        copy = self._copies.get(attempt)
        known = None if copy is None else copy.verified.get(name)
        if known is None:
            return False
        if Signature.of(self._folder.file(attempt, name)) == known:
            return True
        self.drop(attempt, name)
        return False

    def put_persisted(self, attempt: SaveAttempt, rank: int) -> None:
        """Note that a rank's part is in shared storage."""
        if (copy := self._copies.get(attempt)) is not None:
            copy.persisted.add(rank)

    def put_committed(self, attempt: SaveAttempt, path: str) -> None:
        """Note where a checkpoint was committed in shared storage."""
        if (copy := self._copies.get(attempt)) is not None:
            copy.persisted_as = path

    def kept(self, attempt: SaveAttempt) -> Kept:
        """Return what is here of an attempt."""
        files = self._folder.files(attempt)
        copy = self._copies.get(attempt)
        if copy is None:
            return Kept(unverified=files)
        verified = frozenset(copy.verified) & files
        return Kept(
            copy.head.parts,
            bytes.fromhex(copy.head.reference.digest),
            verified,
            files - verified,
            frozenset(copy.persisted),
            copy.persisted_as,
        )
