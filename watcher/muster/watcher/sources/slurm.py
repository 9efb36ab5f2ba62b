"""Slurm: a node that is drained or to be rebooted, by ``scontrol``."""

import asyncio
import contextlib
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Mapping

from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.sources.reading import printable

INTERVAL = 30.0
"""Seconds between polls. Each poll is a request to Slurm's controller, and jobs on a drained node run on."""
TIMEOUT = 10.0
"""Seconds for ``scontrol``, which waits for a controller that is away."""
MAX_BYTES = 16_777_216
"""Of its output: about 1,000 for each node."""
COMMAND = "scontrol"
LEAVES = {
    "REBOOT_ISSUED": "Slurm reboots the node {node}",
    "REBOOT_REQUESTED": "Slurm is to reboot the node {node}",
    "FAIL": "Slurm expects the node {node} to fail",
    "DRAIN": "Slurm drains the node {node}",
}
"""The flags of a node that its jobs must leave; the first one gives the reason.

MAINT is not among them, since jobs of that reservation run there. PLANNED says nothing about running jobs."""
NODE = re.compile(r"NodeName=[!-~]{1,255} ", re.ASCII)
SEVERAL = re.compile(r"[\[,]")
STATE = re.compile(r" State=(\S+)", re.ASCII)
BOOT = re.compile(r" BootTime=(\d[\dT:-]*)", re.ASCII)
REASON = re.compile(r" Reason=(.*) \[[^][\s@]+@(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\]", re.ASCII)
"""People write the reason. What follows the last bracket is Slurm's."""


def node_states(shown: str, nodes: str) -> list[Notice]:
    """Return the notices in what ``scontrol show node NODES --oneliner`` writes.

    Args:
        shown: its output. There may be warnings beside the lines of the nodes.
        nodes: the name of the node, or several, as Slurm writes them: ``n[1-4]``.

    Raises:
        LookError: there is no such line, or one of another node.
    """
    lines = [line.strip() for line in shown.split("\n") if NODE.match(line)]
    if not lines or (not SEVERAL.search(nodes) and [_name(line) for line in lines] != [nodes]):
        raise LookError(f"scontrol does not show node {nodes}: {printable(shown, 80)!r}.")
    return [notice for line in lines for notice in _node_state(line)]


def _name(line: str) -> str:
    return line.partition(" ")[0].removeprefix("NodeName=")


def _node_state(line: str) -> list[Notice]:
    node, state = _name(line), STATE.search(line)
    if state is None:
        raise LookError(f"scontrol does not show the state of node {printable(node, 80)}.")
    # Such as MIXED+DRAIN. A star marks a node that does not answer.
    flags = state[1].replace("*", "").split("+")
    flag = next((flag for flag in LEAVES if flag in flags), None)
    if flag is None:
        return []
    reason, given, boot = LEAVES[flag].format(node=node), REASON.search(line), BOOT.search(line)
    when = given[2] if given else f"boot-{boot[1] if boot else 'unknown'}"
    if given:
        reason += f": {printable(given[1])}"
    return [Notice(id=f"slurm/node/{node}/{when}", reason=reason, node=node)]


class Slurm:
    """Asks ``scontrol``, which must be in ``PATH``.

    Args:
        node: the node's name in Slurm.
        nodes: the nodes to poll, as Slurm writes them; empty: the node. One watcher for all nodes of a job
            calls the controller less often than one on each of them.
        environment: of ``scontrol``; default: that of this process.
        timeout: seconds after which it is killed.
    """

    def __init__(
        self,
        node: str,
        *,
        nodes: str = "",
        environment: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self._nodes = nodes or node
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
        return node_states(await self._show(), self._nodes)

    async def _show(self) -> str:
        command = (COMMAND, "show", "node", self._nodes, "--oneliner")
        try:
            transport, output = await asyncio.get_running_loop().subprocess_exec(
                _Output,
                *command,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            raise LookError(
                f"{COMMAND} cannot be started: {error.strerror}. Add the folder of Slurm's commands to PATH."
            ) from None
        try:
            async with asyncio.timeout(self._timeout):
                await output.ended.wait()
        except TimeoutError:
            raise LookError(f"{COMMAND} did not answer within {self._timeout:g} s; it was killed.") from None
        finally:
            if transport.get_returncode() is None:
                # Its children, too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(transport.get_pid(), signal.SIGKILL)
            await output.exited.wait()
            # A process that left the group may hold the pipe open.
            transport.close()
        if len(output.data) > MAX_BYTES:
            raise LookError(f"{COMMAND} writes more than {MAX_BYTES:,} bytes.")
        text = output.data.decode(errors="replace")
        if code := transport.get_returncode():
            raise LookError(f"{COMMAND} show node {self._nodes} ended with {code}: {printable(text)}")
        return text


class _Output(asyncio.SubprocessProtocol):
    """The output of a command. A stream would wait for its reader, and the command's end for the stream."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = asyncio.Event()
        """The command and its output have ended, or the output is too long."""
        self.exited = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep a part of the output."""
        self.data += data
        if len(self.data) > MAX_BYTES:
            self.ended.set()

    def process_exited(self) -> None:
        """Take note that the command has ended."""
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note that the command has ended, and its pipe is closed."""
        self.ended.set()
