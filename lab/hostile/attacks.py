"""Every kind of hostile client, and how it is to be answered."""

from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass

from lab.hostile import connections, readers, requests, windows
from lab.hostile.attacker import Attacker


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One kind of hostile client."""

    act: Callable[[Attacker], Awaitable[None]]
    """One wave of it. Its docstring says what it does, and of which row or invariant it is."""
    answers: Set[str]
    """How it is refused or limited: at least one of these must come."""
    wrong: Set[str] = frozenset()
    """Answers that must never come."""
    pause: float = 2.0
    """Seconds between two waves."""
    relayed: bool = False
    """Whether it is there a second time, before a relay."""

    @property
    def name(self) -> str:
        """What it is called."""
        return self.act.__name__

    @property
    def row(self) -> str:
        """The row or invariant that its docstring begins with."""
        return (self.act.__doc__ or "").partition(":")[0]


SERVED = frozenset({"OK", "welcome"})
"""What a caller must not hear that is to be refused."""
CLOSED = frozenset({"closed", "GOAWAY"})

ATTACKS = (
    Attack(act=requests.gzip_bombs, answers={"UNIMPLEMENTED"}, wrong=SERVED, pause=5.0, relayed=True),
    Attack(
        act=requests.gzip_bombs_with_token, answers={"UNIMPLEMENTED"}, wrong=SERVED, pause=5.0, relayed=True
    ),
    Attack(
        act=requests.large_open_requests,
        # A relay has no open method.
        answers={"LIMIT_EXCEEDED max_open_request_bytes", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"},
        wrong=SERVED,
        pause=5.0,
        relayed=True,
    ),
    Attack(act=requests.broken_messages, answers={"INVALID_ARGUMENT"}, wrong=SERVED, relayed=True),
    Attack(
        act=requests.oversized_messages,
        answers={"LIMIT_EXCEEDED max_payload_bytes", "LIMIT_EXCEEDED max_store_value_bytes"},
        wrong=SERVED,
        pause=5.0,
        relayed=True,
    ),
    Attack(
        act=requests.unknown_tokens,
        answers={"TOKEN_UNKNOWN", "TOKEN_MISSING"},
        wrong=SERVED,
        relayed=True,
    ),
    Attack(act=requests.other_runs, answers={"RUN_NOT_ALLOWED"}, wrong=SERVED, relayed=True),
    Attack(act=requests.higher_roles, answers={"ROLE_TOO_LOW"}, wrong=SERVED, relayed=True),
    Attack(act=requests.older_processes, answers={"STALE_GENERATION"}, wrong=SERVED, relayed=True),
    Attack(act=requests.full_store, answers={"LIMIT_EXCEEDED max_store_bytes"}, pause=0.5),
    Attack(act=requests.message_flood, answers={"RELEASED"}, relayed=True),
    Attack(act=readers.unread_gathers, answers={"SLOW_CONSUMER", "held back"}, pause=5.0, relayed=True),
    Attack(act=readers.unread_decisions, answers={"SLOW_CONSUMER"}, pause=5.0),
    Attack(act=readers.unread_values, answers={"SLOW_CONSUMER", "held"}, pause=5.0, relayed=True),
    Attack(act=readers.unread_dialogues, answers={"served", "held back", "SLOW_CONSUMER"}, pause=5.0),
    Attack(act=windows.tiny_windows, answers={"closed"}, pause=1.0, relayed=True),
    Attack(act=readers.watches, answers={"LIMIT_EXCEEDED max_watches_per_caller"}, pause=5.0),
    Attack(act=readers.health_watches, answers={"LIMIT_EXCEEDED max_watchers_per_address"}, pause=5.0),
    Attack(act=readers.silent_sessions, answers={"HELLO_REQUIRED"}, relayed=True),
    Attack(act=connections.silent_connections, answers=CLOSED, relayed=True),
    Attack(act=connections.half_open_tls, answers=CLOSED, relayed=True),
    Attack(act=connections.half_open_http2, answers=CLOSED, relayed=True),
    Attack(act=connections.idle_connections, answers=CLOSED, relayed=True),
    Attack(act=connections.connection_flood, answers={"SETTINGS"}, pause=5.0, relayed=True),
    Attack(act=connections.rebound_pages, answers={"421"}, wrong={"200"}),
    Attack(act=connections.slow_pages, answers=CLOSED),
)

BY_NAME = {attack.name: attack for attack in ATTACKS}
