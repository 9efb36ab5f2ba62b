"""How many saves one rank may have under way."""

from muster.worker.errors import MusterError

MAX_UNDECIDED = 8
"""Each save takes room on the storage until it is decided, and while the coordinator is away none is."""


class BacklogError(MusterError):
    """Too many saves are under way to begin another one."""


def check_backlog(undecided: int) -> None:
    """Refuse one more save while :data:`MAX_UNDECIDED` are under way.

    Args:
        undecided: how many of this rank's saves are not decided.

    Raises:
        BacklogError: there are too many.
    """
    if undecided >= MAX_UNDECIDED:
        raise BacklogError(
            f"{undecided} earlier saves are not decided, and each takes room on the storage. Either the "
            "coordinator is away, or a rank's writes take longer than the time between two saves"
        )
