"""Keeps the objects of a collection current: a list, then a watch from there."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Generic, Protocol, TypeVar

from muster.client.jitter import jittered
from muster.watcher.kubernetes.api import GONE, NOT_ALLOWED, KubernetesError, Manifest
from muster.watcher.polling import Fault
from muster.watcher.source import SourceError

FIRST_BACKOFF, MAX_BACKOFF = 0.5, 30.0
"""Seconds between two attempts, jittered."""
WATCH_SECONDS = (240, 480)
"""A watch ends after a random time between these, so that not all watchers come back at once."""

T = TypeVar("T")


class Reads(Protocol):
    """What a collection needs of the API; see ``Api``."""

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Manifest:
        """See ``Api.get``."""
        ...

    def watch(self, path: str, query: Mapping[str, str], seconds: int) -> AsyncGenerator[Manifest, None]:
        """See ``Api.watch``."""
        ...


@contextmanager
def understood(path: str) -> Iterator[None]:
    """Turn what another shape of an answer raises into a failed request.

    Args:
        path: what was asked for.

    Raises:
        KubernetesError: the answer has another shape.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise KubernetesError(f"{path}: an answer has an unknown shape ({error!r})") from error


class Collection(Generic[T]):
    """The objects of one collection that match a selector.

    Args:
        api: the API server.
        path: of the collection.
        query: the selectors.
        read: takes from an object what is kept of it.
        on_change: is called when the objects are known, after each change, and when a bookmark says that
            there was none.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        api: Reads,
        path: str,
        query: Mapping[str, str],
        read: Callable[[Manifest], T],
        on_change: Callable[[], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._path = path
        self._query = dict(query)
        self._read = read
        self._on_change = on_change
        self._pause = pause
        self._backoff = FIRST_BACKOFF
        self._fault = Fault(f"kubernetes ({path})")
        self.objects: dict[str, T] = {}
        """By their uid."""
        self.is_known = False
        """Whether the objects have been listed."""

    async def follow(self) -> None:
        """Keep the objects current until cancelled.

        Raises:
            SourceError: the API server does not allow it, and never did.
        """
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                version = await self._watch(version)
            except KubernetesError as error:
                if error.status == GONE:
                    version = ""  # The server has forgotten that version: list again.
                elif error.status in NOT_ALLOWED and not self.is_known:
                    raise SourceError(
                        f"Kubernetes does not let this watcher read {self._path}: {error}. Give its service "
                        "account the verbs list and watch there (docs/notices.md)."
                    ) from error
                else:
                    self._fault.happened(str(error))
                await self._pause(jittered(self._backoff, 0.5, 1.0))
                self._backoff = min(self._backoff * 2, MAX_BACKOFF)

    async def _list(self) -> str:
        """List the objects; return the resource version to watch from."""
        found = await self._api.get(self._path, self._query)
        with understood(self._path):
            objects = found.get("items") or []
            self.objects = {one["metadata"]["uid"]: self._read(one) for one in objects}
            version = str(found["metadata"]["resourceVersion"])
            self.is_known = True
            self._works()
        return version

    async def _watch(self, version: str) -> str:
        """Apply events until the server ends the watch; return the resource version to go on from."""
        began_with = version
        query = {**self._query, "resourceVersion": version}
        async with aclosing(self._api.watch(self._path, query, random.randint(*WATCH_SECONDS))) as events:
            async for event in events:
                with understood(self._path):
                    version = self._apply(event) or version
                    self._works()
        if version == began_with:
            # A server that ends watches at once must not be called in a loop.
            await self._pause(jittered(FIRST_BACKOFF, 0.5, 1.0))
        return version

    def _apply(self, event: Manifest) -> str:
        changed = event["object"]
        metadata = changed.get("metadata") or {}
        match event["type"]:
            case "ADDED" | "MODIFIED":
                self.objects[metadata["uid"]] = self._read(changed)
            case "DELETED":
                self.objects.pop(metadata["uid"], None)
        return str(metadata.get("resourceVersion") or "")

    def _works(self) -> None:
        self._fault.over()
        self._backoff = FIRST_BACKOFF
        self._on_change()
