"""Label values that are bounded, whatever users call their runs and prefixes.

They keep invariant 15 (every bound is a named limit) for metrics.
"""

import re
from collections.abc import Callable, Collection, Mapping

OVERFLOW = "other"


class PrefixLabels:
    """Gives the label values for the prefixes of one run.

    Digits are folded (``step-12000`` becomes ``step-N``). Beyond ``most`` different values, all further ones
    become ``other``.

    Args:
        most: how many values there may be, beside those that are always let through.
        always: these have a value of their own, whatever comes before them.
    """

    def __init__(self, most: int, always: Collection[str] = ()) -> None:
        self._most = most
        self._always = always
        self._values: set[str] = set()

    def __call__(self, prefix: str) -> str:
        """The label value for a prefix."""
        value = re.sub(r"\d+", "N", prefix)
        if value in self._values or value in self._always:
            return value
        if len(self._values) >= self._most:
            return OVERFLOW
        self._values.add(value)
        return value


class RunLabels:
    """Gives the label values for runs: their names, while no more than ``most`` of them are in use.

    A run that goes out of use keeps its name until a run that is in use needs the place: then the one that
    has been out of use for longest ends. ``other`` is for those that are in use and have no place, and a run
    that is called so is one of them.

    Args:
        most: how many names there may be.
        ended: called with a name that ends.
    """

    def __init__(self, most: int, ended: Callable[[str], None]) -> None:
        self._most = most
        self._ended = ended
        self._used: set[str] = set()
        self._resting: dict[str, float] = {}
        """Out of use, since when."""

    def used(self, run_id: str) -> str:
        """The label value of a run that is in use."""
        if run_id in self._used:
            return run_id
        if run_id == OVERFLOW:
            return OVERFLOW
        if self._resting.pop(run_id, None) is None and self._full:
            if not self._resting:
                return OVERFLOW
            self.forget(min(self._resting, key=self._resting.__getitem__))
        self._used.add(run_id)
        return run_id

    def of_all(self, runs: Mapping[str, float | None]) -> dict[str, str]:
        """The label values of all runs that there are.

        Args:
            runs: since when each is out of use, on the monotonic clock; None for one that is in use.

        Returns:
            The label values by run. A run that is out of use, and has no place, has none.
        """
        for run_id, since in runs.items():
            if since is not None and run_id in self._used:
                self._used.remove(run_id)
                self._resting[run_id] = since
        labels = {run_id: self.used(run_id) for run_id, since in runs.items() if since is None}
        for run_id, since in runs.items():
            if since is None or run_id == OVERFLOW:
                continue
            if run_id in self._resting or not self._full:
                self._resting[run_id] = since
                labels[run_id] = run_id
        return labels

    def forget(self, run_id: str) -> None:
        """Nothing is labelled so any more: another run may have the place."""
        if run_id in self._used or run_id in self._resting:
            self._used.discard(run_id)
            self._resting.pop(run_id, None)
            self._ended(run_id)

    @property
    def _full(self) -> bool:
        return len(self._used) + len(self._resting) >= self._most
