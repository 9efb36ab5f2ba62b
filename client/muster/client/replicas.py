"""Finds the leader behind an endpoint: several coordinators of which one leads, and relays.

A relay is a socket of this machine. A caller tries it before all other addresses, and leaves it at once when
it does not answer. :class:`Replicas` is what this process knows of an endpoint; session, store and rendezvous
share it. A :class:`Search` is the way of one caller to the leader. Neither calls anything.
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
from muster.client.protocol import NOT_LEADER_HEADER

KEEPALIVE_MS = 3_333
"""Milliseconds without data before a ping, and for its answer: each a third of the coordinator's default
session TTL, so that a dead connection is replaced within the TTL. A coordinator with a shorter TTL says so in
its Welcome, and the session reconnects with a third of that."""
KEEPALIVE_AMONG_SEVERAL_MS = 1_667
"""The same among replicas, until a coordinator has named its own: a third of the default lease TTL, so that a
caller notices a stopped leader before another one leads."""
CONNECT_TIMEOUT_MS = 5_000
"""For one attempt to connect, if nothing answers; a refusal ends it at once."""
CONNECT_TIMEOUT_AMONG_SEVERAL_MS = 2_000
"""The same if there are other addresses."""
CONNECT_TIMEOUT_ONCE_MORE_MS = 500
"""The same for a leader whose connection has just fallen silent. If only the connection is lost, the leader
answers at once; if it is stopped, the standbys know who leads next."""
CONNECT_TIMEOUT_TO_RELAY_MS = 1_000
"""The same for a relay, which is on this machine."""
FIRST_BACKOFF = 0.1
MAX_BACKOFF = 1.0
"""Seconds between attempts, jittered; well below the session TTL."""
EARLY_TIME = 3.0
"""Seconds after the first failure: the default reset grace, within which a process must be back."""
MAX_EARLY_BACKOFF = 0.5
"""Seconds between attempts in that time, jittered. After an outage of 2 s, enough time is left for a
handshake beside those of all other ranks."""
SILENT_BACKOFF = 10.0
"""Seconds for which an address that did not answer is called last, and not when a standby names it."""
STANDBY_HOLD = 0.8
"""Seconds for which standbys must have held the calls of a turn, or a standby one call. There is no other
leader yet, the time was a pause, and the leader should be found soon, be it the next one or the old one."""
MAX_FOLLOWED = 8
"""Leaders named by standbys that are followed in one turn."""
MAX_REPLICAS = 64
"""Addresses that a coordinator may name."""


@dataclass(frozen=True, slots=True)
class Target:
    """An address, and how to connect to it."""

    address: str
    """``HOST:PORT``, or ``unix:///PATH``."""
    tls_name: str = ""
    """The name that its certificate must have; empty: the address's host."""
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS
    keepalive_ms: int = KEEPALIVE_MS


