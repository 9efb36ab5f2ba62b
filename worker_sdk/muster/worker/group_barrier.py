"""The ranks' barriers, without torch."""

from collections.abc import Sequence
from typing import Self

from muster.worker import environment
from muster.worker.closed import Closed
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import error_for
from muster.worker.groups.group import Shape
from muster.worker.groups.pending import EarlyWarning
from muster.worker.groups.voting import VotingBarrier
from muster.worker.groups.write_report import WriteReport
from muster.worker.session.save_request import SaveAsked
from muster.worker.session.session import SessionConfig
from muster.worker.session.sessions import session_for

DEFAULT_INIT_TIMEOUT = 600.0
"""Seconds; torch elastic's join timeout."""
DEFAULT_TIMEOUT = 300.0
"""Seconds; the default of torch's store barrier."""


class GroupBarrier(VotingBarrier):
    """A barrier that the Muster coordinator decides once, alike for all ranks. It needs no torch.

    Two objects with one prefix in one process share the session and the sequence.

    Args:
        global_rank: this process's rank; default: ``RANK``, else as Open MPI, PMI or Slurm's ``srun`` says.
        global_world_size: the number of ranks; default: ``WORLD_SIZE``, else as that launcher says.
        barrier_prefix: the group, such as ``"checkpoint"``. Barriers of different groups are independent.
        endpoint: the coordinator's ``host:port``, a relay's ``unix:///path``, or several addresses with
            commas between; default: ``MUSTER_ENDPOINT``.
        timeout_barrier_init_secs: seconds to reach the coordinator and join the group.
        timeout_secs: seconds for each barrier, counted by the coordinator from its first arrival; the
            first arrival's timeout is the one that counts.
        run_id: the training job; default: ``MUSTER_RUN_ID``, ``TORCHELASTIC_RUN_ID``,
            Slurm's job, else ``default``.
        generation: the job's life between restarts; default: ``MUSTER_ROUND``,
            ``TORCHELASTIC_RESTART_COUNT``, Slurm's restarts of that job, else 0.
        participants: the ranks that the group's barriers cover; default: all.
        host: the name under which this process is reported; default: the machine's.

    Attributes:
        prefix: the group.
        rank: this process's rank.
        world_size: the number of ranks of the job.

    Raises:
        ConnectError: the coordinator could not be reached in time.
        RefusedError: the coordinator refused this process, for example because a newer generation runs.
        ValueError: an argument is not usable.
    """

    def __init__(
        self,
        global_rank: int | None = None,
        global_world_size: int | None = None,
        barrier_prefix: str = "checkpoint",
        endpoint: str | None = None,
        timeout_barrier_init_secs: float = DEFAULT_INIT_TIMEOUT,
        timeout_secs: float = DEFAULT_TIMEOUT,
        run_id: str | None = None,
        generation: int | None = None,
        participants: Sequence[int] | None = None,
        host: str | None = None,
    ) -> None:
        _check_timeout("timeout_barrier_init_secs", timeout_barrier_init_secs)
        _check_timeout("timeout_secs", timeout_secs)
        if not barrier_prefix:
            raise ValueError('barrier_prefix = "": it must not be empty.')
        self.prefix = environment.text("barrier_prefix", barrier_prefix)
        self.rank = environment.rank(global_rank)
        self.world_size = environment.world_size(global_world_size)
        if self.rank >= self.world_size:
            raise ValueError(
                f"global_rank = {self.rank}: it must be below the world size, {self.world_size}."
            )
        shape = Shape(self.world_size, tuple(sorted(participants or ())))
        outside = [rank for rank in shape.participants if not 0 <= rank < self.world_size]
        if outside or len(set(shape.participants)) < len(shape.participants):
            raise ValueError(
                f"participants = {list(shape.participants)}: they must be different ranks from 0 to "
                f"{self.world_size - 1}."
            )
        self._shape = shape
        self._ranks = shape.participants or range(self.world_size)
        self._timeout = timeout_secs
        self._init_timeout = timeout_barrier_init_secs
        host = environment.text("host", host) if host else environment.host_name()
        self._session = session_for(
            SessionConfig(
                endpoint=environment.endpoint(endpoint),
                run_id=environment.run_id(run_id),
                generation=environment.generation(generation, given_run_id=run_id),
                rank=self.rank,
                host=host,
                node_rank=environment.node_rank(),
                node_name=environment.node_name(host),
            )
        )
        self._session.join(barrier_prefix, shape, timeout_barrier_init_secs)

    def sibling(self, barrier_prefix: str) -> Self:
        """Make a barrier of another group for the same ranks, on the same session.

        Args:
            barrier_prefix: the other group.

        Raises:
            ConnectError: the coordinator could not be reached in time.
            RefusedError: it refused.
        """
        config = self._session.config
        return type(self)(
            self.rank,
            self.world_size,
            barrier_prefix,
            config.endpoint,
            self._init_timeout,
            self._timeout,
            config.run_id,
            config.generation,
            self._shape.participants or None,
            config.host,
        )

    @property
    def participants(self) -> tuple[int, ...]:
        """The ranks of this barrier, in ascending order; empty if all ranks of the job take part."""
        return self._shape.participants

    @property
    def has_contact(self) -> bool:
        """Whether this process is connected with the coordinator, which has admitted it."""
        return self._session.has_contact

    @property
    def run_id(self) -> str:
        """The training job."""
        return self._session.config.run_id

    @property
    def generation(self) -> int:
        """The job's life between restarts."""
        return self._session.config.generation

    @property
    def sequence(self) -> int:
        """The number of this group's next barrier, as far as this process has got."""
        return self._session.position(self.prefix)

    @property
    def closed(self) -> Closed | None:
        """How the run was closed; None while it is open. Barriers still work in a closed run."""
        return self._session.closed

    @property
    def config(self) -> SessionConfig:
        """This process, and its coordinator."""
        return self._session.config

    @property
    def save_asked(self) -> SaveAsked | None:
        """The save that all ranks were asked for last."""
        return self._session.save_asked

    def next_save_asked(self, known: SaveAsked | None) -> SaveAsked:
        """Wait until all ranks are asked for another save than this one.

        Raises:
            MusterError: the session is over.
        """
        return self._session.next_save_asked(known)

    def skip_to(self, sequence: int) -> None:
        """Skip barriers that were decided without this rank.

        Args:
            sequence: the next barrier of this rank, unless it is further already.
        """
        self._session.skip_to(self.prefix, sequence)

    def execute_barrier(self, timeout_secs: float | None = None) -> None:
        """Wait until all ranks have arrived. If the barrier fails, it raises on all ranks.

        Args:
            timeout_secs: seconds; default: the constructor's.

        Raises:
            BarrierError: the barrier failed for all ranks. The subclass says how; ``.missing`` names ranks.
            OutcomeUnknownError: the coordinator cannot be reached; call again to ask for the outcome.
            RefusedError: this process may not arrive, for example because another process has its rank.
        """
        self._released(self._arrive(timeout_secs))

    def gather(self, payload: bytes, timeout_secs: float | None = None) -> list[bytes]:
        """Execute a barrier at which each rank sends a payload and gets the payloads of all.

        Args:
            payload: this rank's bytes, at most the coordinator's ``max_payload_bytes``.
            timeout_secs: seconds; default: the constructor's.

        Returns:
            The payloads of the participants, in ascending order of rank.

        Raises:
            BarrierError: as :meth:`execute_barrier`.
            OutcomeUnknownError: as :meth:`execute_barrier`.
            RefusedError: as :meth:`execute_barrier`, or the payload is too large.
        """
        decision = self._released(self._arrive(timeout_secs, payload=payload))
        return [decision.payloads.get(rank, b"") for rank in self._ranks]

    def vote(
        self,
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: EarlyWarning | None = None,
        report: WriteReport | None = None,
    ) -> Decision:
        """Arrive with a vote, and return the decision whatever it is.

        Args:
            failure: why this rank failed; the barrier is then aborted at once for all. None: it did not.
            timeout_secs: seconds; default: the constructor's.
            payload: bytes for all the others.
            early: when to log which ranks are missing, and a hint, if earlier than after half of the timeout.
                Only the first arrival's counts.
            report: this rank's part of a save, for people; None if the barrier belongs to no save.

        Returns:
            The decision; see :attr:`Decision.outcome`.

        Raises:
            OutcomeUnknownError: as :meth:`execute_barrier`.
            RefusedError: as :meth:`execute_barrier`.
        """
        return self._arrive(timeout_secs, payload, failure, early, report)

    def abort(self, reason: str) -> Decision:
        """Vote that this rank failed: the group's next barrier is aborted for all ranks.

        Args:
            reason: why; every rank reads it.

        Returns:
            The decision. It is ABORTED, unless the barrier had been decided before.
        """
        return self.vote(failure=reason or "no reason given")

    def _arrive(
        self,
        timeout_secs: float | None,
        payload: bytes = b"",
        failure: str | None = None,
        early: EarlyWarning | None = None,
        report: WriteReport | None = None,
    ) -> Decision:
        timeout = self._timeout if timeout_secs is None else timeout_secs
        _check_timeout("timeout_secs", timeout)
        return self._session.barrier(self.prefix, timeout, payload, failure, early, report)

    @staticmethod
    def _released(decision: Decision) -> Decision:
        if decision.outcome is not Outcome.RELEASED:
            raise error_for(decision)
        return decision


