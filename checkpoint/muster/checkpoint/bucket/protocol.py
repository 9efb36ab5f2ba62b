"""How a save becomes a checkpoint in a store that cannot rename, and how what is none is removed.

Each attempt to save a step writes below a name of its own. One small object beside it, its verdict, says what
has become of it. It is made once: who makes it first has decided, since the store refuses a second. Rank 0
makes it ``committed`` when every rank has written. Who sweeps makes it ``abandoned`` before he removes
anything, so that a process that was stopped, and goes on after hours, cannot commit what is being removed.
When all is gone the verdict goes as well; one that comes even later names objects that are not there, and is
known by that.

A test looks at it between any two requests.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

from muster.checkpoint.bucket.objects import Objects
from muster.checkpoint.committed import (
    WIDTH,
    Committed,
    SaveAttempt,
    UncommittedError,
    committed_from,
    run_mark,
    seal,
    unseal,
)
from muster.checkpoint.damage import DAMAGED, KEPT, Damage
from muster.checkpoint.version import LaterVersionError

logger = logging.getLogger(__name__)

GONE = "was given up by another life of the job, or by another job in the same place, and is being removed"
COMMITTED = "committed"
ABANDONED = "abandoned"
VERDICT = ".json"
LOOKS = 10
"""How often the last checkpoint is looked for, while others remove what is found."""
PROBE = ".probe-"
"""How the names of objects begin that were made to see whether that can be done."""

_ATTEMPT = re.compile(rf"step-(\d{{{WIDTH},}})\.(\d+)-(\d+)-([0-9a-f]{{8}})")
_FOLDERS = re.compile(rf"step-\d{{{WIDTH},}}/")
"""What a save to a folder, committed by rename, is called."""


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One attempt to save a step."""

    step: int
    life: SaveAttempt
    run: str
    """A mark of the run: lives are numbered in each from the start."""

    @property
    def name(self) -> str:
        """Below which it is written."""
        return f"step-{self.step:0{WIDTH}}.{self.life.generation}-{self.life.number}-{self.run}"

    @property
    def verdict(self) -> str:
        """The object that says what has become of it."""
        return self.name + VERDICT

    @classmethod
    def named(cls, name: str) -> "Attempt | None":
        """Whose name this is; None: of none."""
        found = _ATTEMPT.fullmatch(name)
        if found is None:
            return None
        step, generation, number, run = found.groups()
        attempt = cls(int(step), SaveAttempt(int(generation), int(number)), run)
        return attempt if attempt.name == name else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What has become of an attempt."""

    made: Committed | None
    """The checkpoint; None: it was abandoned."""
    files: Mapping[str, int]
    """Of the checkpoint: its objects, and how many bytes each has."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A committed attempt."""

    attempt: Attempt
    made: Committed | None
    """None if its verdict cannot be read."""
    files: Mapping[str, int]
    """The objects of the checkpoint, and the bytes of each."""
    damage: Damage | None = None
    """Why it is not resumed from; None if nothing is known against it."""
    kept: bool = False
    """Whether retention must leave it."""


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
        objects: where they are.
        url: of that, for people and for torch.
        run_id: of the job.
    """

    def __init__(self, objects: Objects, url: str, run_id: str) -> None:
        self.url = url
        self._objects = objects
        self._run = run_mark(run_id)
        self._known: dict[Attempt, Verdict] = {}
        """Committed, as this process has seen: a verdict does not change."""
        self._unread: set[Attempt] = set()
        """The verdicts that could not be read at the last look. They may be those of checkpoints."""
        self._damaged: set[Attempt] = set()
        """Marked as damaged, or found to be, as this process has seen."""

    # ------------------------------------------------------------------ names

    def attempt(self, step: int, life: SaveAttempt) -> Attempt:
        """What an attempt of this job is called, the same on all ranks."""
        return Attempt(step, life, self._run)

    def path(self, attempt: Attempt) -> str:
        """Where it is written."""
        return f"{self.url}/{attempt.name}"

    # ------------------------------------------------------------------ commit

    def commit(self, attempt: Attempt, made: Committed, files: Mapping[str, int]) -> Committed:
        """Make an attempt that every rank has written a checkpoint, for good.

        Args:
            attempt: it.
            made: what it is.
            files: its objects, and their sizes in bytes. Among them is what each rank has made there first,
                once: who sweeps it sees one of these, and removes it, so that it is no checkpoint after that,
                though somebody else who sweeps it has still to remove its verdict.

        Returns:
            The checkpoint, with its place in the order of commits.

        Raises:
            UncommittedError: another process has abandoned it.
            OSError: the store does not answer; it may be committed or not, and what it is can be read.
        """
        orders = [known.made.order for one, known in self._known.items() if known.made and one != attempt]
        # Those that cannot be read now have had orders, too, and may be restored.
        unread = len(self._unread - {attempt})
        made = replace(made, order=max(orders, default=0) + unread + 1)
        verdict = _written(made, files)
        if not self._objects.create(attempt.verdict, verdict) and self._found(attempt) != verdict:
            # If it is the same, an answer was lost: it is our own.
            raise UncommittedError(f"{self.path(attempt)} {GONE}")
        try:
            # A sweep may have ended before that, and taken its own verdict away.
            self._check_whole(attempt, files)
        except UncommittedError:
            self._objects.remove([attempt.verdict])
            raise
        self._known[attempt] = Verdict(made, files)
        return made

    def _check_whole(self, attempt: Attempt, files: Mapping[str, int]) -> None:
        self._check_there(attempt, files, self._objects.sizes(attempt.name))

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

    # ------------------------------------------------------------------ what there is

    def committed(self, step: int) -> Attempt | None:
        """Return the whole checkpoint of a step, if this process has seen it; it does not ask for that."""
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
        """The last checkpoint, of those that did not vanish at the look; whether one did."""
        judged = _verdicts(self._objects.names())
        vanished, unreadable = self._read_all(judged)
        for attempt, why in unreadable.items():
            logger.warning("%s is passed over: %s", self.path(attempt), why)
        for attempt in self._by_commit(judged & self._known.keys(), newest_first=True):
            verdict = self._known[attempt]
            if self.path(attempt) in excluded:
                continue
            try:
                self._check_whole(attempt, verdict.files)
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
                verdict = self._understood(data, attempt)
            except UncommittedError as error:
                unreadable[attempt] = str(error)
                continue
            if verdict.made is not None:
                self._known[attempt] = verdict
        self._unread = set(unreadable)
        return any(attempt.verdict not in found for attempt in unknown), unreadable

    def _understood(self, data: bytes, attempt: Attempt) -> Verdict:
        try:
            return _understood(data, attempt, self.path(attempt))
        except UncommittedError:
            # The first read may have been at fault.
            return _understood(self._found(attempt) or data, attempt, self.path(attempt))

    def entries(self) -> list[Entry]:
        """Return all committed attempts, damaged ones as well, oldest commit first.

        Attempts whose verdict cannot be read come before all others.

        Raises:
            LaterVersionError: there is one of a later version of Muster.
            OSError: the store does not answer.
        """
        judged = _verdicts(self._objects.names())
        _, unreadable = self._read_all(judged)
        found = [
            Entry(attempt, None, {}, Damage(attempt.verdict, why), KEPT in self._objects.sizes(attempt.name))
            for attempt, why in unreadable.items()
        ]
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
            found.append(Entry(attempt, verdict.made, verdict.files, damage, KEPT in there))
        return found

    def mark_damaged(self, attempt: Attempt, damage: Damage) -> None:
        """Record durably that a checkpoint is damaged: no later life resumes from it."""
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
        """What a checkpoint is.

        Args:
            name: the last part of its path.

        Raises:
            UncommittedError: it is none.
            OSError: the store does not answer.
        """
        attempt = Attempt.named(name)
        try:
            if attempt is None:
                raise UncommittedError("no save has such a name")
            verdict = self._read(attempt)
            if verdict.made is None:
                raise UncommittedError("it was abandoned, and is being removed")
            self._check_whole(attempt, verdict.files)
        except FileNotFoundError:
            raise self._none(name, "it was not committed") from None
        except UncommittedError as error:
            raise self._none(name, str(error)) from error
        return verdict.made

    def _none(self, name: str, why: str) -> UncommittedError:
        last = self.latest()
        there = last.path if last is not None else "none"
        return UncommittedError(
            f"{self.url}/{name} is not a committed checkpoint: {why}. A save that was not finished, or that "
            f"another program wrote, is not loaded; the last committed one here is {there}."
        )

    def _read(self, attempt: Attempt) -> Verdict:
        return _understood(self._objects.get(attempt.verdict), attempt, self.path(attempt))

    def _found(self, attempt: Attempt) -> bytes | None:
        try:
            return self._objects.get(attempt.verdict)
        except FileNotFoundError:
            return None

    # ------------------------------------------------------------------ removal

    def check_kind(self) -> None:
        """See that nobody has put checkpoints there that this protocol knows nothing of.

        Raises:
            UncommittedError: someone has.
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
        """Remove what failed saves have left, and all but the checkpoints committed last.

        Args:
            keep_last: how many checkpoints to keep; None keeps all.
            decided: the last save of this job that is decided: what is later is still being written. None:
                nothing is being written, by any job.
            used: checkpoints that are being loaded, and stay.
            excluded: paths of damaged checkpoints that could not be marked, and do not count.

        Raises:
            OSError: the store does not answer. The next sweep goes on.
        """
        names = self._objects.names()
        begun = _folders(names) | _folders(f"{name}/" for name in self._objects.uploads())
        judged = _verdicts(names)
        self._known = {attempt: verdict for attempt, verdict in self._known.items() if attempt in judged}
        for attempt in sorted(begun - judged):
            if self._is_over(attempt, decided):
                self._abandon(attempt)
        self._look_at(judged - self._known.keys(), begun)
        if keep_last is not None:
            self._retain(keep_last, used, excluded)
        self._objects.remove(name for name in sorted(names) if decided is not None and name.startswith(PROBE))

    def _is_over(self, attempt: Attempt, decided: SaveAttempt | None) -> bool:
        return decided is None or (attempt.run == self._run and attempt.life <= decided)

    def _look_at(self, judged: Set[Attempt], begun: Set[Attempt]) -> None:
        """At verdicts that another process, or an earlier life of this one, has made."""
        found = self._objects.get_all([attempt.verdict for attempt in sorted(judged)])
        self._unread = set()
        for attempt in sorted(judged):
            data = found.get(attempt.verdict)
            if data is None:
                continue  # It was just removed.
            try:
                verdict = _understood(data, attempt, self.path(attempt))
            except (UncommittedError, LaterVersionError) as error:
                self._unread.add(attempt)
                logger.warning("%s is left as it is: %s", self.path(attempt), error)
                continue
            if verdict.made is not None and attempt in begun:
                self._known[attempt] = verdict
            elif verdict.made is None or not self._objects.sizes(attempt.name):
                # Who was removing it was killed; or its verdict came when it had been removed.
                self._clear(attempt)

    def _retain(self, keep_last: int, used: Collection[Path | str], excluded: Collection[str]) -> None:
        """Keep the last that are whole. What is not can still be mended, and is left if it is not older."""
        newer = 0
        for attempt in self._by_commit(self._known, newest_first=True):
            if newer == keep_last:
                if self.path(attempt) not in used and KEPT not in self._objects.sizes(attempt.name):
                    self._retire(attempt)
                continue
            if self.path(attempt) in excluded:
                continue
            try:
                # Somebody may have marked it since it was seen whole.
                self._check_whole(attempt, self._known[attempt].files)
                newer += 1
            except UncommittedError as error:
                logger.warning("%s is left as it is: %s", self.path(attempt), error)

    def _abandon(self, attempt: Attempt) -> None:
        """Decide that it will not be committed, unless it is already."""
        if self._objects.create(attempt.verdict, _ABANDONED) or self._found(attempt) == _ABANDONED:
            self._clear(attempt)

    def _retire(self, attempt: Attempt) -> None:
        """A checkpoint: first it is none any more."""
        self._objects.remove([attempt.verdict])
        del self._known[attempt]
        self._clear(attempt)

    def _clear(self, attempt: Attempt) -> None:
        """Remove it; its verdict, which keeps others from committing it, at last."""
        self._objects.abort_uploads(attempt.name)
        self._objects.remove(f"{attempt.name}/{name}" for name in self._objects.sizes(attempt.name))
        if left := self._objects.sizes(attempt.name):
            # Still written by one who does not know, or kept by the store: until the next sweep.
            logger.warning("%s: %d objects are not removed yet", self.path(attempt), len(left))
            return
        self._objects.remove([attempt.verdict])


