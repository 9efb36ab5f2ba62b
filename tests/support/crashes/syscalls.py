"""The system calls of running processes, recorded by strace and read back.

A program that is recorded stands still until :class:`Recording` has begun, and then calls what it calls. Each
process that it forks is recorded as well.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.patience import PATIENCE, until
from lab.processes.tools import tool

ROOT = Path(__file__).parents[3]
FILE_CALLS = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,copy_file_range,sendfile,lseek,truncate,ftruncate,"
    "fsync,fdatasync,sync,syncfs,sync_file_range,rename,renameat,renameat2,mkdir,mkdirat,link,linkat,symlink,"
    "symlinkat,unlink,unlinkat,rmdir"
)
"""Everything that changes files or directories, or puts them on the disk."""


@dataclass(frozen=True, slots=True)
class Call:
    """One system call that did not fail."""

    began: float
    """Seconds of Unix time."""
    ended: float
    name: str
    arguments: tuple[str, ...]
    """As strace prints them."""
    result: int
    opened: str = ""
    """The path of the file descriptor that it returned."""

    def path(self, number: int, base: int | None = None) -> str:
        """Return the path that an argument is, or that its file descriptor stands for.

        Args:
            number: of the argument.
            base: of the argument that a relative path starts from.
        """
        text = self.arguments[number]
        if (found := _DESCRIPTOR.fullmatch(text)) is not None:
            return _text(found[1])
        path = _bytes(text).decode()
        return path if base is None or path.startswith("/") else f"{self.path(base)}/{path}"

    def data(self, number: int) -> bytes:
        """Return the bytes that an argument is, or all of its buffers."""
        return b"".join(_decoded(one[1]) for one in _STRING.finditer(self.arguments[number]))

    def number(self, number: int) -> int:
        """Return the number that an argument is."""
        return int(self.arguments[number], 0)

    def flags(self, number: int) -> set[str]:
        """Return the flags that an argument consists of."""
        return set(self.arguments[number].split("|"))


class Recording:
    """Records the system calls on files of a process, and of all that it forks, until they have ended.

    Args:
        pid: the process.
        path: where strace writes.
    """

    def __init__(self, pid: int, path: Path) -> None:
        self._pid = pid
        self._path = path

    def __enter__(self) -> "Recording":
        command = [
            tool("strace", "strace"),
            "--follow-forks",
            "--decode-fds=path",
            "--absolute-timestamps=format:unix,precision:us",
        ]
        command += ["--syscall-times=us", "--strings-in-hex=all", f"--string-limit={2**24}"]
        command += [f"--trace={FILE_CALLS}", f"--output={self._path}", f"--attach={self._pid}"]
        said = self._path.with_suffix(".said")
        with said.open("w") as errors:
            self._process: subprocess.Popen[Any] = subprocess.Popen(command, stderr=errors)
        until(
            lambda: "attached" in said.read_text() or self._process.poll() is not None,
            lambda: f"strace does not attach: {said.read_text()}",
        )
        assert self._process.poll() is None, f"strace cannot attach: {said.read_text()}"
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # It ends when the last of the processes has.
            self._process.wait(PATIENCE if kind is None else 0)
        finally:
            self._process.kill()
            self._process.wait()

    def calls(self) -> list[Call]:
        """Return the calls, in the order in which they ended."""
        with self._path.open() as lines:
            return sorted(parsed(lines), key=lambda call: call.ended)


# ---------------------------------------------------------------------- strace's output

_LINE = re.compile(r"(\d+)\s+(\d+\.\d+) (.*)")
_UNFINISHED = re.compile(r"(.*?)\s*<unfinished \.\.\.>")
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)")
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+|\?)(?:<([^>]*)>)?(?: [A-Z(].*?)?(?: <(\d+\.\d+)>)?")
_DESCRIPTOR = re.compile(r"(?:-?\d+|AT_FDCWD)<([^>]*)>(?:\(deleted\))?")
_STRING = re.compile(r'"([^"]*)"')


def parsed(lines: Sequence[str] | Iterator[str]) -> Iterator[Call]:
    """Read what strace has written: calls of several threads, whose beginnings and ends are interleaved.

    Raises:
        ValueError: strace writes no such line.
    """
    begun: dict[str, tuple[float, str]] = {}
    for line in lines:
        found = _LINE.fullmatch(line.rstrip("\n"))
        if found is None:
            raise ValueError(f"strace wrote {line!r}")
        thread, at, rest = found[1], float(found[2]), found[3]
        if rest.startswith(("+++", "---")):  # It has ended, or has a signal.
            continue
        if (unfinished := _UNFINISHED.fullmatch(rest)) is not None:
            begun[thread] = at, unfinished[1]
            continue
        began, resumed = at, _RESUMED.fullmatch(rest)
        if resumed is not None:
            began, first = begun.pop(thread)
            rest = first + resumed[1]
        call = _CALL.fullmatch(rest)
        if call is None:
            raise ValueError(f"strace wrote {line!r}")
        if call[3] == "?" or int(call[3]) < 0:
            continue
        ended = at if resumed is not None else began + float(call[5] or 0)
        yield Call(began, ended, call[1], tuple(_arguments(call[2])), int(call[3]), _text(call[4] or ""))


def _arguments(text: str) -> Iterator[str]:
    """Split at the commas outside of lists and structures; strings and paths are in hexadecimal digits."""
    depth, begin = 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            yield text[begin:at].strip()
            begin = at + 1
    if text:
        yield text[begin:].strip()


def _bytes(text: str) -> bytes:
    found = _STRING.fullmatch(text)
    if found is None:
        raise ValueError(f"{text} is not a whole string")
    return _decoded(found[1])


def _decoded(digits: str) -> bytes:
    return bytes.fromhex(digits.replace("\\x", ""))


def _text(digits: str) -> str:
    return _decoded(digits).decode() if digits.startswith("\\x") else digits
