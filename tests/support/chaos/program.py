"""The ``muster`` command with something changed in its process: ``CHANGE ARGUMENTS``."""

import sys
from collections.abc import Callable

from muster.service.cli.main import app


def muster(change: Callable[[str], None]) -> None:
    """Run the command after a change that its first argument names.

    Args:
        change: makes the change.
    """
    name, *arguments = sys.argv[1:]
    change(name)
    sys.argv = ["muster", *arguments]
    app()
