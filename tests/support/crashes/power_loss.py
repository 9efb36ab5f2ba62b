"""A model of a file system, and of what a loss of power may leave of it.

It is replayed from the system calls that changed it. It promises what POSIX does, and no more:

- What was written to a file may be lost, cut short or read as zeros, until its writer's machine has
  synced it.
- That a name was made, moved or removed may be lost, until the directory that has the new name was synced.
  Of several such changes any may be lost: a rename as a whole, and each by itself.

Each rank counts as a machine of its own, so that one rank's sync puts nothing on the disk that another has
written to a file. Names are the file server's: any rank's sync of a directory counts.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tests.support.crashes.syscalls import Call

MARKS = ".marks"
"""How the name ends of a file that is written to say something to the test."""
MAX_EXHAUSTIVE = 4
"""Changes of names of which every subset is tried."""


@dataclass(eq=False)
class File:
    """A file, whatever its names are."""

    content: bytes = b""
    """As every process sees it."""


@dataclass(eq=False)
class Directory:
    """A directory."""

    entries: dict[str, "File | Directory"] = field(default_factory=dict)


Node = File | Directory


@dataclass(frozen=True, slots=True)
class Wrote:
    """Bytes were written to a file, or it was cut."""

    file: File
    host: int
    offset: int
    data: bytes
    cut: bool = False
    """Whether the file ends there instead."""


@dataclass(frozen=True, slots=True)
class Named:
    """A name was made, removed, or moved."""

    node: Node
    removed: tuple[Directory, str] | None
    added: tuple[Directory, str] | None

    @property
    def durable_with(self) -> Directory:
        """Return the directory whose sync puts this on the disk."""
        changed = self.added or self.removed
        assert changed is not None
        return changed[0]


@dataclass(frozen=True, slots=True)
class Synced:
    """A file or directory was put on the disk."""

    node: Node | None
    """None: all there is."""
    host: int
    began: int
    """So many events had happened when the sync began."""


@dataclass(frozen=True, slots=True)
class Said:
    """A rank has said something to the test."""

    host: int
    text: str


Event = Wrote | Named | Synced | Said


class Fate(Enum):
    """What becomes of the bytes of a file that are not on the disk."""

    KEPT = "kept"
    LOST = "lost"
    ZEROS = "the size is kept, and not the bytes"
    CUT = "half of them are kept"


@dataclass(frozen=True, slots=True)
class Image:
    """What is on the disk after a loss of power: files by their paths, and directories as None."""

    content: Mapping[str, bytes | None]

    @property
    def key(self) -> bytes:
        """The same for the same content."""
        digest = hashlib.blake2b(digest_size=16)
        for path, data in sorted(self.content.items()):
            digest.update(repr((path, None if data is None else hashlib.blake2b(data).digest())).encode())
        return digest.digest()

    def write(self, folder: Path) -> None:
        """Make it real, in a folder that is empty."""
        for path, data in sorted(self.content.items()):
            if data is None:
                (folder / path).mkdir()
            else:
                (folder / path).write_bytes(data)


class NotMadeError(AssertionError):
    """A call needs a file or a directory that no call before it has made."""


class History:
    """What happened to a folder.

    Args:
        root: the folder. It was empty and on the disk when the recording began.
        calls: by rank, its system calls.
    """

    def __init__(self, root: Path, calls: Mapping[int, Iterable[Call]]) -> None:
        self._path = str(root)
        self._root = Directory()
        self.events: list[Event] = []
        self._ends: list[float] = []
        self._offsets: dict[tuple[int, str, str], int] = {}
        self._contents: dict[tuple[int, File, tuple[tuple[int, Fate], ...]], bytes] = {}
        merged = sorted(
            ((call, host) for host, made in calls.items() for call in made), key=lambda one: one[0].ended
        )
        early: list[tuple[Call, int, NotMadeError]] = []
        """Calls that need what another strace saw made, which seems to have ended after them."""
        for call, host in merged:
            if (missing := self._missing_for(call, host)) is not None:
                early.append((call, host, missing))
                continue
            waiting, early = early, []
            for one, its, error in waiting:
                if one.ended <= call.began or self._missing_for(one, its) is not None:
                    early.append((one, its, error))
        if early:
            raise early[0][2]

    # ------------------------------------------------------------------ replaying

    def _missing_for(self, call: Call, host: int) -> NotMadeError | None:
        """Replay a call, unless what it needs is not made yet."""
        try:
            self._replay(call, host)
        except NotMadeError as error:
            return error
        self._ends += [call.ended] * (len(self.events) - len(self._ends))
        return None

    def _replay(self, call: Call, host: int) -> None:
        if call.name in ("open", "openat", "creat"):
            self._open(call, host)
        elif call.name in ("write", "pwrite64", "writev", "pwritev", "pwritev2"):
            self._write(call, host)
        elif call.name == "lseek":
            self._offsets[self._descriptor(call, host)] = call.result
        elif call.name in ("ftruncate", "truncate"):
            if isinstance(file := self._find(call.path(0)), File):
                self._change(Wrote(file, host, call.number(1), b"", cut=True))
        elif call.name in ("fsync", "fdatasync", "syncfs", "sync"):
            self._sync(call, host)
        elif call.name in ("rename", "renameat", "renameat2"):
            at = call.name != "rename"
            self._rename(call.path(1, 0) if at else call.path(0), call.path(3, 2) if at else call.path(1))
        elif call.name in ("mkdir", "mkdirat"):
            self._link(call.path(1, 0) if call.name == "mkdirat" else call.path(0), Directory())
        elif call.name in ("unlink", "rmdir", "unlinkat"):
            self._unlink(call.path(1, 0) if call.name == "unlinkat" else call.path(0))
        elif call.name in ("link", "linkat"):
            old, new = (
                (call.path(1, 0), call.path(3, 2)) if call.name == "linkat" else (call.path(0), call.path(1))
            )
            if (node := self._find(old)) is not None:
                self._link(new, node)
        elif call.name != "sync_file_range":  # It promises nothing after a loss of power.
            paths = [_bare(call.path(number)) for number in range(2)]
            assert not any(self._inside(path) for path in paths), f"the model does not know {call}"

    def _open(self, call: Call, host: int) -> None:
        path = call.opened
        if not self._inside(path):
            return
        flags = (
            call.flags(2 if call.name == "openat" else 1) if call.name != "creat" else {"O_CREAT", "O_TRUNC"}
        )
        node = self._find(path)
        if node is None:
            if "O_CREAT" not in flags:
                raise NotMadeError(f"{path} was opened, and nobody has made it")
            node = File()
            self._link(path, node)
        if isinstance(node, File):
            if "O_TRUNC" in flags and node.content:
                self._change(Wrote(node, host, 0, b"", cut=True))
            number = str(call.result)
            self._offsets[host, number, path] = len(node.content) if "O_APPEND" in flags else 0

    def _write(self, call: Call, host: int) -> None:
        path, data = call.path(0), call.data(1)[: call.result]
        if path.endswith(MARKS):
            self.events.append(Said(host, data.decode().strip()))
        elif isinstance(file := self._find(path), File):
            key = self._descriptor(call, host)
            offset = call.number(3) if call.name.startswith("p") else self._offsets.get(key, 0)
            self._change(Wrote(file, host, offset, data))
            if not call.name.startswith("p"):
                self._offsets[key] = offset + len(data)

    def _sync(self, call: Call, host: int) -> None:
        node = None if call.name in ("sync", "syncfs") else self._find(call.path(0))
        if node is not None or call.name in ("sync", "syncfs"):
            began = sum(ended <= call.began for ended in self._ends)
            self.events.append(Synced(node, host, began))

    def _change(self, wrote: Wrote) -> None:
        wrote.file.content = _after(wrote.file.content, wrote)
        self.events.append(wrote)

    def _link(self, path: str, node: Node) -> None:
        if self._inside(path):
            self._name(Named(node, None, self._place(path)))

    def _unlink(self, path: str) -> None:
        if (node := self._find(path)) is not None:
            self._name(Named(node, self._place(path), None))

    def _rename(self, old: str, new: str) -> None:
        node = self._find(old)
        assert self._inside(old) == self._inside(new), f"{old} was renamed to {new}, across the folder's edge"
        if node is not None:
            self._name(Named(node, self._place(old), self._place(new)))

    def _name(self, named: Named) -> None:
        _apply(named, lambda directory: directory.entries)
        self.events.append(named)

    def _inside(self, path: str) -> bool:
        return path.startswith(f"{self._path}/") and not path.endswith(MARKS)

    def _find(self, path: str) -> Node | None:
        """Return what has a path now; None if it is elsewhere, or has no name any more."""
        if path == self._path:
            return self._root
        if not self._inside(path):
            return None
        node: Node | None = self._root
        for part in path.removeprefix(f"{self._path}/").split("/"):
            node = node.entries.get(part) if isinstance(node, Directory) else None
        return node

    def _place(self, path: str) -> tuple[Directory, str]:
        folder, _, name = path.rpartition("/")
        parent = self._find(folder)
        if not isinstance(parent, Directory):
            raise NotMadeError(f"{path} has a name in a directory that nobody has made")
        return parent, name

    def _descriptor(self, call: Call, host: int) -> tuple[int, str, str]:
        path = call.path(0)
        return host, call.arguments[0].partition("<")[0], path

    # ------------------------------------------------------------------ loss of power

    def said(self, point: int) -> list[str]:
        """Return what ranks had said before some event."""
        return [event.text for event in self.events[:point] if isinstance(event, Said)]

    def points(self) -> list[int]:
        """Return before which events there may be most on the disk or least, or a rank had said something.

        Between these there are only changes, each of which may be lost.
        """
        found = [number for number, event in enumerate(self.events) if isinstance(event, Synced | Said)]
        return [*found, len(self.events)]

    def image(self, point: int) -> Image:
        """Return what every process saw before some event."""
        return self._image(point, set(), {})

    def images(self, point: int, chance: random.Random, samples: int) -> Iterator[Image]:
        """Return what a loss of power before some event may leave.

        Args:
            point: the event's number.
            chance: draws samples where there are too many.
            samples: how many of these.
        """
        names, files = self._uncertain(point)
        for lost in _subsets(names, chance, samples):
            for fate in Fate if files else [Fate.KEPT]:
                yield self._image(point, lost, dict.fromkeys(files, fate))
        for one in files:
            for fate in (Fate.LOST, Fate.ZEROS, Fate.CUT):
                yield self._image(point, set(), {one: fate})
            yield self._image(point, set(), dict.fromkeys(files, Fate.LOST) | {one: Fate.KEPT})
        for _ in range(samples if files else 0):
            lost = {name for name in names if chance.random() < 0.3}
            yield self._image(point, lost, {file: chance.choice(list(Fate)) for file in files})

    def _uncertain(self, point: int) -> tuple[list[int], list[tuple[File, int]]]:
        """Return the changes of names, and the files by the host that wrote, that are not on the disk."""
        names: dict[int, Named] = {}
        files: dict[tuple[File, int], int] = {}
        for number, event in enumerate(self.events[:point]):
            if isinstance(event, Named):
                names[number] = event
            elif isinstance(event, Wrote):
                files[event.file, event.host] = number
            elif isinstance(event, Synced):
                names = {
                    one: named
                    for one, named in names.items()
                    if one >= event.began or event.node not in (None, named.durable_with)
                }
                files = {
                    key: last
                    for key, last in files.items()
                    if last >= event.began
                    or (event.node is not None and (event.node is not key[0] or event.host != key[1]))
                }
        # What nobody can reach any more is of no consequence.
        removed = {
            event.node
            for number, event in enumerate(self.events[:point])
            if isinstance(event, Named) and event.added is None and number not in names
        }
        reached = [number for number, named in names.items() if named.durable_with not in removed]
        return reached, [key for key in files if key[0] not in removed]

    def _image(self, point: int, lost: Collection[int], fates: Mapping[tuple[File, int], Fate]) -> Image:
        """Build what is left if some changes of names are lost, and the files fare so."""
        entries: dict[int, dict[str, Node]] = {}
        for number, event in enumerate(self.events[:point]):
            if isinstance(event, Named) and number not in lost:
                if event.removed and event.added:  # An earlier rename of it may have been lost.
                    _forget(event.node, entries.values())
                _apply(event, lambda directory: entries.setdefault(id(directory), {}))
        content: dict[str, bytes | None] = {}
        pending: list[tuple[str, Node]] = [("", self._root)]
        while pending:
            path, node = pending.pop()
            if isinstance(node, File):
                content[path] = self._content(point, node, fates)
                continue
            if path:
                content[path] = None
            prefix = f"{path}/" if path else ""
            pending += [(prefix + name, one) for name, one in entries.get(id(node), {}).items()]
        return Image(content)

    def _content(self, point: int, file: File, fates: Mapping[tuple[File, int], Fate]) -> bytes:
        own = tuple((host, fate) for (one, host), fate in fates.items() if one is file)
        if (point, file, own) not in self._contents:
            self._contents[point, file, own] = self._replayed(point, file, dict(own))
        return self._contents[point, file, own]

    def _replayed(self, point: int, file: File, fates: Mapping[int, Fate]) -> bytes:
        unsynced = self._unsynced(point, file)
        content = b""
        for number, event in enumerate(self.events[:point]):
            if not isinstance(event, Wrote) or event.file is not file:
                continue
            fate = fates.get(event.host, Fate.KEPT) if number in unsynced else Fate.KEPT
            if fate is Fate.LOST:
                continue
            if fate is Fate.ZEROS:
                event = Wrote(file, event.host, event.offset, bytes(len(event.data)), event.cut)
            if fate is Fate.CUT:
                event = Wrote(file, event.host, event.offset, event.data[: len(event.data) // 2], event.cut)
            content = _after(content, event)
        return content

    def _unsynced(self, point: int, file: File) -> set[int]:
        found: dict[int, int] = {}
        for number, event in enumerate(self.events[:point]):
            if isinstance(event, Wrote) and event.file is file:
                found[number] = event.host
            elif isinstance(event, Synced):
                found = {
                    one: host
                    for one, host in found.items()
                    if one >= event.began
                    or (event.node is not None and (event.node is not file or event.host != host))
                }
        return set(found)


def _bare(path: str) -> str:
    return path.removesuffix(" (deleted)")


def _after(content: bytes, wrote: Wrote) -> bytes:
    if wrote.cut:
        return content[: wrote.offset].ljust(wrote.offset, b"\0")
    end = wrote.offset + len(wrote.data)
    return content[: wrote.offset].ljust(wrote.offset, b"\0") + wrote.data + content[end:]


def _apply(named: Named, entries: Callable[[Directory], dict[str, Node]]) -> None:
    """Change names where they are kept. A rename that was lost before leaves its node where it was."""
    if named.removed is not None:
        directory, name = named.removed
        if entries(directory).get(name) is named.node:
            del entries(directory)[name]
    if named.added is not None:
        directory, name = named.added
        entries(directory)[name] = named.node


def _forget(node: Node, directories: Iterable[dict[str, Node]]) -> None:
    for entries in directories:
        for name in [name for name, one in entries.items() if one is node]:
            del entries[name]


def _subsets(changes: Sequence[int], chance: random.Random, samples: int) -> list[set[int]]:
    """Return which changes may be lost, all combinations if they are few."""
    if len(changes) <= MAX_EXHAUSTIVE:
        counts = range(len(changes) + 1)
        return [set(lost) for count in counts for lost in itertools.combinations(changes, count)]
    lost = [set(changes[count:]) for count in range(len(changes) + 1)]
    lost += [{one} for one in changes]
    lost += [set(changes) - {one} for one in changes]
    return lost + [{one for one in changes if chance.random() < 0.5} for _ in range(samples)]
