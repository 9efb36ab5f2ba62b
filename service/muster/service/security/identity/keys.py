"""The current keys of an issuer, from a file that is followed or fetched over HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import structlog

from muster.service.security.files import FileError, Reloaded, read
from muster.service.security.identity.fetching import FetchError
from muster.service.security.identity.jwks import Key, KeySet, parse

REFRESH = 300.0
"""Seconds after which keys are fetched again, so that withdrawn keys are dropped."""
PAUSE = 10.0
"""Minimum seconds between the begins of two fetches, however many tokens have unknown keys."""

MAX_WAITING = 1_000
"""Calls that may wait for one fetch. None of these callers has shown a verified token yet."""


class KeyUnknown(Exception):
    """The issuer does not have this key. The message says why, for the log."""


class KeysUnavailable(Exception):
    """The issuer's keys, or the newest ones, are unavailable at present. The message says why."""


class Keys(Protocol):
    """The keys of one issuer."""

    def known(self, kid: str | None) -> Key | None:
        """Return the key that a token names, if it is known now.

        Args:
            kid: the key id; None: the token has no key id.
        """
        ...

    async def find(self, kid: str | None) -> Key:
        """Return the key that a token names, and wait for a fetch if it is unknown.

        Args:
            kid: the key id; None: the token has no key id.

        Raises:
            KeyUnknown: the issuer has no such key.
            KeysUnavailable: the keys are unavailable at present.
        """
        ...

    def refresh(self) -> None:
        """Load or fetch the keys again if that is due; called about every second."""
        ...

    def close(self) -> None:
        """Cancel a fetch in progress."""
        ...


class KeysInFile:
    """Keys from a file. While the file is being replaced or invalid, the last good keys stay.

    Args:
        path: the file.

    Raises:
        FileError: the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = Reloaded("keys", [path], lambda: _load(path))

    def known(self, kid: str | None) -> Key | None:
        """See ``Keys``."""
        return self._keys.value.find(kid)

    async def find(self, kid: str | None) -> Key:
        """See ``Keys``."""
        key = self.known(kid)
        if key is None:
            raise KeyUnknown(_missing(kid, self._keys.value, str(self._path)))
        return key

    def refresh(self) -> None:
        """See ``Keys``."""
        self._keys.look()

    def close(self) -> None:
        """See ``Keys``."""


def _load(path: Path) -> KeySet:
    try:
        return parse(read(path))
    except ValueError as error:
        raise FileError(f"{path} holds no keys of an issuer: {error}.") from None


def _missing(kid: str | None, keys: KeySet, where: str) -> str:
    if kid is None:
        return f"it names no key (kid), and {where} has {len(keys.keys)}"
    return f"the key that it names (kid) is not among the {len(keys.keys)} of {where}"


class FetchedKeys:
    """Keys that are fetched in the background, and at once if a token names an unknown key.

    A token with a known key never waits. While the source is unreachable, the last keys stay.

    Args:
        name: the name of the issuer, for the log.
        url: the source of the keys, for people.
        fetch: fetches the bytes of the key set.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self, name: str, url: str, fetch: Callable[[], Awaitable[bytes]], clock: Callable[[], float]
    ) -> None:
        self._name = name
        self._url = url
        self._fetch = fetch
        self._clock = clock
        self._keys: KeySet | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._waiting = 0
        self._begun_at = float("-inf")
        self._complaint = ""

    def known(self, kid: str | None) -> Key | None:
        """See ``Keys``."""
        return self._keys.find(kid) if self._keys is not None else None

    async def find(self, kid: str | None) -> Key:
        """See ``Keys``."""
        if (key := self.known(kid)) is not None:
            return key
        if kid is None and self._keys is not None:
            raise KeyUnknown(_missing(kid, self._keys, self._url))
        if self._fetching is None and self._clock() - self._begun_at < PAUSE:
            raise KeysUnavailable(
                self._complaint or f"{self._url} was asked a moment ago, and did not have this key then"
            )
        if self._waiting >= MAX_WAITING:
            raise KeysUnavailable(
                f"{self._url} is being asked, and {MAX_WAITING:,} calls wait for it already"
            )
        self._waiting += 1
        try:
            # A call that gives up must not cancel the fetch for the others.
            await asyncio.wait([self._fetching or self._begin()])
        finally:
            self._waiting -= 1
        if (key := self.known(kid)) is not None:
            return key
        if self._keys is None or self._complaint:
            raise KeysUnavailable(self._complaint or f"{self._url} is not asked any more")
        raise KeyUnknown(_missing(kid, self._keys, self._url))

    def refresh(self) -> None:
        """See ``Keys``."""
        every = REFRESH if self._keys is not None and not self._complaint else PAUSE
        if self._fetching is None and self._clock() - self._begun_at >= every:
            self._begin()

    def _begin(self) -> asyncio.Task[None]:
        self._begun_at = self._clock()
        self._fetching = asyncio.create_task(self._refresh())
        return self._fetching

    async def _refresh(self) -> None:
        try:
            keys = parse(await self._fetch())
        except FetchError as error:
            self._failed(str(error))
        except ValueError as error:
            self._failed(f"what {self._url} answers cannot be used: {error}")
        else:
            self._got(keys)
        finally:
            self._fetching = None

    def _failed(self, why: str) -> None:
        if why != self._complaint:
            kept = self._keys is not None
            what = "The last known stay in force" if kept else "Until then its tokens are refused"
            structlog.get_logger().error(
                "keys.unavailable", issuer=self._name, reason=f"{why}. It is tried again. {what}."
            )
        self._complaint = why

    def _got(self, keys: KeySet) -> None:
        if self._complaint or self._keys is None or self._keys.ids != keys.ids:
            structlog.get_logger().info("keys.fetched", issuer=self._name, url=self._url, keys=len(keys.keys))
        self._keys, self._complaint = keys, ""

    def close(self) -> None:
        """See ``Keys``."""
        if self._fetching is not None:
            self._fetching.cancel()
