"""The ``muster`` script: the command, or one sentence where only the SDK is installed."""

import sys

USAGE = 2
"""The same as in :class:`~muster.service.cli.failure.Exit`, which needs those packages."""


def main() -> None:
    """Run the command.

    Raises:
        SystemExit: it has ended; 2 if the packages that it needs are not installed.
    """
    try:
        from muster.service.cli.main import main as command
    except ModuleNotFoundError as error:
        package = (error.name or "muster").partition(".")[0]
        if package == "muster":
            raise
        print(
            f"Error: the muster command needs the coordinator's packages, and {package} is not installed\n"
            "  next: pip install 'muster-coordinator[service]'",
            file=sys.stderr,
        )
        sys.exit(USAGE)
    command()