def synchronize(
    data: bytes,
    rank: int | None = None,
    world_size: int | None = None,
    prefix: str = "synchronize",
    timeout: float = DEFAULT_TIMEOUT,
    endpoint: str | None = None,
    run_id: str | None = None,
) -> list[bytes]:
    """Send some bytes and get those of all ranks: torch elastic's ``synchronize``, at one barrier.

    Each rank sends and gets one message; with a store, each rank would read each rank's key. A prefix may be
    used any number of times.

    Args:
        data: this rank's bytes, at most the coordinator's ``max_payload_bytes``.
        rank: this process's rank; default as in :class:`GroupBarrier`.
        world_size: the number of ranks; default as in :class:`GroupBarrier`.
        prefix: the barriers' group.
        timeout: seconds to reach the coordinator, and then for all ranks to arrive.
        endpoint: the coordinator's ``host:port``, a relay's ``unix:///path``, or several addresses with
            commas between; default: ``MUSTER_ENDPOINT``.
        run_id: the training job; default as in :class:`GroupBarrier`.

    Returns:
        The bytes of all ranks, in ascending order of rank.

    Raises:
        BarrierError: not all ranks sent theirs; ``.missing`` names the others.
        ConnectError: the coordinator could not be reached in time.
        OutcomeUnknownError: contact with the coordinator was lost meanwhile.
        RefusedError: the coordinator refused, for example because the data is too large.
        ValueError: an argument is not usable.
    """
    barrier = GroupBarrier(rank, world_size, prefix, endpoint, timeout, timeout, run_id)
    return barrier.gather(data)


def _check_timeout(name: str, value: float) -> None:
    try:
        usable = 0 < float(value) < float("inf")
    except (TypeError, ValueError):
        usable = False
    if not usable:
        raise ValueError(f"{name} = {value!r}: it must be a number of seconds above 0.")
