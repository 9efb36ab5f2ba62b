"""Which coordinator the command calls, where its endpoint stands for several replicas of which one leads."""

from collections.abc import Iterable

from muster.client import addresses
from muster.client.replicas import resolve
from muster.service.address import Address
from muster.service.replica_list import NOT_LEADER_HEADER

MOST_FOLLOWED = 8
"""Standbys whose word is followed in one turn."""
MOST_REPLICAS = 64
"""Addresses that a coordinator may name."""


class Replicas:
    """What the command knows of the coordinators behind its endpoint.

    Args:
        endpoint: ``HOST:PORT``, or several with commas between.

    Raises:
        ValueError: a part of it is no such text.
    """

    def __init__(self, endpoint: str) -> None:
        self.given = list(dict.fromkeys(str(Address.parse(part.strip())) for part in endpoint.split(",")))
        self._resolved: dict[str, list[str]] = {address: [] for address in self.given}
        """For each given address, the addresses that its name resolves to, if there are several."""
        self._learned: list[str] = []
        self._leader = ""
        self.shunned = ""
        """The leader that did not answer."""

    @property
    def known(self) -> list[str]:
        """All addresses, in the order in which to call them."""
        leader = [self._leader] if self._leader else []
        resolved = [address for some in self._resolved.values() for address in some]
        known = dict.fromkeys([*leader, *self._learned, *self.given, *resolved])
        return sorted(known, key=lambda address: address == self.shunned)

    @property
    def several(self) -> bool:
        """Whether there is more than one address to call."""
        return len(self.known) > 1

    def tls_name(self, address: str) -> str:
        """Return the name that the certificate of an address must have; empty: the address's host."""
        return addresses.tls_name(address, self._resolved)

    def look_up(self) -> None:
        """Resolve the given names."""
        for name in self.given:
            if len(resolved := resolve(name)) > 1:
                self._resolved[name] = resolved

    def answers(self, address: str) -> None:
        """This one leads."""
        self._leader, self.shunned = address, ""

    def is_silent(self, address: str) -> None:
        """This one did not answer."""
        if address == self._leader:
            self.shunned = address

    def names(self, address: str, leader: str, replicas: Iterable[str]) -> bool:
        """One that does not lead has named who does, and all that it knows.

        Returns:
            Whether to go to that leader: not if it is the one that did not answer.
        """
        self._learned = [one for one in replicas if _is_address(one)][:MOST_REPLICAS] or self._learned
        if address == self._leader:
            self._leader = ""
        if not _is_address(leader):
            return False
        if leader != self._leader:
            self._leader, self.shunned = leader, ""
        return leader != self.shunned


class Search:
    """The way of one call to the leader. A turn calls everyone once.

    Args:
        replicas: what is known, and what is learned on the way.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.words: dict[str, str] = {}
        """What each address has met last, for people."""
        self.met_standby = False
        """Whether anyone has answered that it does not lead."""
        self.begin_turn()

    def begin_turn(self) -> None:
        """Call everyone again."""
        self._tried: set[str] = set()
        self._followed: set[str] = set()
        self._looked_up = False
        self.address = self._untried()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers of the call."""
        return ((NOT_LEADER_HEADER, self.replicas.shunned),)

    @property
    def followed(self) -> bool:
        """Whether the one that is called now was named as the leader."""
        return self.address in self._followed

    def failed(self, why: str) -> bool:
        """The one that was called did not answer; whether another one can be called at once."""
        self.words[self.address] = why
        self.replicas.is_silent(self.address)
        return self._on()

    def not_leader(self, leader: str, replicas: Iterable[str], why: str) -> bool:
        """The one that was called does not lead; whether another one can be called at once."""
        self.words[self.address] = why
        self.met_standby = True
        if (
            len(self._followed) < MOST_FOLLOWED
            and self.replicas.names(self.address, leader, replicas)
            and leader not in self._followed
        ):
            self._tried.add(self.address)
            self._followed.add(leader)
            self.address = leader
            return True
        return self._on()

    def _on(self) -> bool:
        self._tried.add(self.address)
        address = self._untried()
        self.address = address or self.address
        return bool(address)

    def _untried(self) -> str:
        def first() -> str:
            if len(self._tried) > MOST_REPLICAS:
                return ""
            return next((address for address in self.replicas.known if address not in self._tried), "")

        if not first() and not self._looked_up:
            self._looked_up = True
            self.replicas.look_up()
        return first()


def _is_address(text: str) -> bool:
    try:
        return bool(Address.parse(text).port)
    except ValueError:
        return False
