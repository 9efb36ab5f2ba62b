"""What a launcher and the fork server of its node tell each other, and which requests can be served."""

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, TypeAlias

SOCKET_VARIABLE = "MUSTER_PRELOAD_SOCKET"
"""The variable that names the fork server's socket to launchers."""
MAX_BYTES = 192 << 10
"""The largest request. Linux sends up to ``net.core.wmem_default`` bytes at once, 208 KiB by default."""

FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)
"""The signals that a launcher passes on to its worker, some to its whole process group. They do not end the
fork server: schedulers send some of them to all processes of a job, so that it can save."""

PER_WORKER = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
        "TORCHELASTIC_TIMER_FILE",
        *("MUSTER_ROUND", "MUSTER_ENDPOINT", "MUSTER_RUN_ID", SOCKET_VARIABLE),
    }
)
"""The variables that may differ between workers: torch's agent (torch 2.13, ``_start_workers``) and Muster's
rendezvous set them. The fork server has none of them. A module that reads one at its import cannot be
preloaded."""


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """What a process has from its start on, so that a forked worker cannot have another."""

    executable: str
    """Without symbolic links."""
    prefix: str
    """The folder of the virtual environment."""
    folder: str
    cpus: tuple[int, ...]
    """The processor's cores that it may run on: torchrun binds workers to NUMA nodes by them."""
    environment: Mapping[str, str]

    @classmethod
    def current(cls) -> Self:
        """Return that of this process."""
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        executable, prefix = (str(Path(path).resolve()) for path in (sys.executable, sys.prefix))
        return cls(executable, prefix, str(Path.cwd()), cpus, dict(os.environ))

    def difference(self, other: "ProcessContext") -> str | None:
        """Return what differs, in words; None if a worker may be forked from the one for the other."""
        if self.executable != other.executable:
            return f"its Python is {other.executable}, and the fork server's is {self.executable}"
        if self.prefix != other.prefix:
            return f"its Python is that of {other.prefix}, and the fork server's is that of {self.prefix}"
        if self.folder != other.folder:
            return f"it starts in {other.folder}, and the fork server in {self.folder}"
        if self.cpus != other.cpus:
            return "it is bound to other processor cores than the fork server"
        names = {
            name
            for name in self.environment.keys() | other.environment.keys()
            if self.environment.get(name) != other.environment.get(name)
        } - PER_WORKER
        if names:
            return f"its environment differs from the fork server's in {', '.join(sorted(names))}"
        return None


@dataclass(frozen=True, slots=True)
class Command:
    """What a worker runs: a script, or a module."""

    target: str
    """The path of the script, or the name of the module."""
    is_module: bool
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, given: Sequence[str]) -> Self | None:
        """Return the command of Python's arguments, as torchrun gives them: ``-u [-m] TARGET …``.

        Returns:
            None if they are others, such as further options of Python.
        """
        match tuple(given):
            case ("-u", "-m", target, *arguments) if not target.startswith("-"):
                return cls(target, True, tuple(arguments))
            case ("-u", target, *arguments) if target and not target.startswith("-"):
                return cls(target, False, tuple(arguments))
            case _:
                return None


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A launcher asks for its worker. The files 0, 1 and 2 of the worker come with it."""

    command: tuple[str, ...]
    """The arguments of Python."""
    context: ProcessContext

    def encode(self) -> bytes:
        """Return the message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Return the request that a message holds.

        Raises:
            ValueError: it holds none.
        """
        try:
            fields = json.loads(message)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        match fields:
            case {
                "command": [*command],
                "context": {
                    "executable": str(executable),
                    "prefix": str(prefix),
                    "folder": str(folder),
                    "cpus": [*cpus],
                    "environment": {**environment},
                },
            } if all(isinstance(one, str) for one in [*command, *environment.values()]):
                values: dict[str, str] = {str(name): str(value) for name, value in environment.items()}
                return cls(tuple(command), ProcessContext(executable, prefix, folder, tuple(cpus), values))
        raise ValueError("it is no request of this version")


@dataclass(frozen=True, slots=True)
class Started:
    """The worker runs, and leads a process group of its own."""

    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no worker, and the launcher becomes it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker has ended."""

    status: int
    """As ``os.waitpid`` returns it."""


Reply: TypeAlias = Started | Refused | Ended
REPLIES: dict[str, type[Started] | type[Refused] | type[Ended]] = {
    one.__name__: one for one in (Started, Refused, Ended)
}


def encode_reply(reply: Reply) -> bytes:
    """Return the message."""
    return json.dumps({"reply": type(reply).__name__, **asdict(reply)}).encode()


def decode_reply(message: bytes) -> Reply:
    """Return the reply that a message of the fork server holds. It can read the launcher's request."""
    fields = json.loads(message)
    return REPLIES[fields.pop("reply")](**fields)
