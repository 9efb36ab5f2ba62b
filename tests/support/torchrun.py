"""torchrun, as a child process."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, TypeAlias

from tests.support import nursery

Agent: TypeAlias = subprocess.Popen[bytes] | nursery.Forked
IMPORTS = (
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.multiprocessing.subprocess_handler",
    "torch.distributed.checkpoint",
    "muster.worker",
)
"""What it and its workers import."""


def torchrun(arguments: Sequence[str], environment: Mapping[str, str], log: IO[Any]) -> Agent:
    """Start it.

    Args:
        arguments: its own.
        environment: all of it.
        log: where its output goes, and that of its workers.
    """
    if nursery.forks:
        forking = nursery.nursery(*IMPORTS)
        return forking.fork("tests.support.forking_agent", arguments, environment, log.fileno(), log.fileno())
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
