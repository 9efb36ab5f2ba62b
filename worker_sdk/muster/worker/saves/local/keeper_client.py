"""The requests of a rank to the keeper of its node, over HTTP on the loopback interface."""

import base64
import http.client
import json
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.local_folder import attempt_name, parse_attempt
from muster.worker.saves.local.folder import RunningKeeper
from muster.worker.saves.local.keeper_process import KeeperError
from muster.worker.saves.local.level import Level
from muster.worker.saves.local.remote_file import RemotePlace, can_read

logger = logging.getLogger(__name__)

LOOK_TIMEOUT = 5.0
"""Longest time in seconds for the answer to a check that the keeper runs."""
FIRST_PAUSE, MAX_PAUSE = 0.05, 1.0
"""Seconds between two attempts; each is twice as long as the one before."""
FETCH_PATIENCE = 30.0
"""Seconds in which nodes that have a file may come back, before all ranks ask for another decision."""
WARN_AFTER = 10.0
"""Seconds after which a rank logs what it waits for."""


class KeeperFinder(Protocol):
    """Finds the keeper of this node."""

    def find(self, timeout: float) -> RunningKeeper:
        """Return a keeper that answers; start one if none runs."""


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint of which the keeper has parts."""

    attempt: SaveAttempt
    step: int
    level: Level | None


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    said: Mapping[str, Any]

    @property
    def error(self) -> str:
        return str(self.said.get("error", f"HTTP status {self.status}"))


class KeeperClient:
    """Asks the keeper of this node. Threads may share it.

    Every request may be sent again. So a request whose keeper ends is sent to the next one, which is started
    for it.

    Args:
        finder: finds the keeper, or starts it.
    """

    def __init__(self, finder: KeeperFinder) -> None:
        self._finder = finder
        self._lock = threading.Lock()
        self._running: RunningKeeper | None = None
        self._idle: list[http.client.HTTPConnection] = []
        """Open connections to it that no thread uses."""

    def attach(self, generation: int, world_size: int, rank: int, replicas: int, timeout: float) -> str:
        """Tell the keeper that it keeps the parts of this rank; return when the coordinator knows.

        Returns:
            The keeper's id.

        Raises:
            KeeperError: the keeper is not there, or does not reach the coordinator in time.
        """
        body = {
            "generation": generation,
            "world_size": world_size,
            "rank": rank,
            "replicas": replicas,
        }
        return str(self._ask("POST", "/attach", body, timeout).said["id"])

    def take(self, attempt: SaveAttempt, notes: Sequence[tuple[int, str]], timeout: float) -> list[bytes]:
        """Return the notes that ranks have left for a save.

        Args:
            attempt: the save.
            notes: each with the rank that left it.
            timeout: seconds.

        Raises:
            FileNotFoundError: one is not there.
            KeeperError: they cannot be fetched.
        """
        answer = self._ask(
            "POST", "/take", {"attempt": attempt_name(attempt), "notes": list(notes)}, timeout, absent=True
        )
        if answer.status == http.client.NOT_FOUND:
            raise FileNotFoundError(answer.error)
        return [base64.b64decode(note) for note in answer.said["notes"]]

    def find(
        self, attempt: SaveAttempt, name: str, timeout: float, *, damaged: bool = False, pieces: bool = True
    ) -> Path | RemotePlace:
        """Return where a file of a checkpoint is, verified.

        A file of this node's own part is fetched if it is not here. Others may stay where they are.

        Args:
            attempt: the checkpoint.
            name: the file's path in it.
            timeout: seconds.
            damaged: whether this rank has read wrong bytes from it: the keeper must not trust what it has.
            pieces: whether it may be on another node, so that this rank reads the pieces that it needs.

        Raises:
            FileNotFoundError: no keeper has it whole; the message says why.
            KeeperError: it cannot be fetched in time.
        """
        body: dict[str, Any] = {"attempt": attempt_name(attempt), "name": name, "pieces": pieces}
        if damaged:
            body["verify"] = True
        answer = self._ask("POST", "/fetch", body, timeout, absent=True, patience=FETCH_PATIENCE)
        if answer.status in (http.client.NOT_FOUND, http.client.GONE):
            raise FileNotFoundError(answer.error)
        if "path" in answer.said:
            return Path(answer.said["path"])
        urls = tuple(map(str, answer.said["urls"]))
        if not can_read(urls):
            return self.find(attempt, name, timeout, damaged=damaged, pieces=False)
        return RemotePlace(urls, str(answer.said["token"]))

    def checkpoints(self, timeout: float) -> list[KeptCheckpoint]:
        """Return the checkpoints of which the keeper has parts.

        Raises:
            KeeperError: it does not answer.
        """
        said = self._ask("GET", "/status", None, timeout).said
        return [
            KeptCheckpoint(parse_attempt(one["attempt"]), int(one["step"]), _level(one.get("level")))
            for one in said["checkpoints"]
            if one["step"] is not None  # Else the coordinator has not told the keeper of it.
        ]

    @property
    def running(self) -> RunningKeeper | None:
        """The keeper that was found last; None if it has failed since."""
        return self._running

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # ------------------------------------------------------------------ sending

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout: float,
        *,
        absent: bool = False,
        patience: float = math.inf,
    ) -> _Answer:
        """Send a request until it is carried out.

        Args:
            method: HTTP's.
            path: in the keeper's URL.
            body: sent as JSON; None: nothing.
            timeout: seconds.
            absent: whether the keeper may answer that something is not there.
            patience: seconds for further attempts after the first that fails.

        Raises:
            KeeperError: it is not carried out in time, or the keeper refuses it.
        """
        began = time.monotonic()
        deadline, pause, warned = began + timeout, FIRST_PAUSE, False
        while True:
            left = deadline - time.monotonic()
            try:
                answer = self._send(method, path, body, max(left, FIRST_PAUSE))
                why = answer.error
            except (OSError, http.client.HTTPException, ValueError) as error:
                answer, why = None, f"{type(error).__name__}: {error}"
                self._drop()
            if answer is not None and answer.status != http.client.SERVICE_UNAVAILABLE:
                return self._checked(answer, path, absent=absent)
            deadline, patience = min(deadline, time.monotonic() + patience), math.inf
            if time.monotonic() + pause >= deadline:
                raise KeeperError(
                    f"this node's keeper did not carry out {path} for {time.monotonic() - began:.0f} s: "
                    f"{why}. See its log, keeper.log in the local folder."
                )
            if not warned and time.monotonic() - began >= WARN_AFTER:
                warned = True
                logger.warning("this node's keeper has not carried out %s yet: %s", path, why)
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    def _checked(self, answer: _Answer, path: str, *, absent: bool) -> _Answer:
        if answer.status == http.client.OK:
            return answer
        if absent and answer.status in (http.client.NOT_FOUND, http.client.GONE):
            return answer
        raise KeeperError(f"this node's keeper refused {path}: {answer.error}")

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> _Answer:
        running = self._find(timeout)
        connection = self._connection(running, timeout)
        try:
            answer = _exchange(connection, running, method, path, body)
        except BaseException:
            connection.close()
            raise
        if answer.status == http.client.UNAUTHORIZED:
            connection.close()
            raise ConnectionError(f"{running.url} is not this node's keeper any more")
        with self._lock:
            if self._running == running:
                self._idle.append(connection)
                return answer
        connection.close()
        return answer

    def _find(self, timeout: float) -> RunningKeeper:
        with self._lock:
            running = self._running
        if running is None:
            running = self._finder.find(timeout)  # It takes long: other threads may find it, too.
            with self._lock:
                self._running = running
        return running

    def _connection(self, running: RunningKeeper, timeout: float) -> http.client.HTTPConnection:
        with self._lock:
            known = self._idle.pop() if self._idle and self._running == running else None
        if known is None:
            return _open(running, timeout)
        known.timeout = timeout
        if known.sock is not None:
            known.sock.settimeout(timeout)
        return known

    def _drop(self) -> None:
        """Forget the keeper and its idle connections, since it may have ended."""
        with self._lock:
            self._running = None
        self.close()


def is_answered(running: RunningKeeper) -> bool:
    """Return whether a keeper answers now."""
    connection = _open(running, LOOK_TIMEOUT)
    try:
        answer = _exchange(connection, running, "GET", "/status", None)
        return answer.status == http.client.OK and answer.said.get("id") == running.id
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def _open(running: RunningKeeper, timeout: float) -> http.client.HTTPConnection:
    address = urlsplit(running.url)
    return http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout)


def _exchange(
    connection: http.client.HTTPConnection,
    running: RunningKeeper,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
) -> _Answer:
    """Send a request, and read all of its answer.

    Raises:
        OSError: the connection fails.
        HTTPException: the answer is not HTTP.
        ValueError: it is not JSON.
    """
    headers = {"Authorization": f"Bearer {running.token}"}
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    connection.request(method, path, data, headers)
    with connection.getresponse() as response:
        answered = response.read()
    said = json.loads(answered) if answered else {}
    if not isinstance(said, dict):
        raise ValueError(f"the answer is not an object: {answered[:100]!r}")
    return _Answer(response.status, said)


def _level(said: object) -> Level | None:
    """Return a level as the keeper names it: in lower case."""
    return next((level for level in Level if str(level) == said), None)
