"""Slurm: a node that is drained or to be rebooted, by ``scontrol``."""

import asyncio
import contextlib
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping

from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.sources.reading import MAX_BYTES, printable

INTERVAL = 30.0
"""Seconds between looks: each is a request to Slurm's controller, and jobs on a drained node run on."""
TIMEOUT = 10.0
"""Seconds for ``scontrol``, which waits for a controller that is away."""
COMMAND = "scontrol"
LEAVES = {
    "DRAIN": "Slurm drains the node {node}",
    "FAIL": "Slurm expects the node {node} to fail",
    "REBOOT_REQUESTED": "Slurm is to reboot the node {node}",
    "REBOOT_ISSUED": "Slurm reboots the node {node}",
}
"""The flags of a node that is to be left; the first one gives the reason.

MAINT is not among them, since jobs of that reservation run there. PLANNED says nothing about running jobs."""
NODE = re.compile(r"NodeName=(\S+) ", re.ASCII)
STATE = re.compile(r" State=(\S+)", re.ASCII)
BOOT = re.compile(r" BootTime=(\S+)", re.ASCII)
REASON = re.compile(r" Reason=(.*) \[[^][\s@]+@(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\]", re.ASCII)
"""People write the reason. What follows the last bracket is Slurm's."""


def node_state(shown: str, node: str) -> list[Notice]:
    """Return the notice in the line that ``scontrol show node NODE --oneliner`` writes.

    Args:
        shown: the line.
        node: the node's name.

    Raises:
        LookError: it is no such line, or one of another node.
    """
    line = shown.strip()
    begin, state = NODE.match(line), STATE.search(line)
    if "\n" in line or begin is None or begin[1] != node or state is None:
        raise LookError(f"scontrol does not show the state of node {node}: {printable(line, 80)!r}.")
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
                stderr=PIPE,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            raise LookError(f"{COMMAND} cannot be started: {error.strerror}. Is Slurm's in PATH?") from None
        try:
            async with asyncio.timeout(self._timeout):
                output, errors = await asyncio.gather(_bounded(process.stdout), _bounded(process.stderr))
                code = await process.wait()
        except TimeoutError:
            raise LookError(f"{COMMAND} did not answer within {self._timeout:g} s; it was killed.") from None
        finally:
            await _kill(process)
        if code != 0:
            said = printable((errors + b" " + output).decode(errors="replace"))
            raise LookError(f"{COMMAND} show node {self._node} ended with {code}: {said}")
        return output.decode(errors="replace")


async def _bounded(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None
    data = bytearray()
    while chunk := await stream.read(MAX_BYTES):
        data += chunk
        if len(data) > MAX_BYTES:
            raise LookError(f"{COMMAND} writes more than {MAX_BYTES:,} bytes.")
    return bytes(data)


async def _kill(process: Process) -> None:
    """Kill what is left of a command, its children too."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
