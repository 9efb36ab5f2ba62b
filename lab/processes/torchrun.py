"""torchrun, as a child process."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

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
