"""A keeper's stream to the coordinator, or to the replica that leads.

The stream opens with all that the keeper has. Peers and orders come by push, and changes go out by calls on
the same connection. When anything breaks, the stream is opened again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from muster.checkpoint.committed import SaveAttempt
from muster.client.calls import ELSEWHERE, call_headers, open_aio_channel, reason_of, search_on
from muster.client.credentials import TOKEN_REFUSED, Credentials
from muster.client.errors import EnvironmentValueError
from muster.client.protocol import PROTOCOL_VERSION
from muster.client.replicas import Replicas, Search, Target
from muster.keeper import codec
from muster.keeper.change_signal import ChangeSignal
from muster.keeper.keeper import Keeper
from muster.keeper.reporting import Report
from muster.keeper.vocabulary import Attachment, LocalCheckpoint
from muster.v1 import local_pb2 as pb
from muster.v1 import local_pb2_grpc

logger = logging.getLogger(__name__)

FIRST_ANSWER = 15.0
"""Longest time in seconds from the opening of the stream to its first peers or orders."""
CALL_TIMEOUT = 10.0
"""Seconds for one report."""
REOPENS = frozenset({"KEEPER_NOT_CONNECTED"})
"""Refusals after which the keeper opens another stream without ``REFUSED_PAUSE``."""
REFUSED_PAUSE = 5.0
"""Seconds until the next try after a refusal that is likely to be repeated."""


class StreamEndedError(Exception):
    """The stream ended without a status, as a relay's does when it stops."""


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """A keeper's description of itself for the coordinator."""

    url: str
    failure_domain: str
    node_name: str
    version: str


