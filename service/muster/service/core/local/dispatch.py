"""Sends keepers their orders when these have changed, and asks what they have verified."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import count

from muster.service.core.local.copies import Copies
from muster.service.core.local.keepers import Keeper, Keepers
from muster.service.core.local.orders import locations_of, orders_for, parts_without_source
from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.local import Attempt, Location


class Dispatch:
    """The orders of one run's keepers.

    Args:
        keepers: all of the run.
    """

    def __init__(self, keepers: Keepers) -> None:
        self._keepers = keepers
        self._marked: dict[str, Keeper] = {}
        """The keepers to which other orders may be due."""
        self._everywhere: tuple[Attempt, dict[str, Location]] | None = None
        """Where all parts are of the checkpoint to resume from; None: it must be looked up."""
        self._numbers = count(1)
        self._asks = False

    # ------------------------------------------------------------------ which keepers need other orders

    @property
    def has_marked(self) -> bool:
        """Whether the orders of a keeper may have changed since they were sent."""
        return bool(self._marked)

    def mark_dirty(self, keeper_id: str) -> None:
        """The orders of a keeper may have changed."""
        if (keeper := self._keepers.find(keeper_id)) is not None:
            self._marked[keeper_id] = keeper

    def mark_all(self) -> None:
        """The orders of all keepers may have changed."""
        self._marked.update((keeper.info.id, keeper) for keeper in self._keepers)

    def mark_starving(self, gained: Collection[tuple[Attempt, int]]) -> None:
        """Some keeper has these attempts and ranks now: mark those that may need them, and had no source."""
        for keeper in self._keepers if gained else ():
            if not keeper.starves_for.isdisjoint(gained):
                keeper.asked = 0  # What it confirmed was that it had no source, though its orders may stay.
                self._marked[keeper.info.id] = keeper

    def forget_locations(self, attempt: Attempt | None = None) -> None:
        """The parts of a checkpoint are at other keepers now; None: those of any."""
        if self._everywhere is not None and attempt in (None, self._everywhere[0]):
            self._everywhere = None

    # ------------------------------------------------------------------ what keepers have verified

    def ask(self, copies: Iterable[Copies]) -> None:
        """Ask all keepers to confirm, from now on, that they have verified all that they can of these."""
        if not self._asks:
            self._asks = True
            for one in copies:
                one.is_fresh = False  # Another keeper may give the manifest sooner.
            for keeper in self._keepers:
                keeper.asked = 0
            self.mark_all()

    def stop_asking(self) -> None:
        """Nobody needs to know it any more."""
        self._asks = False

    @property
    def is_all_verified(self) -> bool:
        """Whether each connected keeper has confirmed its orders, and no orders have to be sent."""
        if not self._asks or self._marked:
            return False
        return all(keeper.asked == keeper.confirmed != 0 for keeper in self._keepers.connected())

    # ------------------------------------------------------------------ sending

    def send(
        self,
        copies: Mapping[Attempt, Copies],
        resumed: Attempt | None,
        newest: Attempt | None,
        persisting: Copies | None,
        effects: Effects,
    ) -> None:
        """Send the orders that have changed.

        Args:
            copies: the checkpoints that are kept.
            resumed: the one that the current generation resumes from; None: none.
            newest: the newest attempt that was ever committed; None: there was none.
            persisting: the one that keepers are to persist; None: none.
            effects: gets the messages.
        """
        if not self._marked:
            return
        # A coordinator that knows of no checkpoint has lost its state, or is another one: nothing is deleted.
        before = Attempt(0, 0) if newest is None else Attempt(newest.generation, newest.number + 1)
        known = [copies[attempt] for attempt in sorted(copies)]
        if resumed not in copies:
            resumed = None  # All ranks have gone on, and it was not kept.
        everywhere = self._locate(copies[resumed]) if resumed is not None else {}
        for keeper in self._marked.values():
            if keeper.session is None:
                continue
            orders = orders_for(keeper, self._keepers, known, resumed, everywhere, before, persisting)
            keeper.starves_for = parts_without_source(orders, copies, resumed)
            if orders != keeper.sent or (self._asks and not keeper.asked):
                keeper.sent = orders
                keeper.asked = next(self._numbers) if self._asks else 0
                effects.send(keeper.session, replace(orders, confirm=keeper.asked))
        self._marked.clear()

    def _locate(self, resumed: Copies) -> dict[str, Location]:
        """Return where the parts of the checkpoint to resume from are."""
        if self._everywhere is None or self._everywhere[0] != resumed.attempt:
            self._everywhere = resumed.attempt, locations_of(resumed, self._keepers)
        return self._everywhere[1]
