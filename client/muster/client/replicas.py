"""Whom to call next, where an endpoint stands for several replicas of which one leads, or for relays as well.

A relay is a socket of this machine with whoever leads behind it: it is called before all others, and left at
once when it does not answer. :class:`Replicas` is what this process knows of an endpoint: session, store and
rendezvous share it, so that what one of them learns all use. A :class:`Search` is one caller's way to the
leader. Neither calls anyone.
"""

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from muster.client.addresses import is_address, is_socket, relays_of, tls_name
from muster.client.jitter import jittered

HEADER = "muster-not-leader"
"""The header of each call that names the leader that its caller could not reach."""
KEEPALIVE_MS = 3_333
"""Ping after so long without data, and give up after so long without an answer: a third of the
coordinator's default session TTL each, so that a dead connection is replaced within the TTL. A
coordinator with a shorter TTL says so in its Welcome, and the session is opened anew with a third of that."""
KEEPALIVE_AMONG_SEVERAL_MS = 1_667
"""The same among replicas, until one has said what it wants: a third of the default lease TTL, so that a
stopped leader is noticed before another one leads."""
CONNECT_TIMEOUT_MS = 5_000
"""For one attempt to connect, where nobody answers; a refusal ends it at once."""
CONNECT_TIMEOUT_AMONG_SEVERAL_MS = 2_000
"""The same where there is someone else to call."""
CONNECT_TIMEOUT_ONCE_MORE_MS = 500
"""The same for the leader whose connection has just fallen silent: it may have lost no more than that, and
then it answers at once; if it is stopped, those who can say who leads next are waiting to be asked."""
CONNECT_TIMEOUT_TO_RELAY_MS = 1_000
"""The same for a relay: it is on this machine, and answers soon or not at all."""
FIRST_BACKOFF = 0.1
MOST_BACKOFF = 2.0
"""Seconds between attempts, jittered; well below the session TTL."""
SHUNNED_FOR = 10.0
"""Seconds for which who did not answer is called after the others, and not on a standby's word."""
HELD = 1.0
"""Seconds of a turn in which standbys must have held our calls, for there is no leader yet: it was pause
enough, and the one that comes is to be found soon."""
MOST_FOLLOWED = 8
"""Standbys whose word is followed in one turn."""
MOST_REPLICAS = 64
"""Addresses that a coordinator may name."""


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to call, and how to connect."""

    address: str
    """``HOST:PORT``, or ``unix:///PATH``."""
    tls_name: str = ""
    """Whom its certificate must name; empty: the address's host."""
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS
    keepalive_ms: int = KEEPALIVE_MS


def resolve(address: str) -> list[str]:
    """The addresses that a name stands for, of the family that this machine prefers.

    Args:
        address: ``HOST:PORT``.

    Returns:
        ``IP:PORT`` of each; the address itself if it is no name, or cannot be found.
    """
    host, _, port = address.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        pass
    else:
        return [address]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [address]
    # A machine with an IPv4 and an IPv6 address is one coordinator, not two.
    hosts = [str(one[4][0]) for one in found if one[0] == found[0][0]]
    return list(dict.fromkeys(f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts))


