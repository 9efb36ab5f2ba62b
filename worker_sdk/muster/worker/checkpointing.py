"""The ``grpc`` barrier for the separate package ``torch_checkpointing``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from muster.worker import environment
from muster.worker.barriers import GrpcBarrier

if TYPE_CHECKING:
    _BarrierConfig = object
else:
    try:
        from torch_checkpointing.barriers import BarrierConfig as _BarrierConfig
    except ImportError:
        _BarrierConfig = object


class RankInfo(Protocol):
    """What ``torch_checkpointing`` hands to :meth:`GrpcBarrierConfig.create_barrier`."""

    role_rank: int
    role_world_size: int


@dataclass(kw_only=True)
class GrpcBarrierConfig(_BarrierConfig):
    """A picklable recipe for a :class:`GrpcBarrier`, to be built in the checkpoint process.

    What is not given is taken from the environment of the process that makes this config, so that the
    checkpoint process needs none of it.

    Args:
        barrier_prefix: the group.
        endpoint: the coordinator's ``host:port``, a relay's ``unix:///path``, or several addresses with
            commas between; default: ``MUSTER_ENDPOINT``.
        run_id: the training job; default as in :class:`GrpcBarrier`.
        generation: the job's life between restarts; default as in :class:`GrpcBarrier`.
        timeout_barrier_init_sec: seconds to reach the coordinator; ``torch_checkpointing`` gives the
            checkpoint process 30 s to start, so it should be less.

    Raises:
        ValueError: the endpoint or generation is missing or not usable.
    """

    barrier_prefix: str = "checkpoint"
    endpoint: str | None = None
    run_id: str | None = None
    generation: int | None = None
    timeout_barrier_init_sec: int = 20

    def __post_init__(self) -> None:
        self.endpoint = environment.endpoint(self.endpoint)
        self.generation = environment.generation(self.generation, given_run_id=self.run_id)
        self.run_id = environment.run_id(self.run_id)

    def create_barrier(self, rank_info: RankInfo) -> GrpcBarrier:
        """Build the barrier; called in the process that will use it.

        Args:
            rank_info: the rank and the world size within the role.

        Raises:
            ConnectError: the coordinator could not be reached in time.
            RefusedError: it refused this process.
        """
        return GrpcBarrier(
            global_rank=rank_info.role_rank,
            global_world_size=rank_info.role_world_size,
            barrier_prefix=self.barrier_prefix,
            endpoint=self.endpoint,
            run_id=self.run_id,
            generation=self.generation,
            timeout_barrier_init_secs=self.timeout_barrier_init_sec,
        )
