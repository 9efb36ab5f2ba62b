"""Rendezvous backend ``muster`` for torchrun.

torch finds it by :mod:`_muster_torch_autoload`; nothing else imports it. The coordinator keeps the rounds,
the closed state and the agents' store, so no node hosts them for the others.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import NoReturn, TypeAlias

from torch.distributed import (
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from muster.worker import environment
from muster.worker.environment import DEFAULT_STOPPED_EXIT_CODE
from muster.worker.errors import ConnectError, MusterError, RefusedError, StoreTimeoutError
from muster.worker.exit_barrier import ARRIVED, ExitBarrier
from muster.worker.node.fork_server import ForkServerProcess, start_fork_server
from muster.worker.node.membership import NodeConfig, NodeMembership, Place
from muster.worker.node.options import node_config, switch, whole
from muster.worker.node.relay import NodeRelay, start
from muster.worker.store import CoordinatorStore

Traceback: TypeAlias = TracebackType | None
Hook: TypeAlias = Callable[[type[BaseException], BaseException, Traceback], object]

logger = logging.getLogger(__name__)

BACKEND = "muster"
RELAY = True
"""Whether workers use a relay by default; docs/benchmarks/relay.md says why."""
CHECK_INTERVAL = timedelta(seconds=1)
"""Time to wait for rank 0's address before a check whether the round is still usable."""
EXIT_CHECK = timedelta(seconds=0.2)
"""Time to wait for a sign that agents wait at torch's exit barrier, after the round has lost a node."""

_ERRORS: dict[str, type[RendezvousError]] = {
    "RUN_CLOSED": RendezvousClosedError,
    "RUN_FORGOTTEN": RendezvousClosedError,
    "RUN_STOPPED": RendezvousGracefulExitError,
    "NODE_EVICTED": RendezvousGracefulExitError,
    "NODE_NOT_NEEDED": RendezvousGracefulExitError,
    "RENDEZVOUS_TIMED_OUT": RendezvousTimeoutError,
    "SETTINGS_DIFFER": RendezvousStateError,
    "SUPERSEDED": RendezvousStateError,
    "INVALID_ARGUMENT": RendezvousStateError,
}
"""By the reason of a refusal; any other reason is a connection error."""


class _AgentStore(CoordinatorStore):
    """The agents' store. ``waits_at_exit`` is set when this agent arrives at torch's exit barrier."""

    def __init__(self, endpoint: str, run_id: str) -> None:
        super().__init__(endpoint, run_id)
        self.waits_at_exit = threading.Event()

    def add(self, key: str, value: int) -> int:
        """See :meth:`CoordinatorStore.add`."""
        total = super().add(key, value)
        if key.endswith(f"/{ARRIVED}"):
            self.waits_at_exit.set()
        return total


