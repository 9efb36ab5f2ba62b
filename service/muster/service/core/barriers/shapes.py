"""The shapes of a group: one object and one record for all ranks that bring the same shape."""

from dataclasses import dataclass

from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.model import Shape
from muster.service.core.vocabulary.records import ForgetShape, ShapeRecord


@dataclass(slots=True, eq=False)
class _Entry:
    shape: Shape
    number: int = 0
    """The number of its record; 0: it has no record."""
    owners: int = 0
    """Ranks whose process brought it."""
    living: int = 0
    """How many of these processes are living."""


class Shapes:
    """Which shapes the rank owners of one group brought, and how many of these owners live.

    Args:
        run_id: the run.
        prefix: the group's name within it.
    """

    def __init__(self, run_id: str, prefix: str) -> None:
        self._run_id = run_id
        self._prefix = prefix
        self._entries: dict[Shape, _Entry] = {}
        self._by_number: dict[int, _Entry] = {}
        self._last_number = 0
        self._bound = 0
        """How many shapes have a living owner."""

    @property
    def disagree(self) -> bool:
        """Whether living owners brought different shapes."""
        return self._bound > 1

    @property
    def any_living(self) -> bool:
        """Whether any owner lives."""
        return self._bound > 0

    def restore(self, record: ShapeRecord) -> None:
        """Restore a shape, before its owners."""
        entry = self._entries.setdefault(record.shape, _Entry(record.shape))
        entry.number = record.number
        self._by_number[record.number] = entry
        self._last_number = max(self._last_number, record.number)

    def restored(self, shape: Shape | int) -> Shape:
        """The shape of one more owner, as the owner's record has it.

        Raises:
            KeyError: no record has this number.
        """
        if isinstance(shape, Shape):
            return self.add(shape)
        entry = self._by_number.get(shape)
        if entry is None:
            raise KeyError(f"shape {shape} of group {self._prefix}")
        return self.add(entry.shape)

    def add(self, shape: Shape) -> Shape:
        """Count one more owner of a shape.

        Returns:
            The one object for this shape, which can be compared by identity.
        """
        entry = self._entries.get(shape)
        if entry is None:
            entry = self._entries[shape] = _Entry(shape)
        entry.owners += 1
        return entry.shape

    def remove(self, shape: Shape, effects: Effects) -> None:
        """Count one owner less. A shape that nobody brings is forgotten."""
        entry = self._entries[shape]
        entry.owners -= 1
        if not entry.owners:
            del self._entries[shape]
            self._forget_record(entry, effects)

    def count_living(self, shape: Shape, more: int) -> None:
        """Count one living owner of a shape more, or less."""
        entry = self._entries[shape]
        had = entry.living > 0
        entry.living += more
        self._bound += (entry.living > 0) - had

    def reference(self, shape: Shape, effects: Effects) -> Shape | int:
        """What an owner's record says of its shape. A list of participants gets a record of its own first."""
        if not shape.participants:
            return shape
        entry = self._entries[shape]
        if not entry.number:
            self._last_number += 1
            entry.number = self._last_number
            self._by_number[entry.number] = entry
            effects.records.append(ShapeRecord(self._run_id, self._prefix, entry.number, shape))
        return entry.number

    def clear(self, effects: Effects) -> None:
        """Forget all shapes, with their owners."""
        for entry in self._entries.values():
            self._forget_record(entry, effects)
        self._entries.clear()
        self._last_number = self._bound = 0

    def _forget_record(self, entry: _Entry, effects: Effects) -> None:
        if entry.number:
            del self._by_number[entry.number]
            effects.records.append(ForgetShape(self._run_id, self._prefix, entry.number))
