"""The audit log: refused calls and changes, with their callers. Each line is a JSON object."""

import atexit
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from muster.service.security.files import FileError
from muster.service.security.grants import Grant

TO_LOG = "-"
"""Instead of a file name: the entries go to the log."""
MAX_WAITING = 10_000
"""Entries that wait for the disk. Further ones are dropped and counted."""
MAX_UNKNOWN = 100
"""Refusals of unknown callers within a :data:`WINDOW`. Further ones are dropped and counted."""
WINDOW = 10.0
"""Seconds."""
MAX_TEXT = 256
"""Characters of a text from a caller."""
MAX_KEYS = 8
"""Store keys that one entry names."""
ABOUT = (
    *("rank", "prefix", "sequence", "key", "reason", "force", "stop", "dry_run", "incarnation"),
    *("node_name", "notice_id", "only_if_spare"),
)
"""The fields of a request that its entry shows. Values of stores and payloads are never shown."""
OPEN = "OPEN"
"""The result of a stream at its begin: a session or a join. Another entry has its end."""
FORWARDED = "FORWARDED"
"""The result of a call that has passed a relay's checks. The coordinator's own entry has its outcome."""
COMMON_NAME = "x509_common_name"
"""gRPC's key for the common names of a client's certificate."""
OK = "OK"
CANCELLED = "CANCELLED"
"""The result of a call that its caller, or the end of its connection, has cancelled."""

Fields = dict[str, object]
Write = Callable[[Fields], None]


@dataclass(slots=True)
class AuditedCall:
    """The known facts about one call.

    Args:
        write: takes its entries.
        method: the path of the method.
        changes: whether the method changes something. If not, only a refusal has an entry.
        lasts: whether the call stays open after its request. Then its begin has an entry as well.
        address: the peer's address.
        certificate: the common name of the client's certificate; empty: the client showed no certificate.
    """

    write: Write
    method: str
    changes: bool
    lasts: bool
    address: str
    certificate: str = ""
    grant: Grant | None = None
    """The caller's grant; None: the caller is unknown or needs no token."""
    run_id: str = ""
    _about: Fields = field(default_factory=dict)
    _answered: bool = False
    """Whether the newest request has its entry."""

    def ask(self, request: Any) -> None:  # noqa: ANN401
        """Take note of a request."""
        self._answered = False
        self._about = {}
        if "operation" in request.DESCRIPTOR.oneofs_by_name and (name := request.WhichOneof("operation")):
            self._about["operation"] = name
            request = getattr(request, name)
        self.run_id = getattr(request, "run_id", self.run_id)[:MAX_TEXT]
        self._about |= _about(request)
        if self.lasts:
            self.open(self.run_id)

    def open(self, run_id: str) -> None:
        """Take note that the stream is open for a run."""
        self.run_id = run_id[:MAX_TEXT]
        if self.changes:
            self._entry(OPEN)

    def changed(self, run_ids: Sequence[str]) -> None:
        """Take note of the runs that the request changed. A request that changed no run has no entry.

        Watchers repeat each request every few seconds, and only the first one changes anything.
        """
        self._about["runs"] = ", ".join(run_ids)[:MAX_TEXT]
        self._answered = not run_ids

    def answer(self) -> None:
        """Take note that the request was carried out."""
        if not self.lasts:
            self.end(OK)
            self._answered = True

    def forward(self) -> None:
        """Take note that a relay passes the request on."""
        if not self.lasts:
            self.end(FORWARDED)
            self._answered = True

    def refuse(self, reason: str, message: str) -> None:
        """Write an entry for a refused call."""
        self._entry(reason, message)

    def end(self, result: str, message: str = "") -> None:
        """Write an entry for the end of the call, unless its last request was answered.

        Args:
            result: ``OK``, or the name of the status.
            message: the message to the caller.
        """
        if self.changes and not self._answered:
            self._entry(result, message)

    def _entry(self, result: str, message: str = "") -> None:
        said = {"message": message} if message else {}
        self.write(
            {
                **identity(self.grant, self.certificate),
                "from": self.address,
                "call": self.method,
                "run": self.run_id,
                **self._about,
                "result": result,
                **said,
            }
        )


CALL: ContextVar[AuditedCall | None] = ContextVar("audited_call", default=None)
"""The call of the current task; None: the coordinator has no audit log."""


