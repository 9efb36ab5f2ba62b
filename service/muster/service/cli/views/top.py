"""``muster top``: a live view of a coordinator."""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from muster.client.errors import EnvironmentValueError
from muster.service.cli import options
from muster.service.cli.client.coordinator_client import CallError, Client, connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.failure import Exit, fail

if TYPE_CHECKING:
    from muster.service.cli.views.dashboard import Snapshot

HISTORY = 10
"""Decided barriers to ask for of each group."""
QUIT = b"qQ"


@connecting
def top(
    interval: options.Interval = options.DEFAULT_INTERVAL,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Watch a coordinator live; q or Ctrl-C ends."""
    if not sys.stdout.isatty():
        fail(
            "muster top draws on a terminal, and stdout is not one\n"
            "  next: for a file or a pipe, use muster get barriers --watch",
            Exit.USAGE,
        )
    # Imported here, so that the other sub-commands start without waiting for it.
    from rich.console import Console
    from rich.live import Live

    from muster.service.cli.views.dashboard import render

    console = Console()
    with connect(endpoint, timeout) as client:
        snapshot = _poll(client)
        live = Live(console=console, screen=True, auto_refresh=False)
        try:
            with _restored_on_sigterm(), _keys() as quit_within:
                live.start()
                live.update(render(snapshot, console.height), refresh=True)
                while not quit_within(interval):
                    try:
                        snapshot = _poll(client)
                    except (CallError, EnvironmentValueError) as error:
                        # Keep the last data on screen: it shows the state before contact was lost.
                        snapshot = replace(snapshot, error=str(error))
                    live.update(render(snapshot, console.height), refresh=True)
        except KeyboardInterrupt:
            return
        finally:
            # As a context manager, Live does not clean up after an interrupt while it starts.
            live.stop()


def _poll(client: Client) -> "Snapshot":
    from muster.service.cli.views.dashboard import Snapshot

    return Snapshot(
        endpoint=client.endpoint,
        runs=client.runs().runs,
        barriers=client.barriers("", HISTORY).barriers,
        taken_at=time.time(),
    )


@contextmanager
def _restored_on_sigterm() -> Iterator[None]:
    """End by an exception on SIGTERM, so that the terminal is restored."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits, and returns whether to quit. It reads keys if stdin is a terminal."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    # Without this file, a signal just before the wait would not end it.
    woken, wake = os.pipe2(os.O_NONBLOCK)
    woke_before = signal.set_wakeup_fd(wake)
    try:
        tty.setcbreak(stdin)
        yield lambda seconds: _quit_pressed(stdin, woken, seconds)
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(woke_before)
        os.close(woken)
        os.close(wake)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _quit_pressed(stdin: int, woken: int, seconds: float) -> bool:
    """Wait up to so many seconds for a key that quits, or the end of input. A signal handler may raise."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        readable = select.select([stdin, woken], [], [], left)[0]
        if woken in readable:
            os.read(woken, 1024)
        if stdin in readable:
            keys = os.read(stdin, 1024)
            if not keys or any(key in QUIT for key in keys):
                return True
    return False