class MusterRendezvousHandler(RendezvousHandler):
    """Brings the agents of a job together through the coordinator.

    The node keeps its place until :meth:`shutdown`, or until the handler is collected.

    Args:
        config: the node, and the terms on which it joins.
        close_timeout: seconds that closing the run may take.
        relay: whether the node uses a relay beside the agent.
        stopped_exit_code: the exit code of this agent if the run was stopped or the node evicted; 0: that of
            torch.
        preloaded_modules: what a fork server for the workers imports; none: there is no fork server.
    """

    def __init__(
        self,
        config: NodeConfig,
        close_timeout: float,
        relay: bool = False,
        stopped_exit_code: int = DEFAULT_STOPPED_EXIT_CODE,
        preloaded_modules: Sequence[str] = (),
    ) -> None:
        self.stopped_exit_code = stopped_exit_code
        self._close_timeout = close_timeout
        self._relay = start(config.endpoint) if relay else None
        if self._relay is not None:
            config = replace(config, endpoint=self._relay.endpoint)
        self._config = config
        """Workers connect to the same endpoint."""
        try:
            self._store = _AgentStore(config.endpoint, config.run_id)
            self._exit_barrier = ExitBarrier(self._store, self._store.waits_at_exit)
            self._membership = NodeMembership(config, partial(_node_gone, self._exit_barrier, config.run_id))
        except BaseException:
            if self._relay is not None:
                self._relay.stop()
            raise
        self._fork_server = start_fork_server(preloaded_modules)
        self._worker_store: TCPStore | None = None
        """The store that this node hosts for the workers while it has rank 0. Kept until the next round: it
        must outlive the agents' exit barrier."""
        self._place: Place | None = None
        """The place in the last round."""
        self._round_ends = False
        """Whether workers of the last round are known to have ended successfully."""
        self._ends_gracefully = False
        """Whether the last attempt to join told torch to end. torch 2.13 raises an error of its own then."""
        _handlers.add(self)
        # At the exit, other hooks say goodbye.
        held = (self._membership, self._store, self._relay, self._fork_server)
        weakref.finalize(self, _release, *held).atexit = False

    def get_backend(self) -> str:
        """Return ``muster``."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the store that the agent of rank 0 hosts, as with torch's ``c10d`` backend."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, and wait until it is complete.

        Returns:
            The agents' store, this node's rank, the number of nodes, and rank 0's address for the workers.

        Raises:
            RendezvousClosedError: the run is closed, or was forgotten.
            RendezvousTimeoutError: no round was complete in time; the message names its nodes.
            RendezvousConnectionError: the coordinator cannot be reached, is of another version, or refused
                for another reason, such as a limit.
            RendezvousStateError: the nodes do not agree, or an argument is not usable.
            RendezvousGracefulExitError: the run was closed while this node stood by, or the node was evicted.
        """
        try:
            while True:
                place = self._membership.join()
                store = PrefixStore(_keys_of(self._config.run_id, place.round), self._store)
                bootstrap = self._bootstrap(store, place)
                if bootstrap is not None:
                    break
                logger.warning("rank 0 of round %d did not say where it is; joining again", place.round)
        except MusterError as error:
            failure = _rendezvous_error(error)
            self._ends_gracefully = isinstance(failure, RendezvousGracefulExitError)
            raise failure from error
        self._export(place)
        self._place, self._round_ends = place, False
        return RendezvousInfo(store, place.rank, place.world_size, bootstrap)

    def _export(self, place: Place) -> None:
        """Set the variables that workers inherit, so a barrier needs no arguments but its prefix."""
        os.environ["MUSTER_ROUND"] = str(place.round)
        # Rounds and barriers must be of one coordinator and one run, whatever was set before.
        os.environ["MUSTER_ENDPOINT"] = self._config.endpoint
        os.environ["MUSTER_RUN_ID"] = self._config.run_id

    def _forget(self, round: int) -> None:
        """Remove the keys of a past round: a job that restarts often would fill the store."""
        try:
            self._store.delete_prefix(f"{_keys_of(self._config.run_id, round)}/")
        except MusterError as error:
            logger.warning("the keys of round %d are left in the store: %s", round, error)

    def _bootstrap(self, store: Store, place: Place) -> RendezvousStoreInfo | None:
        """Return rank 0's address for the workers, which may be another one in each round.

        Returns:
            None if rank 0 has not published it. It may have died, so the round is not usable.

        Raises:
            RendezvousConnectionError: this node has rank 0, and cannot host the workers' store.
        """
        self._worker_store = None
        port = None
        if place.rank == 0:
            if place.round > 0:
                self._forget(place.round - 1)
            if self.use_agent_store:
                self._worker_store = self._host_store()
                port = self._worker_store.port
        elif not self._await_rank_0(place):
            return None
        return RendezvousStoreInfo.build(place.rank, store, self._config.address, port)

    def _host_store(self) -> TCPStore:
        try:
            return TCPStore(
                host_name=self._config.address,
                port=0,
                is_master=True,
                multi_tenant=True,
                timeout=timedelta(seconds=self._config.connect_timeout),
            )
        except (RuntimeError, ValueError) as error:
            raise RendezvousConnectionError(
                f"this node has rank 0 and cannot host the workers' store at its address, "
                f"{self._config.address}: {error}. Give an address that every node can reach: --local-addr."
            ) from error

    def _await_rank_0(self, place: Place) -> bool:
        """Wait for rank 0's address. Return False if the round is not usable any more."""
        keys = [
            f"{_keys_of(self._config.run_id, place.round)}/{key}"
            for key in (RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY)
        ]
        deadline = time.monotonic() + self._config.connect_timeout
        while True:
            # The coordinator may be away briefly. If it stays away, the next join raises.
            with suppress(StoreTimeoutError, ConnectError):
                self._store.wait(keys, CHECK_INTERVAL)
                return True
            ends = self._membership.nodes_waiting or self._membership.nodes_lost
            if ends or time.monotonic() >= deadline:
                return False

    def is_closed(self) -> bool:
        """Return whether the run is closed; after the first rendezvous it costs no round trip.

        Raises:
            RendezvousConnectionError: the coordinator cannot be reached, and the state is unknown.
        """
        closed = self._membership.closed
        if closed is not None:
            return closed
        try:
            return self._membership.ask_closed()
        except MusterError as error:
            raise _rendezvous_error(error) from error

    def set_closed(self) -> None:
        """Close the run for everyone, for good. A run that was stopped is not closed.

        Raises:
            RendezvousConnectionError: the coordinator cannot be reached.
        """
        try:
            self._membership.close("the agent closed the rendezvous", self._close_timeout)
        except MusterError as error:
            raise _rendezvous_error(error) from error

    def num_nodes_waiting(self) -> int:
        """Return for how many nodes the agents restart their workers.

        They are the nodes that wait to be let in, this one among them if it lost its place. If none waits,
        they are the nodes that the round has lost: their peers' collectives may not notice for long.
        """
        return self._membership.nodes_waiting or self._nodes_lost()

    def _nodes_lost(self) -> int:
        """Return how many nodes the round has lost, unless it ends: agents that finished do not restart."""
        lost, place = self._membership.nodes_lost, self._place
        if not lost or place is None or self._round_ends:
            return 0
        try:
            self._store.wait([f"{_keys_of(self._config.run_id, place.round)}/{ARRIVED}"], EXIT_CHECK)
        except StoreTimeoutError:
            logger.warning("nodes lost by round %d: %d. The others go on in another round", place.round, lost)
            return lost
        except MusterError as error:
            logger.info("whether round %d ends is not known: %s", place.round, error)
            return 0
        self._round_ends = True
        return 0

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._config.run_id

    @property
    def _resumed_elsewhere(self) -> bool:
        """Whether this agent knows that other agents resume the run."""
        return self._membership.stopped or self._membership.evicted

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether other agents resume the run: it was stopped, or this node was evicted.

        It may ask the coordinator.
        """
        return self._membership.evicted or self._membership.ask_stopped(self._close_timeout)

    def shutdown(self) -> bool:
        """Close the run, unless other agents resume it, and give up the place and all connections.

        Returns:
            Whether the run is closed.

        Raises:
            SystemExit: the run was stopped, or this node was evicted. The exit code asks the scheduler to
                start the agent again.
        """
        closed = False
        try:
            # A run that other agents resume is not closed. So this one ends at once, even if the coordinator
            # is away.
            if self._membership.closed or not self._resumed_elsewhere:
                self.set_closed()
                closed = True
        except RendezvousError as error:
            logger.warning("run %s could not be closed: %s", self.get_run_id(), error)
        finally:
            self._exit_barrier.end()
            self._membership.leave("the job is over")
            self._store.close()
            if self._relay is not None:
                self._relay.stop()
            if self._fork_server is not None:
                self._fork_server.stop()
        if not self._resumed_elsewhere:
            _handlers.discard(self)
            return closed
        # A signal may still end this agent, here or above. The hook finds the handler then.
        if self.stopped_exit_code:
            failure = sys.exc_info()[1] if not self._ends_gracefully else None
            self.exit_stopped(f", although this agent failed: {failure!r}" if failure is not None else "")
        return False

    def exit_stopped(self, more: str = "") -> NoReturn:
        """Exit with the code of a run that other agents resume.

        Args:
            more: what the log says beside it.
        """
        code = self.stopped_exit_code
        what = "goes on without this node" if self._membership.evicted else "was stopped, to be resumed"
        logger.warning("run %s %s: exit code %d%s", self.get_run_id(), what, code, more)
        raise SystemExit(code)


_handlers: "weakref.WeakSet[MusterRendezvousHandler]" = weakref.WeakSet()
"""The handlers without a shutdown, and those of stopped runs."""


def _drop_unreachable() -> None:
    """Before a fork, collect handlers that only a reference cycle keeps: the child could not have one.

    Only an agent has handlers, so no fork of a training process waits for the collection.
    """
    if _handlers:
        gc.collect()


# Registered after fork_guard's hook, so called before it. That hook waits for the handlers' threads.
os.register_at_fork(before=_drop_unreachable)


def _keys_of(run_id: str, round: int) -> str:
    return f"torch.rendezvous.{run_id}.{round}"


def _node_gone(barrier: ExitBarrier, run_id: str, place: Place, gone: int) -> None:
    """Let the agents that remain of a stopped round end without those that have gone."""
    barrier.release_without(gone, place.world_size, _keys_of(run_id, place.round))


def _exit_stopped(previous: Hook, kind: type[BaseException], error: BaseException, trace: Traceback) -> None:
    """Give an agent that a signal or an error ends the exit code of a run that other agents resume.

    Python takes the exit code of a ``SystemExit`` that an excepthook raises.
    """
    if _handlers and threading.current_thread() is threading.main_thread():
        # A second signal must not interrupt the question whether the run was stopped.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stopped = next((one for one in list(_handlers) if one.stopped_exit_code and one.goes_on_elsewhere), None)
    if stopped is None or not isinstance(error, SignalException):
        previous(kind, error, trace)
    if stopped is not None:
        stopped.exit_stopped()


def _install_hook() -> None:
    if not (isinstance(sys.excepthook, partial) and sys.excepthook.func is _exit_stopped):
        sys.excepthook = partial(_exit_stopped, sys.excepthook)


def _release(
    membership: NodeMembership,
    store: CoordinatorStore,
    relay: NodeRelay | None,
    fork_server: ForkServerProcess | None,
) -> None:
    """Release what a collected handler held, without waiting, on any thread."""
    membership.abandon()
    store.close()
    if relay is not None:
        relay.stop(timeout=0.0)
    if fork_server is not None:
        fork_server.stop()


def _rendezvous_error(error: MusterError) -> RendezvousError:
    reason = error.reason if isinstance(error, RefusedError) else ""
    return _ERRORS.get(reason, RendezvousConnectionError)(str(error))


def create_handler(params: RendezvousParameters) -> MusterRendezvousHandler:
    """Create a handler from torchrun's options.

    Args:
        params: torchrun's options. ``--rdzv-conf`` takes torch's names, with torch's defaults:
            ``join_timeout`` (600), ``last_call_timeout`` (30), ``close_timeout`` (30),
            ``heartbeat_timeout`` (5), ``keep_alive_interval`` (5), all in seconds, ``keep_alive_max_attempt``
            (3), and ``read_timeout`` (60), the seconds for the first contact with the coordinator. ``relay``
            says whether a node's workers share one stream by a relay (true), or connect directly (false).

    Raises:
        ValueError: an option, MUSTER_STOPPED_EXIT_CODE, MUSTER_PRELOAD or the node's name is not usable; the
            message names it.
    """
    handler = MusterRendezvousHandler(
        node_config(params),
        whole(params, "close_timeout", 30),
        relay=switch(params, "relay", RELAY),
        stopped_exit_code=environment.stopped_exit_code(),
        preloaded_modules=environment.preloaded_modules(),
    )
    _install_hook()
    return handler
