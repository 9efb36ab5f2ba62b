"""torchrun, as a child process."""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lab.patience import PATIENCE
from lab.processes import fork_client


def torchrun(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: IO[Any],
    imports: Sequence[str] = fork_client.TORCH,
) -> subprocess.Popen[Any]:
    """Start it.

    Args:
        arguments: its own.
        environment: all of it.
        log: where its output goes, and that of its workers.
        imports: what it and its workers import.
    """
    program = "lab.processes.forking_agent" if fork_client.forks else "torch.distributed.run"
    return fork_client.popen(
        [sys.executable, "-m", program, *arguments],
        imports=imports,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )


@contextmanager
def agents(
    arguments: Sequence[str], environments: Iterable[Mapping[str, str]], log_path: Path
) -> Iterator[list[subprocess.Popen[Any]]]:
    """Start one with each environment, all with the same arguments and one log; end them at the end."""
    with log_path.open("a") as log:
        started = [torchrun(arguments, environment, log) for environment in environments]
    try:
        yield started
    finally:
        for agent in started:
            agent.terminate()
        for agent in started:
            agent.wait(PATIENCE)