class CoordinatorLink:
    """Keeps a keeper's stream to the coordinator open.

    Args:
        endpoint: the coordinator, its replicas, or a relay.
        run_id: the run.
        keeper: reports what it has, and takes the orders.
        address: the keeper's description of itself.
        credentials: of this process. A Unix socket needs none.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        keeper: Keeper,
        address: KeeperAddress,
        credentials: Credentials,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = Replicas(endpoint, clock)
        self._run_id = run_id
        self._keeper = keeper
        self._address = address
        self._credentials = credentials
        self._heard: Report | None = None
        """What the coordinator has heard on the open stream; None: no stream is open."""
        self._ask: Callable[[SaveAttempt], Awaitable[pb.PermitResponse]] | None = None
        """Asks for a permit on the open stream's connection."""
        self._heard_changed = ChangeSignal()
        self.said = "the coordinator has not answered yet"
        """Why no stream is open, for people."""

    async def attached(self, attachment: Attachment, seconds: float) -> bool:
        """Wait until the coordinator has heard of an attachment.

        Args:
            attachment: the ranks that it must have heard of, among others.
            seconds: the longest time to wait.

        Returns:
            Whether it has heard.
        """
        return await self._heard_changed.until(lambda: self._has_heard(attachment), seconds)

    def _has_heard(self, attachment: Attachment) -> bool:
        heard = None if self._heard is None else self._heard.attachment
        return (
            heard is not None
            and heard.generation == attachment.generation
            and heard.world_size == attachment.world_size
            and heard.replicas == attachment.replicas
            and heard.ranks >= attachment.ranks
        )

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        search = Search(self._replicas)
        while True:
            target = search.begin()
            try:
                await self._stay(search, target)
            except grpc.aio.AioRpcError as error:
                pause = await self._pause_after(search, error)
            except (StreamEndedError, TimeoutError) as error:
                self._say(str(error) or "the coordinator did not answer in time")
                pause = search.ended(self.said)
            except EnvironmentValueError as error:
                self._say(str(error))
                pause = REFUSED_PAUSE
            await asyncio.sleep(pause)

    async def _pause_after(self, search: Search, error: grpc.aio.AioRpcError) -> float:
        reason = reason_of(error)
        if reason in TOKEN_REFUSED:
            self._credentials.refused()
        fault = self._credentials.fault(error.details() or "")
        # A look-up of a name may take long, and must not stop the loop.
        pause = await asyncio.to_thread(search_on, search, error, str(fault or ""))
        if reason and reason not in ELSEWHERE | REOPENS:
            self._say(error.details() or reason)
            return max(pause, REFUSED_PAUSE)
        self._say(search.said)
        return pause

    def _say(self, why: str) -> None:
        if why != self.said:
            logger.warning("not connected to the coordinator: %s", why)
        self.said = why

    # ------------------------------------------------------------------ one stream

    async def _stay(self, search: Search, target: Target) -> None:
        """Open a stream, and stay until it ends.

        Raises:
            AioRpcError: a call failed.
            StreamEndedError: the stream ended.
            TimeoutError: the coordinator did not answer.
        """
        credentials = self._credentials.valid_for(target.address)
        channel = open_aio_channel(target, credentials)
        tasks: list[asyncio.Task[None]] = []
        try:
            stub: Any = local_pb2_grpc.LocalCheckpointServiceStub(channel)
            metadata = await call_headers(search, credentials)
            report = self._keeper.report()
            request = codec.keep_request(self._run_id, self._about(), report, PROTOCOL_VERSION)
            call = stub.Keep(request, metadata=metadata)
            async with asyncio.timeout(FIRST_ANSWER):
                # Replicas are named before the coordinator has taken the report in.
                while self._take(await call.read()) == "replicas":
                    pass
            search.answered()
            logger.info("connected to the coordinator at %s", target.address)
            self.said = ""

            async def ask(attempt: SaveAttempt) -> pb.PermitResponse:
                request = codec.permit_request(self._run_id, self._keeper.id, attempt)
                metadata = await call_headers(search, credentials)
                response: pb.PermitResponse = await stub.Permit(
                    request, timeout=CALL_TIMEOUT, metadata=metadata
                )
                return response

            self._ask = ask
            self._hear(report)
            tasks = [
                asyncio.create_task(self._listen(call), name="muster-keeper-listen"),
                asyncio.create_task(self._tell(stub, search, credentials), name="muster-keeper-tell"),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._heard = self._ask = None
            self._keeper.forget_question()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close()

    def _about(self) -> pb.Keeper:
        return pb.Keeper(
            id=self._keeper.id,
            url=self._address.url,
            failure_domain=self._address.failure_domain,
            node_name=self._address.node_name,
            version=self._address.version,
        )

    async def _listen(self, call: Any) -> None:  # noqa: ANN401 – grpc.aio hands over untyped objects
        while True:
            self._take(await call.read())

    def _take(self, response: Any) -> str:  # noqa: ANN401
        """Take a message, and return what it is."""
        if response is grpc.aio.EOF:
            raise StreamEndedError("the stream ended")
        kind = str(response.WhichOneof("message"))
        match kind:
            case "peers":
                self._keeper.take_peers(codec.peers_from(response.peers))
            case "orders":
                self._keeper.take_orders(codec.orders_from(response.orders))
            case "replicas":
                self._replicas.learn(response.replicas.addresses, response.replicas.keepalive_ms)
        return kind

    async def permit(self, attempt: SaveAttempt) -> Sequence[LocalCheckpoint]:
        """Ask whether a checkpoint may be committed in shared storage.

        Returns:
            Older checkpoints that must be settled first.

        Raises:
            OSError: it may not be committed, or no stream is open.
        """
        if self._heard is None or self._ask is None:
            raise OSError(f"the coordinator does not permit the commit: {self.said}")
        try:
            return codec.checkpoints_from((await self._ask(attempt)).unsettled)
        except grpc.aio.AioRpcError as error:
            raise OSError(f"the coordinator does not permit the commit: {error.details()}") from error

    async def _tell(self, stub: Any, search: Search, credentials: Credentials) -> None:  # noqa: ANN401
        """Report each change. A change during a call is reported by the next one."""
        while self._heard is not None:
            await self._keeper.changes.until(lambda: not self._unheard().is_empty)
            changes = self._unheard()
            heard = self._heard.with_changes(changes)
            request = codec.report_request(self._run_id, self._keeper.id, changes, heard.confirmed or 0)
            metadata = await call_headers(search, credentials)
            await stub.Report(request, timeout=CALL_TIMEOUT, metadata=metadata)
            self._hear(heard)

    def _unheard(self) -> Report:
        assert self._heard is not None
        return self._keeper.report().without(self._heard)

    def _hear(self, report: Report) -> None:
        self._heard = report
        self._heard_changed.notify()
