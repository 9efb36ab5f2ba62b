"""Bounded label values, whatever users call their runs and prefixes.

They keep invariant 15 (every bound is a named limit) for metrics.
"""

import re
from collections.abc import Callable, Collection, Mapping

OVERFLOW = "other"


class PrefixLabels:
    """Gives the label values for the prefixes of one run.

    Digits are folded: ``step-12000`` becomes ``step-N``. After ``most`` different values, all further ones
    become ``other``.

    Args:
        most: the number of values, besides those in ``always``.
        always: values that never become ``other``.
    """

    def __init__(self, most: int, always: Collection[str] = ()) -> None:
        self._most = most
        self._always = always
        self._values: set[str] = set()

    def __call__(self, prefix: str) -> str:
        """Return the label value for a prefix."""
        value = re.sub(r"\d+", "N", prefix)
        if value in self._values or value in self._always:
            return value
        if len(self._values) >= self._most:
            return OVERFLOW
        self._values.add(value)
        return value


class RunLabels:
    """Gives the label values for runs: their names, for up to ``most`` runs.

    A run that is no longer in use keeps its name until a run in use needs the place. Then the run that has
    been out of use longest loses its name. Runs in use without a place share the value ``other``, and so does
    a run of that name.

    Args:
        most: the number of names.
        ended: called with each name that is given up.
    """

    def __init__(self, most: int, ended: Callable[[str], None]) -> None:
        self._most = most
        self._ended = ended
        self._used: set[str] = set()
        self._resting: dict[str, float] = {}
        """Runs out of use, and since when."""

    def used(self, run_id: str) -> str:
        """Return the label value of a run in use."""
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
        """Return the label values of all runs.

        Args:
            runs: since when each run is out of use, on the monotonic clock; None for a run in use.

        Returns:
            The label values by run, without the runs out of use that have no place.
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
        """Give up the name of a run, so that another run may have its place."""
        if run_id in self._used or run_id in self._resting:
            self._used.discard(run_id)
            self._resting.pop(run_id, None)
            self._ended(run_id)

    @property
    def _full(self) -> bool:
        return len(self._used) + len(self._resting) >= self._most
