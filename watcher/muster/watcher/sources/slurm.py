"""Slurm: a node that is drained or to be rebooted, by ``scontrol``."""

import asyncio
import contextlib
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Mapping

from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.sources.reading import MAX_BYTES, printable

INTERVAL = 30.0
"""Seconds between looks: each is a request to Slurm's controller, and jobs on a drained node run on."""
TIMEOUT = 10.0
"""Seconds for ``scontrol``, which waits for a controller that is away."""
KILL_TIMEOUT = 1.0
"""Seconds to read what a killed ``scontrol`` has written."""
COMMAND = "scontrol"
LEAVES = {
    "REBOOT_ISSUED": "Slurm reboots the node {node}",
    "REBOOT_REQUESTED": "Slurm is to reboot the node {node}",
    "FAIL": "Slurm expects the node {node} to fail",
    "DRAIN": "Slurm drains the node {node}",
}
"""The flags of a node that is to be left; the first one gives the reason.

MAINT is not among them, since jobs of that reservation run there. PLANNED says nothing about running jobs."""
NODE = re.compile(r"NodeName=\S+ ", re.ASCII)
STATE = re.compile(r" State=(\S+)", re.ASCII)
BOOT = re.compile(r" BootTime=(\S+)", re.ASCII)
REASON = re.compile(r" Reason=(.*) \[[^][\s@]+@(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\]", re.ASCII)
"""People write the reason. What follows the last bracket is Slurm's."""


def node_state(shown: str, node: str) -> list[Notice]:
    """Return the notice in what ``scontrol show node NODE --oneliner`` writes.

    Args:
        shown: its output. There may be warnings beside the line of the node.
        node: the node's name.

    Raises:
        LookError: there is no such line, or one of another node.
    """
    lines = [line.strip() for line in shown.split("\n") if NODE.match(line)]
    line = lines[0] if len(lines) == 1 else ""
    state = STATE.search(line)
    if state is None or not line.startswith(f"NodeName={node} "):
        raise LookError(f"scontrol does not show the state of node {node}: {printable(shown, 80)!r}.")
    # Such as MIXED+DRAIN. A star marks a node that does not answer.
    flags = state[1].replace("*", "").split("+")
    flag = next((flag for flag in LEAVES if flag in flags), None)
    if flag is None:
        return []
    reason, given = LEAVES[flag].format(node=node), REASON.search(line)
    if given is not None:
        return [Notice(id=f"slurm/node/{node}/{given[2]}", reason=f"{reason}: {printable(given[1])}")]
    boot = BOOT.search(line)
    return [Notice(id=f"slurm/node/{node}/boot-{boot[1] if boot else 'unknown'}", reason=reason)]


class Slurm:
    """Asks ``scontrol``, which must be in ``PATH``.

    Args:
        node: the node's name in Slurm.
        environment: of ``scontrol``; default: that of this process.
        timeout: seconds after which it is killed.
    """

    def __init__(
        self, node: str, *, environment: Mapping[str, str] | None = None, timeout: float = TIMEOUT
    ) -> None:
        self._node = node
        # The form of times, in which an id says when, must not change.
        self._environment = {
            **(os.environ if environment is None else environment),
            "SLURM_TIME_FORMAT": "standard",
        }
        self._timeout = timeout

    async def look(self) -> list[Notice]:
        """Return the notices in force.

        Raises:
            LookError: ``scontrol`` does not say.
        """
        return node_state(await self._show(), self._node)

    async def _show(self) -> str:
        command = (COMMAND, "show", "node", self._node, "--oneliner")
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            raise LookError(f"{COMMAND} cannot be started: {error.strerror}. Is Slurm's in PATH?") from None
        try:
            async with asyncio.timeout(self._timeout):
                output = await _bounded(process)
                code = await process.wait()
        except TimeoutError:
            raise LookError(f"{COMMAND} did not answer within {self._timeout:g} s; it was killed.") from None
        finally:
            await _kill(process)
        if code != 0:
            raise LookError(f"{COMMAND} show node {self._node} ended with {code}: {printable(output)}")
        return output


async def _bounded(process: Process) -> str:
    assert process.stdout is not None
    data = bytearray()
    while chunk := await process.stdout.read(MAX_BYTES):
        data += chunk
        if len(data) > MAX_BYTES:
            raise LookError(f"{COMMAND} writes more than {MAX_BYTES:,} bytes.")
    return data.decode(errors="replace")


async def _kill(process: Process) -> None:
    """Kill what is left of a command, its children too."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        # asyncio closes the pipe when it was read to its end. A process that left the group may hold it open.
        assert process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT):
                while await process.stdout.read(MAX_BYTES):
                    pass
