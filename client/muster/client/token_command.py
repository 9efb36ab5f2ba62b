"""Gets a token from a helper command, as kubectl and docker do."""

import base64
import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

TIMEOUT = 30.0
"""Seconds that the command may take."""
KEPT = 300.0
"""Seconds for which a token without an expiry is kept."""
MARGIN = 30.0
"""Seconds before its expiry at which a token is replaced."""


class CommandError(Exception):
    """The command gave no token. The message says why, and contains none of its output."""


@dataclass(frozen=True, slots=True)
class _Kept:
    token: str
    until: float


class TokenCommands:
    """Runs commands, and keeps their tokens until shortly before they expire.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        # Other threads wait for the token of a running command.
        self._lock = threading.Lock()

    def token(self, command: str) -> str:
        """Return a command's output, without the white space around it.

        Args:
            command: its words, quoted as for a shell; no shell runs it.

        Raises:
            CommandError: it gave none.
        """
        with self._lock:
            kept = self._kept.get(command)
            if kept is None or kept.until <= self._clock():
                token = _run(command)
                kept = self._kept[command] = _Kept(token, self._until(token))
            return kept.token

    def _until(self, token: str) -> float:
        expires_at = expiry(token)
        return self._clock() + KEPT if expires_at is None else expires_at - MARGIN

    def forget(self, command: str) -> None:
        """Run the command again at the next call, because its token was refused."""
        # An event loop may call this, so it must not wait for the lock while a command runs.
        self._kept.pop(command, None)

    def renew_lock(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may hold the old one."""
        self._lock = threading.Lock()


COMMANDS = TokenCommands()
"""The commands of this process."""
os.register_at_fork(after_in_child=COMMANDS.renew_lock)


def _run(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CommandError(f"it cannot be read as words ({error})") from None
    if not words:
        raise CommandError("it has no words")
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"{words[0]} did not end within {TIMEOUT:g} s") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise CommandError(f"{words[0]} cannot be run ({why})") from None
    if done.returncode != 0:
        raise CommandError(f"{words[0]} ended with {done.returncode}; what it said is on stderr")
    return done.stdout.decode("utf-8", "replace").strip()


def expiry(token: str) -> float | None:
    """Return when a token expires.

    Returns:
        Seconds since 1970; None for a token without ``exp``, or one that is not a JWT.
    """
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        said = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(said["exp"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
