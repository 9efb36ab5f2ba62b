"""Finds the keeper of this node, or starts it."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from muster.worker import environment
from muster.worker.errors import MusterError
from muster.worker.saves.local.folder import LocalFolder, RunningKeeper

logger = logging.getLogger(__name__)

START_TIMEOUT = 60.0
"""Seconds in which a keeper must be ready. It takes about half a second, and longer on a busy machine."""
INTERVAL = 0.05
"""Seconds between two looks."""

_children: list["subprocess.Popen[bytes]"] = []
"""The keepers that this process has started. They outlive it, so nothing waits for their end."""


class KeeperError(MusterError):
    """The keeper of this node is not there, and cannot be started; or it does not do what it was asked."""


class KeeperProcess:
    """Finds or starts the keeper of a folder.

    The ranks of a node race for it. One of them at a time may start a keeper, and the others find it.

    Args:
        folder: the keeper's.
        command: starts it; empty: ``muster keep --runs`` does so on this node.
        is_answered: whether a keeper answers, for which it may take seconds.
        environment: its variables beside those of this process.
    """

    def __init__(
        self,
        folder: LocalFolder,
        command: Sequence[str],
        is_answered: Callable[[RunningKeeper], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._command = list(command)
        self._is_answered = is_answered
        self._environment = environment or {}

    def find(self, timeout: float) -> RunningKeeper:
        """Return a keeper that answers; start one if none runs.

        Args:
            timeout: seconds to wait for it.

        Raises:
            KeeperError: no keeper answers in time; the message has the end of its log.
            OSError: it cannot be started.
        """
        timeout = min(timeout, START_TIMEOUT)
        deadline = time.monotonic() + timeout
        while (running := self._answering()) is None:
            if self._command:
                with self._folder.starting() as alone:
                    if alone and not self._folder.is_kept():
                        self._start(deadline)
            elif not self._folder.is_requested():
                self._folder.make()  # The end of a keeper has removed the folder meanwhile.
            if time.monotonic() >= deadline:
                raise self._error(f"did not answer within {timeout:g} s")
            time.sleep(INTERVAL)
        return running

    def _answering(self) -> RunningKeeper | None:
        running = self._folder.keeper()
        return running if running is not None and self._is_answered(running) else None

    def _start(self, deadline: float) -> None:
        """Start a keeper, and wait until it answers: meanwhile no other rank may look at its lock."""
        child = self._spawn()
        while self._answering() is None and time.monotonic() < deadline:
            if child.poll() is not None and not self._folder.is_kept():
                raise self._error(f"ended with exit status {child.returncode} before it was ready")
            time.sleep(INTERVAL)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        with self._folder.log.open("ab") as log:
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self._environment},
            )
        _children[:] = [one for one in _children if one.poll() is None] + [child]
        logger.info("started this node's keeper, pid %d, which logs to %s", child.pid, self._folder.log)
        return child

    def _error(self, what: str) -> KeeperError:
        if not self._command:
            return KeeperError(
                f"the keeper of {self._folder.path} {what}. {environment.KEEPER}={environment.NODE_KEEPER} "
                "says that this node has one: see whether `muster keep --runs` runs here for this run, as "
                "the same user, with the same folder, and at an address that this process reaches."
            )
        return KeeperError(
            f"the keeper of {self._folder.path} {what}. Its log, {self._folder.log}, ends: "
            f"{self._folder.log_tail()}"
        )


def keeper_command(folder: LocalFolder, run_id: str, endpoint: str, follow: int | None = None) -> list[str]:
    """Return the command that starts a keeper; empty: ``muster keep --runs`` does so on this node.

    Args:
        folder: the keeper's.
        run_id: the training job.
        endpoint: the coordinator's addresses.
        follow: the process after which it ends; default: the parent of this one, torchrun's agent.

    Raises:
        EnvironmentValueError: the environment does not say which of the two it is.
    """
    if environment.keeper() == environment.NODE_KEEPER:
        return []
    return [
        *(sys.executable, "-m", "muster.keeper"),
        *("--folder", str(folder.parent)),
        *("--run-id", run_id),
        *("--endpoint", endpoint),
        *("--follow", str(os.getppid() if follow is None else follow)),
    ]
