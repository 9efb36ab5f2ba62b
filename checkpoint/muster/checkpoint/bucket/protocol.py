"""Commits and removes checkpoints in an object store, which cannot rename.

Each attempt to save a step writes below its own name. One small object beside it, its verdict, says whether
it is a checkpoint. The first process to create the verdict decides, because the store refuses a second one.
Rank 0 creates it as ``committed`` when every rank has written. A sweep creates it as ``abandoned`` before it
removes anything. So a process that was suspended for hours cannot commit an attempt that is being removed.

The sweep removes the verdict last. If a commit comes even later, its verdict names objects that do not exist,
so readers do not take it for a checkpoint.

A test inspects the store between any two requests.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

from muster.checkpoint.bucket.attempts import (
    ABANDONED,
    Attempt,
    Verdict,
    decode_verdict,
    encode_verdict,
    folder_attempts,
    judged_attempts,
)
from muster.checkpoint.bucket.objects import Objects
from muster.checkpoint.committed import (
    WIDTH,
    Committed,
    SaveAttempt,
    UncommittedError,
    run_mark,
)
from muster.checkpoint.damage import DAMAGED, KEPT, Damage
from muster.checkpoint.version import LaterVersionError

logger = logging.getLogger(__name__)

GONE = "was given up by a restart of the job, or by another job in the same place, and is being removed"
LOOKS = 10
"""Attempts to find the newest checkpoint while other processes remove those that were found."""
PROBE = ".probe-"
"""The prefix of objects that only test what the store can do."""

_FOLDERS = re.compile(rf"step-\d{{{WIDTH},}}/")
"""The name of a checkpoint that was committed by rename, in a folder."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A committed attempt."""

    attempt: Attempt
    made: Committed | None
    """None if its verdict cannot be read."""
    damage: Damage | None = None
    """Why it is not resumed from; None if nothing is known against it."""


class DamagedError(UncommittedError):
    """A checkpoint is marked as damaged.

    Args:
        damage: what the mark says.
    """

    def __init__(self, damage: Damage) -> None:
        super().__init__(f"it is marked as damaged: {damage}")
        self.damage = damage


