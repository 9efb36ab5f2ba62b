"""One stream that speaks for many ranks on many hosts, so that a large job costs a test little."""

import queue
from collections.abc import Iterable

import grpc

from lab.patience import PATIENCE
from lab.scenes import RANKS_PER_NODE
from muster.v1 import rendezvous_pb2, rendezvous_pb2_grpc, session_pb2, session_pb2_grpc

HOST = "gpu-{:04d}"


class MultirankClient:
    """The ranks of a run, in one session.

    Args:
        endpoint: of the coordinator.
        run_id: the run.
        ranks: the ranks on its stream.
        world_size: how many there are in all.
    """

    def __init__(self, endpoint: str, run_id: str, ranks: Iterable[int], world_size: int) -> None:
        self.run_id = run_id
        self.world_size = world_size
        self.channel = grpc.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)])
        self._said: queue.SimpleQueue[session_pb2.ConnectRequest | None] = queue.SimpleQueue()
        self._heard = session_pb2_grpc.SessionServiceStub(self.channel).Connect(
            iter(self._said.get, None), timeout=PATIENCE * 4
        )
        processes = [
            session_pb2.Process(
                rank=rank,
                incarnation=f"life-{rank}",
                host=HOST.format(rank // RANKS_PER_NODE),
                pid=4100 + rank,
                node_rank=rank // RANKS_PER_NODE,
            )
            for rank in ranks
        ]
        hello = session_pb2.Hello(run_id=run_id, processes=processes, protocol_version=1)
        self._said.put(session_pb2.ConnectRequest(hello=hello))
        self.hear("welcome")

    def __enter__(self) -> "MultirankClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._said.put(None)
        self._heard.cancel()
        self.channel.close()

    def join(self, prefix: str) -> None:
        join = session_pb2.JoinGroup(prefix=prefix, world_size=self.world_size)
        self._said.put(session_pb2.ConnectRequest(join_group=join))
        self.hear("group_joined")

    def arrive(self, prefix: str, sequence: int, ranks: Iterable[int], *, failure: str | None = None) -> None:
        """Arrive with some ranks, and wait for nothing."""
        arrive = session_pb2.Arrive(
            prefix=prefix,
            sequence=sequence,
            timeout_ms=600_000,
            arrivals=[session_pb2.Arrival(rank=rank, failure=failure) for rank in ranks],
        )
        self._said.put(session_pb2.ConnectRequest(arrive=arrive))

    def hear(self, kind: str) -> session_pb2.ConnectResponse:
        """The next message of a kind."""
        for response in self._heard:
            if response.WhichOneof("message") == kind:
                return response
        raise AssertionError("the session ended")

    def close_run(self, by: str, reason: str) -> None:
        rendezvous_pb2_grpc.RendezvousServiceStub(self.channel).Close(
            rendezvous_pb2.CloseRequest(run_id=self.run_id, by=by, reason=reason), timeout=PATIENCE
        )
