"""Rendezvous backend ``muster`` for torchrun.

torch finds it by :mod:`_muster_torch_autoload`; it is not imported for anything else. No node hosts what the
others need to come together: rounds, closed state and the agents' store are the coordinator's.
"""

import gc
import logging
import os
import socket
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from torch.distributed import (
    PrefixStore,
    Store,
    TCPStore,
)
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
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from muster.client.addresses import is_socket
from muster.worker import environment
from muster.worker.errors import ConnectError, MusterError, RefusedError, StoreTimeoutError
from muster.worker.node.attendance import Attendance, NodeConfig, Place
from muster.worker.node.relay import NodeRelay, begin
from muster.worker.store import CoordinatorStore

logger = logging.getLogger(__name__)

BACKEND = "muster"
DEFAULT_PORT = 7550
RELAY = True
"""Whether workers speak through a relay unless they are told otherwise; docs/benchmarks/relay.md says why."""
LOOK_INTERVAL = timedelta(seconds=1)
"""How long to wait for rank 0's address before looking whether the round is still of use."""

_ERRORS: dict[str, type[RendezvousError]] = {
    "RUN_CLOSED": RendezvousClosedError,
    "RUN_FORGOTTEN": RendezvousClosedError,
    "NODE_NOT_NEEDED": RendezvousGracefulExitError,
    "RENDEZVOUS_TIMED_OUT": RendezvousTimeoutError,
    "SETTINGS_DIFFER": RendezvousStateError,
    "SUPERSEDED": RendezvousStateError,
    "INVALID_ARGUMENT": RendezvousStateError,
}
"""By the reason of a refusal; any other is a failure of the connection."""


class MusterRendezvousHandler(RendezvousHandler):
    """Brings the agents of a job together through the coordinator.

    Its node's place is given up by :meth:`shutdown`, or soon after nobody holds the handler any more.

    Args:
        config: who joins, where, and on what terms.
        close_timeout: seconds that closing the run may take.
        relay: whether the node speaks through a relay that runs beside the agent.
    """

    def __init__(self, config: NodeConfig, close_timeout: float, relay: bool = False) -> None:
        self._close_timeout = close_timeout
        self._relay = begin(config.endpoint) if relay else None
        if self._relay is not None:
            config = replace(config, endpoint=self._relay.endpoint)
        self._config = config
        """Its endpoint is where the workers connect, too."""
        try:
            self._attendance = Attendance(config)
            self._store = CoordinatorStore(config.endpoint, config.run_id)
        except BaseException:
            if self._relay is not None:
                self._relay.stop()
            raise
        self._worker_store: TCPStore | None = None
        """What this node hosts for the workers while it has rank 0; kept until its next round, so that it
        outlives the agents' exit barrier."""
        _handlers.add(self)
        # What ends the process says goodbye by itself.
        weakref.finalize(self, _let_go, self._attendance, self._store, self._relay).atexit = False

    def get_backend(self) -> str:
        """``muster``."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the store that the agent of rank 0 hosts, as with torch's ``c10d`` backend."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, and wait for it.

        Returns:
            The agents' store, this node's rank, the number of nodes, and where workers find rank 0.

        Raises:
            RendezvousClosedError: the run is closed, or was forgotten.
            RendezvousTimeoutError: no round came together in time; the message names who was there.
            RendezvousConnectionError: the coordinator cannot be reached, is of another version, or refused
                for another reason, such as a limit.
            RendezvousStateError: the nodes do not agree, or an argument is not usable.
            RendezvousGracefulExitError: the run was closed while this node stood by.
        """
        try:
            while True:
                place = self._attendance.join()
                store = PrefixStore(self._keys_of(place.round), self._store)
                bootstrap = self._bootstrap(store, place)
                if bootstrap is not None:
                    break
                logger.warning("rank 0 of round %d did not say where it is; joining again", place.round)
        except MusterError as error:
            raise _rendezvous_error(error) from error
        self._export(place)
        return RendezvousInfo(store, place.rank, place.world_size, bootstrap)

    def _export(self, place: Place) -> None:
        """What the workers inherit, so that a barrier needs no arguments but its prefix."""
        os.environ["MUSTER_ROUND"] = str(place.round)
        # Rounds and barriers must be of one coordinator and one run, whatever was set before.
        os.environ["MUSTER_ENDPOINT"] = self._config.endpoint
        os.environ["MUSTER_RUN_ID"] = self._config.run_id

    def _keys_of(self, round: int) -> str:
        return f"torch.rendezvous.{self._config.run_id}.{round}"

    def _forget(self, round: int) -> None:
        """Remove the keys of a past round, or a job that is restarted often would fill the store."""
        try:
            self._store.delete_prefix(f"{self._keys_of(round)}/")
        except MusterError as error:
            logger.warning("the keys of round %d are left in the store: %s", round, error)

    def _bootstrap(self, store: Store, place: Place) -> RendezvousStoreInfo | None:
        """Where the workers find rank 0; anew in every round, since it may have moved.

        Returns:
            None if rank 0 has not said it, for it may have died: the round is of no use then.

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
        elif not self._rank_0_has_spoken(place):
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

    def _rank_0_has_spoken(self, place: Place) -> bool:
        """Wait for the address of rank 0, for as long as the round may still be of use."""
        keys = [
            f"{self._keys_of(place.round)}/{key}"
            for key in (RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY)
        ]
        deadline = time.monotonic() + self._config.connect_timeout
        while True:
            # The coordinator may be away for a moment; joining again is how one learns that it stays away.
            with suppress(StoreTimeoutError, ConnectError):
                self._store.wait(keys, LOOK_INTERVAL)
                return True
            if self._attendance.nodes_waiting or time.monotonic() >= deadline:
                return False

    def is_closed(self) -> bool:
        """Whether the run is closed; costs no round trip from the first rendezvous on.

        Raises:
            RendezvousConnectionError: the coordinator had to be asked, and cannot be reached.
        """
        closed = self._attendance.closed
        if closed is not None:
            return closed
        try:
            return self._attendance.ask_closed()
        except MusterError as error:
            raise _rendezvous_error(error) from error

    def set_closed(self) -> None:
        """Close the run for everyone, for good.

        Raises:
            RendezvousConnectionError: the coordinator cannot be reached.
        """
        try:
            self._attendance.close("the agent closed the rendezvous", self._close_timeout)
        except MusterError as error:
            raise _rendezvous_error(error) from error

    def num_nodes_waiting(self) -> int:
        """How many nodes wait to be let in, this one included if it lost its place; costs no round trip."""
        return self._attendance.nodes_waiting

    def get_run_id(self) -> str:
        """The run's id."""
        return self._config.run_id

    def shutdown(self) -> bool:
        """Close the run, and give up the place and all connections.

        Returns:
            Whether the coordinator was told that the run is closed.
        """
        try:
            self.set_closed()
        except RendezvousError:
            return False
        finally:
            self._attendance.leave("the job is over")
            self._store.close()
            if self._relay is not None:
                self._relay.stop()
            _handlers.discard(self)
        return True