def common_name(names: Mapping[str, Iterable[bytes]]) -> str:
    """Return the common name of a client's certificate; empty: it showed none.

    Args:
        names: gRPC's ``auth_context()`` of the call.
    """
    return next(iter(names.get(COMMON_NAME, ())), b"").decode("utf-8", "replace")


def identity(grant: Grant | None, certificate: str = "") -> Fields:
    """Return the fields of an entry that name the caller."""
    who: Fields = {"who": "" if grant is None else grant.name}
    if grant is not None:
        who["role"] = grant.role.name.lower()
        if grant.claims is not None:
            who["issuer"] = grant.claims.issuer
    if certificate:
        who["certificate"] = certificate
    return who


def _about(request: Any) -> Fields:  # noqa: ANN401
    known = request.DESCRIPTOR.fields_by_name
    values = {name: getattr(request, name) for name in ABOUT if name in known}
    shown: Fields = {
        name: value[:MAX_TEXT] if isinstance(value, str) else value
        for name, value in values.items()
        if isinstance(value, str | int) and value != ""
    }
    if keys := _keys(request):
        shown["keys"] = [key[:MAX_TEXT] for key in keys[:MAX_KEYS]]
    return shown


def _keys(request: Any) -> list[str]:  # noqa: ANN401
    """Return the store keys that a request changes."""
    known = request.DESCRIPTOR.fields_by_name
    if "entries" in known:
        return [entry.key for entry in request.entries]
    return list(request.keys) if "keys" in known else []


# ---------------------------------------------------------------------- where entries go


def writer(target: str) -> Write:
    """Return the function that writes entries.

    Args:
        target: a file to append to; or :data:`TO_LOG`.

    Raises:
        FileError: the file cannot be written.
    """
    return Bounded(_to_log if target == TO_LOG else AuditFile(Path(target)).write).write


class Bounded:
    """Limits the refusals of unknown callers, which could otherwise fill the disk.

    Args:
        write: takes the remaining entries, each with the number of entries dropped before it.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, write: Write, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._since = clock()
        self._written = 0
        self._left_out = 0

    def write(self, fields: Fields) -> None:
        """Write an entry, unless there were too many of its kind."""
        if fields["who"] == "" and fields["result"] not in (OK, OPEN, FORWARDED):
            now = self._clock()
            if now - self._since >= WINDOW:
                self._since, self._written = now, 0
            if self._written >= MAX_UNKNOWN:
                self._left_out += 1
                return
            self._written += 1
        left_out, self._left_out = self._left_out, 0
        self._write(fields | {"left_out": left_out} if left_out else fields)


def _to_log(fields: Fields) -> None:
    structlog.get_logger().info("audit", **fields)


class AuditFile:
    """Appends entries to a file, on a thread of its own, so that a slow disk does not delay decisions.

    It opens the file for each batch of entries, so that the file may be renamed at any time.

    Args:
        path: the file. If it is created here, only its owner may read it.

    Raises:
        FileError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lost = 0
        try:
            self._append(b"")
        except OSError as error:
            raise FileError(f"{path} cannot be written: {error.strerror or error}.") from error
        self._thread = threading.Thread(target=self._write_all, name="muster-audit", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, fields: Fields) -> None:
        """Queue an entry; never blocks."""
        if self._entries.qsize() >= MAX_WAITING:
            self._lost += 1
            return
        lost, self._lost = self._lost, 0
        counted: Fields = {"lost": lost} if lost else {}
        entry = {"time": datetime.now(UTC).isoformat(timespec="microseconds"), **fields, **counted}
        self._entries.put(json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        """Write waiting entries, for at most one second."""
        self._entries.put(None)
        self._thread.join(timeout=1)

    def _write_all(self) -> None:
        works = True
        while (entry := self._entries.get()) is not None:
            entries = [entry]
            ended = False
            while not self._entries.empty():
                entry = self._entries.get()
                if entry is None:
                    ended = True
                    break
                entries.append(entry)
            try:
                self._append(b"".join(entries))
                works = True
            except OSError as error:
                self._lost += len(entries)
                if works:
                    reason = f"{self._path} cannot be written: {error.strerror or error}"
                    structlog.get_logger().error("audit.lost", reason=reason)
                works = False
            if ended:
                return

    def _append(self, data: bytes) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            while data:
                data = data[os.write(handle, data) :]
        finally:
            os.close(handle)
