"""Wait until all ranks have made a requested save, with a countdown on stderr."""

import time

import typer

from muster.service.cli.client.coordinator_client import CallError, Client
from muster.service.cli.failure import Exit
from muster.service.core.vocabulary import report
from muster.service.formatting.requested_saves import save_text, time_left
from muster.v1 import run_pb2

POLL_INTERVAL = 0.5
"""Seconds between two polls of whether the save is done."""
COUNTDOWN_INTERVAL = 10.0
"""Seconds between two lines of the countdown while nothing else changes."""


class WaitError(Exception):
    """The save was not made.

    Args:
        message: what became of it, and what to do next.
        code: the exit code that stands for it.
    """

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def deadline_ms(seconds: float) -> int:
    """Return a deadline as a request has it; 0 for 0, which means none."""
    return max(1, round(seconds * 1000)) if seconds else 0


def wait_for_save(client: Client, run: str, end: float, given: str, *, stop: bool) -> run_pb2.Save:
    """Return the newest requested save of a run when all ranks have made it.

    If a newer request replaces it, that one is waited for.

    Args:
        client: the coordinator.
        run: the run.
        end: when to give up, on the monotonic clock.
        given: the time until then, as text for an error.
        stop: whether training is to end after it.

    Raises:
        WaitError: it was withdrawn, it lapsed, the run was closed, the time is over, or a call failed.
    """
    shown = ""
    next_line = 0.0
    while True:
        try:
            found = client.run(run).run
        except CallError as error:
            raise WaitError(f"run {run}: {error}", error.code) from error
        save = found.save
        text = f"run {run}: {save_text(save)}"
        if save.state == run_pb2.SAVE_STATE_DONE:
            if stop and not save.stop:
                raise WaitError(f"{text}, but the request to end training lapsed", Exit.CLOSED)
            return save
        if found.HasField("closed"):
            raise WaitError(f"{text}, and the run is closed", Exit.CLOSED)
        if save.state in (run_pb2.SAVE_STATE_WITHDRAWN, run_pb2.SAVE_STATE_LAPSED):
            raise WaitError(text, Exit.CLOSED)
        now = time.monotonic()
        if now >= end:
            late = f"\n  {report.printable(save.late)}" if save.late else ""
            next_step = report.command("stack", run)
            raise WaitError(f"{text}, and not done within {given}{late}\n  next: {next_step}", Exit.TIMED_OUT)
        if text != shown or now >= next_line:
            shown, next_line = text, now + COUNTDOWN_INTERVAL
            left = time_left(save, time.time())
            typer.echo(f"{text}{f'; {left}' if left else ''}", err=True)
        time.sleep(min(POLL_INTERVAL, end - now))
