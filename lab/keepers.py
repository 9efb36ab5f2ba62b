"""Keepers of local checkpoints without files: they tell the coordinator that they hold what it orders."""

import threading
from collections.abc import Iterable

import grpc

from lab.patience import PATIENCE
from muster.v1 import local_pb2, local_pb2_grpc

DIGEST = b"sixteen-bytes-16"


class Keeper:
    """One keeper, on a stream of its own.

    Args:
        channel: leads to the coordinator.
        number: of its node; the keeper keeps for the rank of this number.
        world_size: ranks of the run.
        run_id: the run.
        domain: the failure domain of its node.
        replicas: copies of each part.
        disk: its space.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        number: int,
        world_size: int,
        *,
        run_id: str = "job1",
        domain: str = "",
        replicas: int = 1,
        disk: local_pb2.Disk | None = None,
    ) -> None:
        self.id = f"keeper-{number}"
        self._stub = local_pb2_grpc.LocalCheckpointServiceStub(channel)
        self._run_id = run_id
        self._number = number
        self._world_size = world_size
        self._orders = local_pb2.Orders()
        self._changed = threading.Condition()
        keeper = local_pb2.Keeper(
            id=self.id,
            url=f"http://10.0.0.{number}:40123",
            failure_domain=domain,
            node_name=f"node-{number}",
            version="0.1.0",
        )
        self._stream = self._stub.Keep(
            local_pb2.KeepRequest(
                run_id=run_id,
                keeper=keeper,
                attachment=local_pb2.Attachment(
                    generation=1, world_size=world_size, ranks=[number], replicas=replicas
                ),
                disk=disk or local_pb2.Disk(used=1 << 30, quota=4 << 30),
                protocol_version=1,
            ),
            timeout=60 * PATIENCE,
        )
        while next(self._stream).WhichOneof("message") != "peers":
            pass  # Now it is connected.
        self._listener = threading.Thread(target=self._listen, name=self.id, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        try:
            for message in self._stream:
                if message.WhichOneof("message") == "orders":
                    with self._changed:
                        self._orders = message.orders
                        self._changed.notify_all()
        except grpc.RpcError:
            return

    def commit(self, step: int, number: int, *, replicas: int = 1, persist_to: str = "") -> None:
        """Make a local checkpoint that all ranks have written."""
        self._stub.Commit(
            local_pb2.LocalCheckpointServiceCommitRequest(
                run_id=self._run_id,
                checkpoint=local_pb2.LocalCheckpoint(
                    attempt=local_pb2.Attempt(generation=1, number=number),
                    step=step,
                    world_size=self._world_size,
                    manifest_size=100,
                    manifest_digest=DIGEST,
                    replicas=replicas,
                    persist_to=persist_to,
                    size=3 << 30,
                ),
                keeper_id=self.id,
            ),
            timeout=PATIENCE,
        )

    def hold(self, number: int, ranks: Iterable[int], persisted_as: str = "") -> None:
        """Report that these parts of a checkpoint are here."""
        holding = local_pb2.Holding(
            attempt=local_pb2.Attempt(generation=1, number=number),
            manifest_digest=DIGEST,
            ranks=ranks,
            persisted_as=persisted_as,
        )
        request = local_pb2.ReportRequest(run_id=self._run_id, keeper_id=self.id, holdings=[holding])
        self._stub.Report(request, timeout=PATIENCE)

    def follow(self, number: int, persisted_as: str = "") -> None:
        """Report all parts of a checkpoint that it is ordered to hold, once they are more than its own."""

        def ordered() -> list[int]:
            found = [one for one in self._orders.checkpoints if one.checkpoint.attempt.number == number]
            return list(found[0].ranks) if found else []

        with self._changed:
            assert self._changed.wait_for(lambda: len(ordered()) > 1, PATIENCE), self._orders
            ranks = ordered()
        self.hold(number, ranks, persisted_as)

    def close(self) -> None:
        """End the stream."""
        self._stream.cancel()
        self._listener.join(PATIENCE)


def save(
    keepers: list[Keeper], step: int, number: int, *, copies: bool = True, persisted_as: str = ""
) -> None:
    """Make a checkpoint, of which each keeper has its own part, and its copies if wished."""
    keepers[0].commit(step, number)
    for rank, keeper in enumerate(keepers):
        keeper.hold(number, [rank])
    for keeper in keepers if copies else ():
        keeper.follow(number, persisted_as)