class CheckpointBucket:
    """The checkpoints of one job.

    Args:
        objects: the object store.
        url: the address of the store, for people and for torch.
        run_id: the job's run.
    """

    def __init__(self, objects: Objects, url: str, run_id: str) -> None:
        self.url = url
        self._objects = objects
        self._run = run_mark(run_id)
        self._known: dict[Attempt, Verdict] = {}
        """Committed attempts that this process has seen. A verdict never changes."""
        self._unread: set[Attempt] = set()
        """Attempts whose verdict could not be read at the last look. They may be checkpoints."""
        self._damaged: set[Attempt] = set()
        """Attempts that this process has found damaged, or has seen marked as damaged."""

    # ------------------------------------------------------------------ names

    def attempt(self, step: int, save: SaveAttempt) -> Attempt:
        """Return an attempt of this job; it has the same name on all ranks."""
        return Attempt(step, save, self._run)

    def path(self, attempt: Attempt) -> str:
        """Return the address of an attempt."""
        return f"{self.url}/{attempt.name}"

    # ------------------------------------------------------------------ commit

    def commit(self, attempt: Attempt, made: Committed, files: Mapping[str, int]) -> Committed:
        """Commit an attempt that every rank has written.

        Args:
            attempt: the attempt.
            made: what its marker says.
            files: its objects and their sizes in bytes. They include the first object that each rank created.
                Any sweep sees and removes at least one of those. After that the attempt is no checkpoint,
                even if another sweep has yet to remove its verdict.

        Returns:
            The checkpoint, with its place in the order of commits.

        Raises:
            UncommittedError: another process has abandoned it.
            OSError: the store does not answer. Read the attempt to learn whether it is committed.
        """
        orders = [known.made.order for one, known in self._known.items() if known.made and one != attempt]
        # Checkpoints that cannot be read now have orders as well, and may become readable again.
        unread = len(self._unread - {attempt})
        made = replace(made, order=max(orders, default=0) + unread + 1)
        verdict = encode_verdict(made, files)
        if not self._objects.create(attempt.verdict, verdict) and self._found(attempt) != verdict:
            # If the verdict is the same, it is our own, and the answer was lost.
            raise UncommittedError(f"{self.path(attempt)} {GONE}")
        try:
            # A sweep may have ended before that and removed its own verdict.
            self._check_whole(attempt, files)
        except UncommittedError:
            self._objects.remove([attempt.verdict])
            raise
        self._known[attempt] = Verdict(made, files)
        return made

    def settle(self, attempt: Attempt) -> bool:
        """Make sure that an attempt is committed, or never will be; return whether it is.

        Raises:
            OSError: the store does not answer.
        """
        self._abandon(attempt)
        try:
            return self._read(attempt).made is not None
        except FileNotFoundError:
            return False

    def _check_whole(self, attempt: Attempt, files: Mapping[str, int]) -> None:
        self._check_there(attempt, files, self._objects.sizes(attempt.name))

    def _check_whole_twice(self, attempt: Attempt, files: Mapping[str, int]) -> None:
        """As :meth:`_check_whole`. Objects that one listing lacks are looked for in another one."""
        try:
            self._check_whole(attempt, files)
        except DamagedError:
            raise
        except UncommittedError:
            self._check_whole(attempt, files)

    def _check_there(self, attempt: Attempt, files: Mapping[str, int], there: Mapping[str, int]) -> None:
        if DAMAGED in there:
            self._damaged.add(attempt)
            raise DamagedError(self._damage(attempt))
        lost = sorted(name for name, size in files.items() if there.get(name) != size)
        if lost:
            raise UncommittedError(
                f"{self.path(attempt)} {GONE}: of {len(files)} objects {len(lost)} are not there as "
                f"they were written, such as {lost[0]}"
            )

    # ------------------------------------------------------------------ reading

    def committed(self, step: int) -> Attempt | None:
        """Return the whole checkpoint of a step if this process has seen it. This sends no request."""
        found = [
            attempt for attempt in tuple(self._known) if attempt.step == step and attempt not in self._damaged
        ]
        return max(found, default=None)

    def _by_commit(self, attempts: Iterable[Attempt], *, newest_first: bool = False) -> list[Attempt]:
        """Sort known attempts by the order of their commits."""

        def key(attempt: Attempt) -> tuple[int, Attempt]:
            made = self._known[attempt].made
            return (0 if made is None else made.order), attempt

        return sorted(attempts, key=key, reverse=newest_first)

    def latest(self, excluded: Collection[str] = ()) -> Committed | None:
        """Return the whole checkpoint that was committed last.

        Args:
            excluded: paths of checkpoints to pass over.

        Raises:
            LaterVersionError: there is one of a later version of Muster.
            OSError: the store does not answer.
        """
        for _ in range(LOOKS):
            found, vanished = self._look(excluded)
            if found is not None or not vanished:
                return found
            # Retention removes a checkpoint when there is a newer one, which this look may have missed.
        raise OSError(
            f"{self.url} lists checkpoints that are not there, at each of {LOOKS} looks. Does another job "
            "save there, or does something between this process and the store show what was?"
        )

    def _look(self, excluded: Collection[str]) -> tuple[Committed | None, bool]:
        """Return the newest checkpoint, and whether one vanished during the look. If so, it may be None."""
        judged = judged_attempts(self._objects.names())
        vanished, unreadable = self._read_all(judged)
        for attempt, why in unreadable.items():
            logger.warning("%s is passed over: %s", self.path(attempt), why)
        for attempt in self._by_commit(judged & self._known.keys(), newest_first=True):
            verdict = self._known[attempt]
            if self.path(attempt) in excluded:
                continue
            try:
                self._check_whole_twice(attempt, verdict.files)
            except UncommittedError as error:
                if self._found(attempt) is None:
                    vanished = True
                else:
                    self._damaged.add(attempt)
                    logger.warning("%s is passed over: %s", self.path(attempt), error)
            else:
                return (None if vanished else verdict.made), vanished
        return None, vanished

    def _read_all(self, judged: Set[Attempt]) -> tuple[bool, dict[Attempt, str]]:
        """Read the verdicts that this process does not know yet.

        Returns:
            Whether a verdict has vanished; and the attempts whose verdict cannot be read, with the reason.

        Raises:
            LaterVersionError: one is of a later version of Muster.
        """
        unknown = sorted(judged - self._known.keys())
        unreadable: dict[Attempt, str] = {}
        found = self._objects.get_all([attempt.verdict for attempt in unknown])
        for attempt in unknown:
            data = found.get(attempt.verdict)
            if data is None:
                continue
            try:
                verdict = self._decode(data, attempt)
            except UncommittedError as error:
                unreadable[attempt] = str(error)
                continue
            if verdict.made is not None:
                self._known[attempt] = verdict
        self._unread = set(unreadable)
        return any(attempt.verdict not in found for attempt in unknown), unreadable

    def _decode(self, data: bytes, attempt: Attempt) -> Verdict:
        try:
            return decode_verdict(data, attempt, self.path(attempt))
        except UncommittedError:
            # The first read may have been at fault.
            return decode_verdict(self._found(attempt) or data, attempt, self.path(attempt))

    def entries(self) -> list[Entry]:
        """Return all committed attempts, damaged ones as well, oldest commit first.

        Attempts whose verdict cannot be read come before all others.

        Raises:
            LaterVersionError: there is one of a later version of Muster.
            OSError: the store does not answer.
        """
        judged = judged_attempts(self._objects.names())
        _, unreadable = self._read_all(judged)
        found = [Entry(attempt, None, Damage(attempt.verdict, why)) for attempt, why in unreadable.items()]
        for attempt in self._by_commit(judged & self._known.keys()):
            verdict = self._known[attempt]
            there = self._objects.sizes(attempt.name)
            damage = None
            try:
                self._check_there(attempt, verdict.files, there)
            except DamagedError as error:
                damage = error.damage
            except UncommittedError as error:
                if self._found(attempt) is None:
                    continue  # Retention has just removed it.
                damage = Damage(attempt.verdict, str(error))
            found.append(Entry(attempt, verdict.made, damage))
        return found

    def mark_damaged(self, attempt: Attempt, damage: Damage) -> None:
        """Record durably that a checkpoint is damaged, so that no restart resumes from it."""
        logger.error("%s is damaged and will not be resumed from: %s", self.path(attempt), damage)
        self.mark(attempt, DAMAGED, damage.encode())
        self._damaged.add(attempt)

    def mark(self, attempt: Attempt, name: str, data: bytes = b"") -> None:
        """Put a mark into a checkpoint."""
        self._objects.put(f"{attempt.name}/{name}", data)

    def unmark(self, attempt: Attempt, name: str) -> None:
        """Take a mark out of a checkpoint."""
        self._objects.remove([f"{attempt.name}/{name}"])

    def _damage(self, attempt: Attempt) -> Damage:
        return Damage.decode(self._objects.get(f"{attempt.name}/{DAMAGED}"))

    def read(self, name: str) -> Committed:
        """Return what the marker of a checkpoint says.

        Args:
            name: the last part of its path.

        Raises:
            UncommittedError: it is not a committed checkpoint.
            OSError: the store does not answer.
        """
        attempt = Attempt.parse(name)
        try:
            if attempt is None:
                raise UncommittedError("no save has such a name")
            verdict = self._read(attempt)
            if verdict.made is None:
                raise UncommittedError("it was abandoned, and is being removed")
            self._check_whole(attempt, verdict.files)
        except FileNotFoundError:
            raise self._uncommitted(name, "it was not committed") from None
        except UncommittedError as error:
            raise self._uncommitted(name, str(error)) from error
        return verdict.made

    def _uncommitted(self, name: str, why: str) -> UncommittedError:
        last = self.latest()
        there = last.path if last is not None else "none"
        return UncommittedError(
            f"{self.url}/{name} is not a committed checkpoint: {why}. A save that was not finished, or that "
            f"another program wrote, is not loaded; the last committed one here is {there}."
        )

    def _read(self, attempt: Attempt) -> Verdict:
        return decode_verdict(self._objects.get(attempt.verdict), attempt, self.path(attempt))

    def _found(self, attempt: Attempt) -> bytes | None:
        try:
            return self._objects.get(attempt.verdict)
        except FileNotFoundError:
            return None

    # ------------------------------------------------------------------ removal

    def check_kind(self) -> None:
        """Check that the bucket has no checkpoints that were committed by rename.

        Raises:
            UncommittedError: it has one.
        """
        theirs = sorted(name for name in self._objects.names() if _FOLDERS.fullmatch(name))
        if theirs:
            raise UncommittedError(
                f"{self.url} holds {theirs[0]}, which was committed by rename, in a folder: here it cannot "
                "be told from what was not committed. Load it from that folder, and name another place for "
                "new ones."
            )

    def sweep(
        self,
        keep_last: int | None,
        decided: SaveAttempt | None = None,
        used: Collection[Path | str] = (),
        excluded: Collection[str] = (),
    ) -> None:
        """Remove the remains of failed saves, and all but the newest checkpoints.

        Args:
            keep_last: how many checkpoints to keep; None keeps all.
            decided: the last decided save of this job. Later ones are still being written. None: no job is
                writing.
            used: checkpoints that are being loaded, which stay.
            excluded: paths of damaged checkpoints that could not be marked. They do not count.

        Raises:
            OSError: the store does not answer. The next sweep continues.
        """
        names = self._objects.names()
        begun = folder_attempts(names) | folder_attempts(f"{name}/" for name in self._objects.uploads())
        judged = judged_attempts(names)
        self._known = {attempt: verdict for attempt, verdict in self._known.items() if attempt in judged}
        for attempt in sorted(begun - judged):
            if self._is_over(attempt, decided) and self._abandon(attempt) and decided is None:
                logger.warning(
                    "%s was not committed: its save was interrupted. It is removed", self.path(attempt)
                )
        self._read_unknown(judged - self._known.keys(), begun)
        if keep_last is not None:
            self._retain(keep_last, used, excluded)
        self._objects.remove(name for name in sorted(names) if decided is not None and name.startswith(PROBE))

    def _is_over(self, attempt: Attempt, decided: SaveAttempt | None) -> bool:
        return decided is None or (attempt.run == self._run and attempt.save <= decided)

    def _read_unknown(self, judged: Set[Attempt], begun: Set[Attempt]) -> None:
        """Read verdicts that this process does not know, and clear the attempts that are not checkpoints."""
        found = self._objects.get_all([attempt.verdict for attempt in sorted(judged)])
        self._unread = set()
        for attempt in sorted(judged):
            data = found.get(attempt.verdict)
            if data is None:
                continue  # It was just removed.
            try:
                verdict = decode_verdict(data, attempt, self.path(attempt))
            except (UncommittedError, LaterVersionError) as error:
                self._unread.add(attempt)
                logger.warning("%s is left as it is: %s", self.path(attempt), error)
                continue
            if verdict.made is not None and attempt in begun:
                self._known[attempt] = verdict
            elif verdict.made is None or not self._objects.sizes(attempt.name):
                # Its sweep was killed, or the commit came after the removal.
                self._clear(attempt)

    def _retain(self, keep_last: int, used: Collection[Path | str], excluded: Collection[str]) -> None:
        """Keep the newest whole checkpoints. A damaged one stays unless so many whole ones are newer."""
        newer = 0
        for attempt in self._by_commit(self._known, newest_first=True):
            if newer == keep_last:
                if self.path(attempt) not in used and KEPT not in self._objects.sizes(attempt.name):
                    self._retire(attempt)
                continue
            if self.path(attempt) in excluded:
                continue
            try:
                # It may have been marked since this process saw it whole.
                self._check_whole(attempt, self._known[attempt].files)
                newer += 1
            except UncommittedError as error:
                logger.warning("%s is left as it is: %s", self.path(attempt), error)

    def _abandon(self, attempt: Attempt) -> bool:
        """Abandon and clear an attempt, unless it is committed. Return whether it was abandoned."""
        if self._objects.create(attempt.verdict, ABANDONED) or self._found(attempt) == ABANDONED:
            self._clear(attempt)
            return True
        return False

    def _retire(self, attempt: Attempt) -> None:
        """Remove a checkpoint. Its verdict goes first, so that nobody loads half of it."""
        self._objects.remove([attempt.verdict])
        del self._known[attempt]
        self._clear(attempt)

    def _clear(self, attempt: Attempt) -> None:
        """Remove an attempt. An ``abandoned`` verdict goes last: it prevents a late commit."""
        self._objects.abort_uploads(attempt.name)
        self._objects.remove(f"{attempt.name}/{name}" for name in self._objects.sizes(attempt.name))
        if left := self._objects.sizes(attempt.name):
            # A process still writes, or the store delays the removal. The next sweep tries again.
            logger.warning("%s: %d objects are not removed yet", self.path(attempt), len(left))
            return
        self._objects.remove([attempt.verdict])
