"""A rank of the soak, over the wire protocol."""

import random

import grpc

from lab import aio
from muster.v1 import session_pb2

Stream = grpc.aio.StreamStreamCall[session_pb2.ConnectRequest, session_pb2.ConnectResponse]


class Rank:
    """One session over the wire protocol."""

    def __init__(self, call: Stream, number: int) -> None:
        self._call = call
        self.number = number
        self.sequence = 0

    async def enter(
        self, run_id: str, world_size: int, prefix: str = "checkpoint", generation: int = 0
    ) -> None:
        """Say hello and join a group."""
        incarnation = f"{random.randbytes(6).hex()}-{self.number}"
        process = session_pb2.Process(rank=self.number, incarnation=incarnation, host="soak", pid=1)
        hello = session_pb2.Hello(
            run_id=run_id, generation=generation, processes=[process], protocol_version=1
        )
        await self._call.write(session_pb2.ConnectRequest(hello=hello))
        await self.hear("welcome")
        join = session_pb2.JoinGroup(prefix=prefix, world_size=world_size)
        await self._call.write(session_pb2.ConnectRequest(join_group=join))
        self.sequence = (await self.hear("group_joined")).group_joined.positions[0].sequence

    async def arrive(
        self, patience: float = 30.0, prefix: str = "checkpoint", failure: str | None = None
    ) -> int:
        """Arrive, and wait for the outcome."""
        arrival = session_pb2.Arrival(rank=self.number, payload=bytes(64), failure=failure)
        arrive = session_pb2.Arrive(
            prefix=prefix, sequence=self.sequence, timeout_ms=int(patience * 1000), arrivals=[arrival]
        )
        await self._call.write(session_pb2.ConnectRequest(arrive=arrive))
        decision = (await self.hear("decision")).decision
        assert decision.sequence == self.sequence
        self.sequence += 1
        return int(decision.outcome)

    async def hear(self, kind: str) -> session_pb2.ConnectResponse:
        """Wait for a message of this kind."""
        while True:
            response = await aio.read(self._call)
            if response is None:
                raise grpc.aio.AioRpcError(
                    await self._call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), "the session ended"
                )
            if response.WhichOneof("message") == kind:
                return response

    async def leave(self) -> None:
        """Say goodbye."""
        await self._call.write(session_pb2.ConnectRequest(goodbye=session_pb2.Goodbye(reason="done")))
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            pass

    def vanish(self) -> None:
        """Break the stream, without a goodbye."""
        self._call.cancel()