class Replicas:
    """What is known of the coordinators behind an endpoint. Threads may share it.

    Args:
        endpoint: ``HOST:PORT`` or ``unix:///PATH``, or several with commas between.
        clock: seconds of a monotonic clock.
        resolve: as :func:`resolve`.
    """

    def __init__(
        self,
        endpoint: str,
        clock: Callable[[], float] = time.monotonic,
        resolve: Callable[[str], list[str]] = resolve,
    ) -> None:
        self.clock = clock
        self._resolve = resolve
        self._found: dict[str, list[str]] = {address: [address] for address in endpoint.split(",")}
        """What each given address stands for, as far as it had to be looked up."""
        self.relays = relays_of(endpoint)
        """Only those that were given: nobody may send us to a socket of this machine."""
        self._learned: tuple[str, ...] = ()
        self._leader = ""
        """Who leads, as far as anyone has said; it may be silent."""
        self._leads_since = 0.0
        self._answered = False
        """Whether the leader has answered us, and not failed since."""
        self._silent: dict[str, float] = {}
        """Who did not answer, and until when that counts."""
        self._keepalive_ms = 0
        """What the coordinator asks for; 0: nothing."""

    # ------------------------------------------------------------------ what to do

    def known(self) -> list[str]:
        """All addresses, in the order in which to call them."""
        with _lock:
            addresses = self._addresses()
            return sorted(addresses, key=self._is_silent) if self._silent else list(addresses)

    def _addresses(self) -> dict[str, None]:
        given = [address for found in self._found.values() for address in found]
        leader = [self._leader] if self._leader else []
        return dict.fromkeys([*self.relays, *leader, *self._learned, *given])

    def look_up(self) -> None:
        """Find out what the given names stand for now."""
        found = {address: self._resolve(address) for address in self._found if not is_socket(address)}
        with _lock:
            # A name of one address is used as it is.
            used = {name: some if len(some) > 1 else [name] for name, some in found.items()}
            self._found = self._found | used

    def target(self, address: str) -> Target:
        """How to call a replica."""
        usual, connect_timeout_ms = KEEPALIVE_MS, CONNECT_TIMEOUT_MS
        if self.several:
            usual, connect_timeout_ms = KEEPALIVE_AMONG_SEVERAL_MS, CONNECT_TIMEOUT_AMONG_SEVERAL_MS
        if is_socket(address):
            connect_timeout_ms = CONNECT_TIMEOUT_TO_RELAY_MS
        keepalive_ms = min(self._keepalive_ms or usual, KEEPALIVE_MS)
        return Target(address, tls_name(address, self._found), connect_timeout_ms, keepalive_ms)

    @property
    def several(self) -> bool:
        """Whether there is more than one address to call."""
        return len(self._addresses()) > 1

    def shunned(self) -> str:
        """The leader that did not answer; empty if there is none."""
        with _lock:
            return self._leader if self._is_silent(self._leader) else ""

    def in_touch(self, address: str) -> bool:
        """Whether this one leads, and has answered when it was called last."""
        with _lock:
            return self._answered and address == self._leader

    # ------------------------------------------------------------------ what was learned

    def learn(self, addresses: Iterable[str], keepalive_ms: int = 0) -> None:
        """A coordinator has named all replicas, and maybe what keepalive it asks for."""
        usable = [address for address in addresses if _may_be_named(address)][:MOST_REPLICAS]
        with _lock:
            self._learned = tuple(usable) or self._learned
            self._keepalive_ms = keepalive_ms or self._keepalive_ms

    def answers(self, address: str) -> None:
        """This one has answered as the leader does; a relay does so without being it."""
        with _lock:
            self._silent.pop(address, None)
            if is_socket(address):
                return
            if address != self._leader:
                self._leader, self._leads_since = address, self.clock()
            self._answered = True

    def falls_silent(self, address: str, since: float) -> None:
        """This one did not answer.

        Args:
            address: who.
            since: when the call began. Who has begun to lead since then may answer others.
        """
        with _lock:
            if address == self._leader:
                if since < self._leads_since:
                    return
                self._answered = False
            self._silent[address] = self.clock() + SHUNNED_FOR

    def forgive_leader(self) -> None:
        """The leader that did not answer is to be called first again."""
        with _lock:
            self._silent.pop(self._leader, None)

    def names(self, address: str, leader: str) -> bool:
        """One that does not lead has named who does.

        Args:
            address: who does not lead.
            leader: who does; empty: it knows of none.

        Returns:
            Whether to go there: not if it is the one that did not answer.
        """
        with _lock:
            if self._leader == address:
                self._leader, self._answered = "", False
            if not _may_be_named(leader):
                return False
            if leader != self._leader:
                self._leader, self._answered, self._leads_since = leader, False, self.clock()
                self._silent.pop(leader, None)
            return not self._is_silent(leader)

    def _is_silent(self, address: str) -> bool:
        return self._silent.get(address, 0.0) > self.clock()


