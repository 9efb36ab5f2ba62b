"""How a worker that writes gives way to the training."""

import logging
import os
import subprocess
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MAX_NICE = 19
"""The weakest claim on the CPU, of setpriority(2)."""
IO_CLASSES = ("none", "realtime", "best-effort", "idle")
"""Those of ioprio_set(2), by number."""


@dataclass(frozen=True, slots=True)
class Priority:
    """What a process claims of the CPU and the disks; None leaves it as it is.

    Args:
        cpu: the nice value, from 0 to 19; it is never lowered.
        io: the scheduling class: 0 none, 1 realtime, 2 best effort, 3 idle.

    Raises:
        ValueError: there is no such value.
    """

    cpu: int | None = None
    io: int | None = None

    def __post_init__(self) -> None:
        if self.cpu is not None and not 0 <= self.cpu <= MAX_NICE:
            raise ValueError(f"cpu_priority = {self.cpu}: it is a nice value, from 0 to {MAX_NICE}.")
        if self.io is not None and not 0 <= self.io < len(IO_CLASSES):
            classes = ", ".join(f"{number} ({name})" for number, name in enumerate(IO_CLASSES))
            raise ValueError(f"io_priority = {self.io}: it is one of {classes}.")

    def take(self) -> None:
        """Give this process that priority, or say in the log why not."""
        try:
            if self.cpu is not None:
                mine = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, 0, max(mine, self.cpu))
            if self.io is not None:
                command = ["ionice", "--class", str(self.io), "--pid", str(os.getpid())]
                subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            logger.warning("the worker that writes keeps its priority: %s", error)
