"""Amazon EC2: interruptions of Spot instances, rebalance recommendations and scheduled events, by IMDSv2."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.sources.metadata import NOT_FOUND, OK, UNAUTHORIZED, Answer, MetadataServer, NoAnswerError
from muster.watcher.sources.reading import (
    LEAD,
    Parts,
    document,
    items,
    mapping,
    name,
    printable,
    text,
    utc,
    when,
)

BASE = "http://169.254.169.254"
INTERVAL = 5.0
"""Seconds between looks; AWS recommends 5 s."""
TOKEN_SECONDS = 21_600
"""How long a token is asked for: six hours, the most that there is."""
TOKEN_MARGIN = 300
"""Seconds before its end at which a token is replaced."""
TOKEN = re.compile(rb"[A-Za-z0-9+/=_.-]{1,1024}")
PREFIX = "/latest/meta-data"

Parse: TypeAlias = Callable[[object, str, float], list[Notice]]


def spot_interruption(found: object, node: str, now: float) -> list[Notice]:
    """Return the notice in ``spot/instance-action``.

    Args:
        found: the document.
        node: the node's name.
        now: seconds since 1970.

    Raises:
        LookError: it has another shape.
    """
    source = "spot/instance-action"
    fields = mapping(found, source)
    action = name(fields, "action", source)
    # A hibernation begins at once, and its document need not say when.
    deadline = when(text(fields, "time", source), now, source) if "time" in fields else None
    detail = action if deadline is None else f"{action}/{utc(deadline)}"
    reason = f"AWS interrupts the Spot instance {node}: {action}"
    return [Notice(id=f"aws/spot/{node}/{detail}", reason=reason, stop=True, deadline=deadline)]


def rebalance(found: object, node: str, now: float) -> list[Notice]:
    """Return the notice in ``events/recommendations/rebalance``; as for ``spot_interruption``."""
    source = "events/recommendations/rebalance"
    noticed = when(text(mapping(found, source), "noticeTime", source), now, source)
    reason = f"AWS may soon interrupt the Spot instance {node} (rebalance recommendation)"
    return [Notice(id=f"aws/rebalance/{node}/{utc(noticed)}", reason=reason, stop=False)]


def scheduled(found: object, node: str, now: float, lead: float = LEAD) -> list[Notice]:
    """Return the notices in ``events/maintenance/scheduled``; as for ``spot_interruption``.

    Args:
        found: the document.
        node: the node's name.
        now: seconds since 1970.
        lead: seconds before an event's first possible time at which it becomes a notice.

    Raises:
        LookError: it has another shape.
    """
    events = items(found, "events/maintenance/scheduled")
    notices = (_scheduled(event, node, now, lead) for event in events)
    return [notice for notice in notices if notice is not None]


def _scheduled(event: Mapping[str, object], node: str, now: float, lead: float) -> Notice | None:
    source = "events/maintenance/scheduled"
    if text(event, "State", source) != "active":
        return None
    begins = when(text(event, "NotBefore", source), now, source)
    ends = event.get("NotAfter")  # Some events have none, or an empty one.
    if begins - now > lead or (ends and when(text(event, "NotAfter", source), now, source) < now):
        return None
    code = name(event, "Code", source)
    description = event.get("Description")
    reason = f"AWS schedules {code} of {node}"
    if isinstance(description, str) and description:
        reason += f": {printable(description)}"
    # An event that is moved keeps its name, and may hit a job that was saved for it before.
    detail = f"{name(event, 'EventId', source)}/{utc(begins)}"
    return Notice(id=f"aws/scheduled/{node}/{detail}", reason=reason, stop=True, deadline=begins)


class Aws:
    """Reads the metadata of an EC2 instance.

    Args:
        node: the node's name.
        base: the metadata server's address.
        lead: seconds before a scheduled event at which it becomes a notice.
        clock: seconds since 1970.
        monotonic: seconds, for the age of the token.
    """

    def __init__(
        self,
        node: str,
        *,
        base: str = BASE,
        lead: float = LEAD,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._server = MetadataServer(base)
        self._lead = lead
        self._clock = clock
        self._monotonic = monotonic
        self._token = ""
        self._token_until = 0.0
        self._renewing = asyncio.Lock()
        parts = Parts((self._spot_interruption, self._rebalance, self._scheduled))
        self.look = parts.look
        """Return the notices in force; raises ``LookError``."""

    async def _spot_interruption(self) -> list[Notice]:
        return await self._read("/spot/instance-action", spot_interruption)

    async def _rebalance(self) -> list[Notice]:
        return await self._read("/events/recommendations/rebalance", rebalance)

    async def _scheduled(self) -> list[Notice]:
        def parse(found: object, node: str, now: float) -> list[Notice]:
            return scheduled(found, node, now, self._lead)

        return await self._read("/events/maintenance/scheduled", parse)

    async def _read(self, path: str, parse: Parse) -> list[Notice]:
        """Return the notices of a document, which is absent while there are no such events."""
        token = await self._session()
        answer = await self._get(path, token)
        if answer.status == UNAUTHORIZED:
            # The server may forget a token before its time, such as when the instance was suspended.
            answer = await self._get(path, await self._session(refused=token))
        if not answer.found():
            return []
        return parse(document(answer.body, answer.url), self._node, self._clock())

    async def _get(self, path: str, token: str) -> Answer:
        return await self._server.get(PREFIX + path, {"X-aws-ec2-metadata-token": token})

    async def _session(self, *, refused: str = "") -> str:
        """Return a token that is good for a while.

        Args:
            refused: a token that the server does not take.
        """
        async with self._renewing:
            now = self._monotonic()
            if self._token in ("", refused) or now >= self._token_until:
                self._token = await self._new_token()
                self._token_until = now + TOKEN_SECONDS - TOKEN_MARGIN
            return self._token

    async def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        try:
            answer = await self._server.put("/latest/api/token", headers)
        except NoAnswerError as error:
            raise LookError(f"{error} In a container, the instance's hop limit must be 2 or more.") from None
        if answer.status != OK:
            advice = "Is this an EC2 instance" if answer.status == NOT_FOUND else "Is its metadata enabled"
            raise LookError(f"{answer.url} answers {answer.status}. {advice}?")
        token = answer.body.strip()
        if not TOKEN.fullmatch(token):
            raise LookError(f"{answer.url} gives no token.")
        return token.decode("ascii")
