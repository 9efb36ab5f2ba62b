"""Ignores a warning that a save or a load causes by design."""

import warnings


def ignore_warning(start: str, category: type[Warning], module: str = "") -> None:
    """Ignore a warning from now on.

    Filters are of the whole process. ``warnings.catch_warnings``, at its end, would undo what another thread
    has set meanwhile.

    Args:
        start: how its text begins, a regular expression.
        category: its class.
        module: a regular expression of the module that it must come from; empty: any.
    """
    if not any(start == getattr(one[1], "pattern", None) for one in warnings.filters):
        warnings.filterwarnings("ignore", start, category, module)