def resolve(address: str) -> list[str]:
    """Resolve a name to its addresses, of the family that this machine prefers.

    Args:
        address: ``HOST:PORT``.

    Returns:
        ``IP:PORT`` of each; the address itself if it has no name, or the name is unknown.
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
    """The known coordinators behind an endpoint. Threads may share it.

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
        """The addresses of each configured name, as far as it was resolved."""
        self.relays = relays_of(endpoint)
        """Only configured ones: a coordinator must not send callers to a socket of this machine."""
        self._learned: tuple[str, ...] = ()
        self._leader = ""
        """The leader, as far as known; it may be silent."""
        self._leads_since = 0.0
        self._answered = False
        """Whether the leader has answered this process, and has not failed since."""
        self._silent: dict[str, float] = {}
        """The addresses that did not answer, and until when they are called last."""
        self._keepalive_ms = 0
        """What the coordinator asks for; 0: it has not asked."""

    # ------------------------------------------------------------------ what to do

    def known(self) -> list[str]:
        """Return all addresses, in the order in which to call them."""
        with _lock:
            addresses = self._addresses()
            return sorted(addresses, key=self._is_silent) if self._silent else list(addresses)

    def _addresses(self) -> dict[str, None]:
        given = [address for found in self._found.values() for address in found]
        leader = [self._leader] if self._leader else []
        return dict.fromkeys([*self.relays, *leader, *self._learned, *given])

    def look_up(self) -> None:
        """Resolve the configured names."""
        found = {address: self._resolve(address) for address in self._found if not is_socket(address)}
        with _lock:
            # A name with one address is called by its name.
            used = {name: some if len(some) > 1 else [name] for name, some in found.items()}
            self._found = self._found | used

    def target(self, address: str) -> Target:
        """Return how to call an address."""
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

    def backed_off_leader(self) -> str:
        """Return the leader if it did not answer, or an empty text."""
        with _lock:
            return self._leader if self._is_silent(self._leader) else ""

    def in_touch(self, address: str) -> bool:
        """Return whether an address leads, and answered the last call."""
        with _lock:
            return self._answered and address == self._leader

    # ------------------------------------------------------------------ what was learned

    def learn(self, addresses: Iterable[str], keepalive_ms: int = 0) -> None:
        """Store the replicas that a coordinator names, and the keepalive that it asks for."""
        usable = [address for address in addresses if _may_be_named(address)][:MAX_REPLICAS]
        with _lock:
            self._learned = tuple(usable) or self._learned
            self._keepalive_ms = keepalive_ms or self._keepalive_ms

    def answers(self, address: str) -> None:
        """Note that an address has answered as the leader, or as a relay."""
        with _lock:
            self._silent.pop(address, None)
            if is_socket(address):
                return
            if address != self._leader:
                self._leader, self._leads_since = address, self.clock()
            self._answered = True

    def falls_silent(self, address: str, since: float) -> None:
        """Note that an address did not answer.

        Args:
            address: the address.
            since: when the call began. A coordinator that leads since a later time may answer other calls.
        """
        with _lock:
            if address == self._leader:
                if since < self._leads_since:
                    return
                self._answered = False
            self._silent[address] = self.clock() + SILENT_BACKOFF

    def clear_leader_backoff(self) -> None:
        """Call the leader first again, although it did not answer."""
        with _lock:
            self._silent.pop(self._leader, None)

    def names(self, address: str, leader: str) -> bool:
        """Note the leader that a standby names.

        Args:
            address: the standby.
            leader: the leader; empty: the standby knows of none.

        Returns:
            Whether to call that leader: not if it is the one that did not answer.
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
    """One caller's way to the leader: which address it calls next, and how long it waits before.

    A turn calls every address once; then comes a pause, longer each time. A leader that a standby names is
    called at once. A search belongs to one thread.

    Args:
        replicas: what is known, and what is learned on the way.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._last_errors: dict[str, str] = {}
        self._called_at = replicas.clock()
        self._backoff = FIRST_BACKOFF
        self._failing_since: float | None = None
        """When the first call after the last answer failed; None: none has."""
        self.turns = -1
        """Completed turns."""
        self.met_standby = False
        """Whether a standby has answered since the leader did."""
        self._looked_up = False
        """In this turn."""
        self._begin_turn(0)
        self._address = self._untried()
        self._in_touch = replicas.in_touch(self._address)
        self._once_more = False
        """Whether the address is called once more, because its connection has just fallen silent."""

    @property
    def target(self) -> Target:
        """The address to call, and how."""
        target = self.replicas.target(self._address)
        if self._once_more and self.replicas.several:
            return replace(target, connect_timeout_ms=CONNECT_TIMEOUT_ONCE_MORE_MS)
        return target

    def begin(self) -> Target:
        """Begin a call, and return its target."""
        self._called_at = self.replicas.clock()
        return self.target

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers of the call."""
        return ((NOT_LEADER_HEADER, self.replicas.backed_off_leader()),)

    @property
    def followed(self) -> bool:
        """Whether a standby has named the current address as the leader."""
        return self._address in self._followed

    @property
    def last_errors(self) -> dict[str, str]:
        """The last error of each address since the last answer, for people."""
        return dict(self._last_errors)  # Another thread may add one.

    @property
    def said(self) -> str:
        """The last errors as one text."""
        errors = self.last_errors
        if not errors:
            return f"{self._address} has not answered yet"
        if len(errors) == 1 and not self.replicas.several:
            return next(iter(errors.values()))
        return "; ".join(f"{address}: {why}" for address, why in errors.items())

    def answered(self) -> None:
        """Note that the address leads, or is a relay."""
        self.replicas.answers(self._address)
        # A connection to a socket cannot get lost on its way: if it ends, the relay is gone.
        self._in_touch, self._once_more = not is_socket(self._address), False
        self._last_errors.clear()
        self._backoff, self._failing_since = FIRST_BACKOFF, None
        self.met_standby = False
        self._begin_turn(0)

    def again(self, why: str) -> float:
        """Call the same address again, because it is not at fault.

        Args:
            why: the error, for people.

        Returns:
            Seconds to wait before the next call.
        """
        self._last_errors[self._address] = why
        self._in_touch = False
        return self._pause()

    def ended(self, why: str) -> float:
        """Continue after a stream that ended without a status, as a relay's does when it stops.

        Args:
            why: for people.

        Returns:
            Seconds to wait before the next call.
        """
        return self.left(why) if is_socket(self._address) else self.again(why)

    def denied(self, why: str) -> float:
        """Continue after the address refused this process's token; a relay asks for none.

        Args:
            why: for people.

        Returns:
            Seconds to wait before the next call.
        """
        if not self.replicas.relays:
            return self.again(why)
        self._lose_touch(why)
        return self._next()

    def ran_out(self, why: str) -> None:
        """Note that the caller's own timeout ended the call; the address may be fine.

        Args:
            why: for people, unless the address has an error already.
        """
        self._last_errors.setdefault(self._address, why)

    def failed(self, why: str) -> float:
        """Continue after the address did not answer.

        If it answered the call before, only the connection may be lost, so it is called once more.

        Args:
            why: the error, for people.

        Returns:
            Seconds to wait before the next call.
        """
        if self._in_touch:
            self._once_more = True
            return self.again(why)
        return self.left(why)

    def left(self, why: str) -> float:
        """Continue with the next address: this one has stopped.

        Args:
            why: the error, for people.

        Returns:
            Seconds to wait before the next call.
        """
        self._lose_touch(why)
        self.replicas.falls_silent(self._address, self._called_at)
        return self._next()

    def not_leader(self, leader: str, replicas: Iterable[str], why: str) -> float:
        """Continue after a standby answered.

        Args:
            leader: the leader that it names; empty: it knows of none.
            replicas: all replicas that it names.
            why: its error, for people.

        Returns:
            Seconds to wait before the next call.
        """
        self._lose_touch(why)
        self.met_standby = self._standby_in_turn = True
        self.replicas.learn(replicas)
        held = bool(self.replicas.backed_off_leader())
        held = held and self.replicas.clock() - self._called_at >= STANDBY_HOLD
        if held:
            # Nobody else leads, so the leader may be back. Its processes have only the reset grace to return.
            self.replicas.clear_leader_backoff()
        if (
            len(self._followed) < MAX_FOLLOWED
            and self.replicas.names(self._address, leader)
            and leader not in self._followed
        ):
            self._tried.add(self._address)
            self._followed.add(leader)
            self._address, self._once_more = leader, held
            return 0.0
        return self._next()

    def _lose_touch(self, why: str) -> None:
        self._last_errors[self._address] = why
        self._in_touch = self._once_more = False

    # ------------------------------------------------------------------ turns

    def _next(self) -> float:
        """Choose the next address; return the seconds to wait before its call."""
        self._tried.add(self._address)
        if following := self._untried():
            self._address = following
            return 0.0
        if self._standby_in_turn:
            # The standbys know of no other leader, so the old one may be back.
            self.replicas.clear_leader_backoff()
            if self.replicas.clock() - self._began >= STANDBY_HOLD:
                self._backoff = FIRST_BACKOFF
        pause = self._pause()
        self._begin_turn(pause)
        self._address = self._untried()
        return pause

    def _untried(self) -> str:
        """Return an address that this turn has not called; empty if it has called all."""
        if address := self._first_untried():
            return address
        if not self._looked_up:
            self._looked_up = True
            self.replicas.look_up()
        return self._first_untried()

    def _first_untried(self) -> str:
        if len(self._tried) > MAX_REPLICAS:
            return ""
        return next((address for address in self.replicas.known() if address not in self._tried), "")

    def _pause(self) -> float:
        now = self.replicas.clock()
        self._failing_since = now if self._failing_since is None else self._failing_since
        early = now - self._failing_since < EARLY_TIME
        pause = jittered(min(self._backoff, MAX_EARLY_BACKOFF) if early else self._backoff, 0.5, 1.0)
        self._backoff = min(self._backoff * 2, MAX_BACKOFF)
        return pause

    def _begin_turn(self, pause: float) -> None:
        """Begin a turn after a pause."""
        self.turns += 1
        self._began = self.replicas.clock() + pause
        self._tried: set[str] = set()
        self._followed: set[str] = set()
        self._standby_in_turn = False
        self._looked_up = False


def _may_be_named(address: str) -> bool:
    """Return whether callers may go to an address that a coordinator names."""
    return is_address(address) and not is_socket(address)


_lock = threading.Lock()
_all: dict[str, Replicas] = {}


def replicas_of(endpoint: str) -> Replicas:
    """Return what this process knows of an endpoint's replicas; a forked child starts with its parent's."""
    with _lock:
        if endpoint not in _all:
            _all[endpoint] = Replicas(endpoint)
        return _all[endpoint]


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
