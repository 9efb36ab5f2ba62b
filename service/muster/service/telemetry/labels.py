"""Label values that are bounded, whatever users call their runs and prefixes (design rule 15)."""

import re

OVERFLOW = "other"


class BoundedLabel:
    """Gives the label value for a name.

    Digits are folded (``step-12000`` becomes ``step-N``) if ``fold_digits``; beyond ``most`` different
    values, all further ones become ``other``, until some of the first are released.
    """

    def __init__(self, most: int, *, fold_digits: bool = False) -> None:
        self._most = most
        self._fold_digits = fold_digits
        self._values: set[str] = set()

    def __call__(self, name: str) -> str:
        """The label value for ``name``."""
        value = re.sub(r"\d+", "N", name) if self._fold_digits else name
        if value in self._values:
            return value
        if len(self._values) >= self._most:
            return OVERFLOW
        self._values.add(value)
        return value

    def release(self, value: str) -> None:
        """Nothing is labelled so any more: another name may have its place."""
        self._values.discard(value)