_handlers: "weakref.WeakSet[MusterRendezvousHandler]" = weakref.WeakSet()
"""The handlers that were not shut down."""


def _drop_unreachable() -> None:
    """Before a fork, end handlers that only a reference cycle keeps. Else the child could have none.

    Only an agent has handlers, so no fork of a training process waits for the collection.
    """
    if _handlers:
        gc.collect()


# Registered after fork_guard's hook, and so called before it. That hook waits for what the handlers held.
os.register_at_fork(before=_drop_unreachable)


def _let_go(attendance: Attendance, store: CoordinatorStore, relay: NodeRelay | None) -> None:
    """What a handler leaves behind that was dropped; in whatever thread it happens, nothing waits here."""
    attendance.abandon()
    store.close()
    if relay is not None:
        relay.stop(timeout=0.0)


def _rendezvous_error(error: MusterError) -> RendezvousError:
    reason = error.reason if isinstance(error, RefusedError) else ""
    return _ERRORS.get(reason, RendezvousConnectionError)(str(error))


def create_handler(params: RendezvousParameters) -> MusterRendezvousHandler:
    """A handler as torchrun asks for it.

    Args:
        params: torchrun's options. ``--rdzv-conf`` takes torch's names, with torch's defaults:
            ``join_timeout`` (600), ``last_call_timeout`` (30), ``close_timeout`` (30),
            ``heartbeat_timeout`` (5), ``keep_alive_interval`` (5), all in seconds, ``keep_alive_max_attempt``
            (3), and ``read_timeout`` (60), the seconds for the first contact with the coordinator. ``relay``
            says whether the workers of a node speak through one stream (true), or each on its own (false).

    Raises:
        ValueError: an option is not usable; the message names it.
    """
    interval = _whole(params, "keep_alive_interval", 5)
    attempts = _whole(params, "keep_alive_max_attempt", 3)
    if not params.run_id:
        raise ValueError("--rdzv-id is empty: the run needs a name, the same on every node.")
    config = NodeConfig(
        endpoint=_endpoint(params.endpoint),
        run_id=environment.text("--rdzv-id", params.run_id),
        address=params.local_addr or socket.getfqdn(),
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        join_timeout=_whole(params, "join_timeout", 600),
        last_call_timeout=_whole(params, "last_call_timeout", 30),
        keep_alive_timeout=interval * attempts,
        connect_timeout=_whole(params, "read_timeout", 60),
        call_timeout=_whole(params, "heartbeat_timeout", 5),
    )
    return MusterRendezvousHandler(
        config, _whole(params, "close_timeout", 30), relay=_switch(params, "relay", RELAY)
    )


def _endpoint(given: str) -> str:
    if not given:
        return environment.endpoint(None)
    addresses = []
    for part in given.split(","):
        if not part.strip():
            raise ValueError(f'--rdzv-endpoint="{given}": there is nothing between two of its commas.')
        addresses.append(_address(part))
    return environment.endpoint(",".join(addresses))


def _address(given: str) -> str:
    if is_socket(given.strip()):
        return given
    host, port = parse_rendezvous_endpoint(given, DEFAULT_PORT)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _whole(params: RendezvousParameters, key: str, default: int) -> int:
    value = params.get(key, default)
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(
            f"--rdzv-conf {key}={value}: it must be a whole number above 0, such as {key}={default}."
        )
    return number


def _switch(params: RendezvousParameters, key: str, default: bool) -> bool:
    value = str(params.get(key, default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise ValueError(f"--rdzv-conf {key}={value}: it must be true or false, such as {key}=false.")
    return value in ("true", "1")