class Search:
    """One caller's way to the leader: whom it calls next, and how long it waits before.

    A turn calls everyone once; then comes a pause, longer each time. Who names the leader is followed at
    once. A thread has one for itself.

    Args:
        replicas: what is known, and what is learned on the way.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._words: dict[str, str] = {}
        self._called_at = replicas.clock()
        self._backoff = FIRST_BACKOFF
        self._looked_up = False
        """In this turn."""
        self._turn(0)
        self._address = self._untried()
        self._in_touch = replicas.in_touch(self._address)
        self._once_more = False
        """Whether it is called once more, for its connection has just fallen silent."""

    @property
    def target(self) -> Target:
        """Whom to call."""
        target = self.replicas.target(self._address)
        if self._once_more and self.replicas.several:
            return replace(target, connect_timeout_ms=CONNECT_TIMEOUT_ONCE_MORE_MS)
        return target

    def begin(self) -> Target:
        """The call begins now.

        Returns:
            Whom to make it to.
        """
        self._called_at = self.replicas.clock()
        return self.target

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers of the call."""
        return ((HEADER, self.replicas.shunned()),)

    @property
    def said(self) -> str:
        """What the calls since the last answer have met, for people: each address's last word."""
        words = dict(self._words)  # Other threads ask, too.
        if not words:
            return f"{self._address} has not answered yet"
        if len(words) == 1 and not self.replicas.several:
            return next(iter(words.values()))
        return "; ".join(f"{address}: {why}" for address, why in words.items())

    def answered(self) -> None:
        """The one that was called leads, or is a relay."""
        self.replicas.answers(self._address)
        # A connection to a socket is not lost on its way: who ended it is gone.
        self._in_touch, self._once_more = not is_socket(self._address), False
        self._words.clear()
        self._backoff = FIRST_BACKOFF
        self._turn(0)

    def again(self, why: str) -> float:
        """The same one is to be called again, for it is not at fault.

        Args:
            why: the call did not do, for people.

        Returns:
            Seconds to wait before.
        """
        self._words[self._address] = why
        self._in_touch = False
        return self._pause()

    def ended(self, why: str) -> float:
        """The one that was called ended a stream without a word, as a relay does that goes.

        Args:
            why: for people.

        Returns:
            Seconds to wait before the next call.
        """
        return self.left(why) if is_socket(self._address) else self.again(why)

    def denied(self, why: str) -> float:
        """This process has not what it takes to call this one; where there are relays, they ask for nothing.

        Args:
            why: for people.

        Returns:
            Seconds to wait before the next call.
        """
        if not self.replicas.relays:
            return self.again(why)
        self._words[self._address] = why
        self._in_touch = self._once_more = False
        return self._on()

    def ran_out(self, why: str) -> None:
        """The caller's own time was over before the call's end, which says nothing against anyone.

        Args:
            why: for people, if there is nothing better to say of the one that was called.
        """
        self._words.setdefault(self._address, why)

    def failed(self, why: str) -> float:
        """The one that was called did not answer.

        Who has just done so may have lost no more than a connection, and is called once more.

        Args:
            why: what happened, for people.

        Returns:
            Seconds to wait before the next call.
        """
        if self._in_touch:
            self._once_more = True
            return self.again(why)
        return self.left(why)

    def left(self, why: str) -> float:
        """The one that was called answers no more, and said so, or was asked again already.

        Args:
            why: what happened, for people.

        Returns:
            Seconds to wait before the next call.
        """
        self._words[self._address] = why
        self._in_touch = self._once_more = False
        self.replicas.falls_silent(self._address, self._called_at)
        return self._on()

    def not_leader(self, leader: str, replicas: Iterable[str], why: str) -> float:
        """The one that was called does not lead.

        Args:
            leader: who does, as it says; empty: it knows of none.
            replicas: all that it knows.
            why: its words, for people.

        Returns:
            Seconds to wait before the next call.
        """
        self._words[self._address] = why
        self._in_touch = self._once_more = False
        self._met_standby = True
        self.replicas.learn(replicas)
        if (
            len(self._followed) < MOST_FOLLOWED
            and self.replicas.names(self._address, leader)
            and leader not in self._followed
        ):
            self._tried.add(self._address)
            self._followed.add(leader)
            self._address = leader
            return 0.0
        return self._on()

    # ------------------------------------------------------------------ turns

    def _on(self) -> float:
        self._tried.add(self._address)
        if following := self._untried():
            self._address = following
            return 0.0
        if self._met_standby:
            # Those who answer know of nobody else, so it may be back.
            self.replicas.forgive_leader()
            if self.replicas.clock() - self._began >= HELD:
                self._backoff = FIRST_BACKOFF
        pause = self._pause()
        self._turn(pause)
        self._address = self._untried()
        return pause

    def _untried(self) -> str:
        """Whom this turn has not called yet; empty if it has called all."""
        if address := self._first_untried():
            return address
        if not self._looked_up:
            self._looked_up = True
            self.replicas.look_up()
        return self._first_untried()

    def _first_untried(self) -> str:
        if len(self._tried) > MOST_REPLICAS:
            return ""
        return next((address for address in self.replicas.known() if address not in self._tried), "")

    def _pause(self) -> float:
        pause = jittered(self._backoff, 0.5, 1.0)
        self._backoff = min(self._backoff * 2, MOST_BACKOFF)
        return pause

    def _turn(self, pause: float) -> None:
        """Begin another turn after a pause."""
        self._began = self.replicas.clock() + pause
        self._tried: set[str] = set()
        self._followed: set[str] = set()
        self._met_standby = False
        self._looked_up = False


def _may_be_named(address: str) -> bool:
    """Whether to go where a coordinator sends us."""
    return is_address(address) and not is_socket(address)


_lock = threading.Lock()
_all: dict[str, Replicas] = {}


def replicas_of(endpoint: str) -> Replicas:
    """What this process knows of an endpoint's replicas; a forked child begins with what its parent knew."""
    with _lock:
        if endpoint not in _all:
            _all[endpoint] = Replicas(endpoint)
        return _all[endpoint]


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