# ---------------------------------------------------------------------- names


def _folders(names: Iterable[str]) -> set[Attempt]:
    """The attempts that have objects below their names."""
    return _named(name.removesuffix("/") for name in names if name.endswith("/"))


def _verdicts(names: Iterable[str]) -> set[Attempt]:
    """The attempts that have verdicts."""
    return _named(name.removesuffix(VERDICT) for name in names if name.endswith(VERDICT))


def _named(names: Iterable[str]) -> set[Attempt]:
    return {attempt for attempt in map(Attempt.named, names) if attempt is not None}


# ---------------------------------------------------------------------- verdicts


def _written(made: Committed, files: Mapping[str, int]) -> bytes:
    return seal({"verdict": COMMITTED, **made.fields(), "files": dict(files)})


_ABANDONED = seal({"verdict": ABANDONED})


def _understood(data: bytes, attempt: Attempt, path: str) -> Verdict:
    try:
        said = unseal(data, f"{path}{VERDICT}")
        verdict = said.pop("verdict")
        if verdict == ABANDONED and not said:
            return Verdict(None, {})
        files = said.pop("files")
        made = committed_from(said, path)
        if verdict != COMMITTED or made.step != attempt.step:
            raise ValueError(f"it says that it is {verdict}, step {made.step}")
        if not all(type(name) is str and type(size) is int for name, size in files.items()):
            raise ValueError("its files are not named with their sizes")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UncommittedError(f"{path}{VERDICT} cannot be read: {error!r}") from error
    return Verdict(made, files)
