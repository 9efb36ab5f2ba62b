"""How many saves one rank may have under way while the coordinator is away."""

from muster.worker.errors import MusterError

MAX_UNDECIDED = 8
"""Each save takes room on the storage until it is decided, and without the coordinator none is."""


class BacklogError(MusterError):
    """Too many saves wait for a coordinator that is away."""


def check_backlog(undecided: int, *, has_contact: bool) -> None:
    """Refuse one more save while the coordinator is away and :data:`MAX_UNDECIDED` or more wait for it.

    With contact there is no limit: slow storage delays decisions, but brings them.

    Args:
        undecided: how many of this rank's saves are not decided.
        has_contact: whether this rank is connected with the coordinator.

    Raises:
        BacklogError: there are too many.
    """
    if undecided >= MAX_UNDECIDED and not has_contact:
        raise BacklogError(
            f"the coordinator is away, and {MAX_UNDECIDED} saves or more wait for its decision. They take "
            "room on the storage until it is back"
        )
