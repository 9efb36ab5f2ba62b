"""torchrun whose workers are forked from what it had imported when it began, as it was itself.

A process that has neither threads nor anything of gRPC's is set aside first, for an agent has both when it
starts its workers. They are the agent's own children all the same.
"""

import runpy
import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, handlers

from lab.processes.fork_client import Forked, ForkServer
from lab.processes.fork_server import aside


class Forking(SubprocessHandler):
    """Has the process that was set aside fork the worker, if that is a Python program."""

    aside: ForkServer

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:  # as torch's
        if args[0] != sys.executable:
            return super()._popen(args, env)
        # The agent signals a group.
        return Forked(
            self.aside, args, env=env, stdout=self._stdout, stderr=self._stderr, start_new_session=True
        )


def main() -> None:
    """Set a process aside, and run torchrun."""
    Forking.aside = aside()
    handlers.SubprocessHandler = Forking  # type: ignore[attr-defined]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
