"""Several real coordinators on one etcd, each behind proxies that can cut it off."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lab.patience import until
from lab.processes.coordinator import MUSTER, Coordinator
from lab.processes.etcd import Cluster
from lab.processes.proxy import Proxy

MUSTER_PROGRAM = (str(MUSTER),)
ANSWERS_WITHIN = 2.0
"""Seconds. A replica that takes longer is stopped, and does not lead."""
SAID_LATE = 0.3
"""Seconds of what a leader says that comes late: less than an attempt lasts, so that none is taken back."""
LEASE_TTL = 2
"""Seconds; the shortest that etcd gives."""
SAFE_LEASE_TTL = 4
"""Seconds; no stall of a busy machine ends such a lease."""


class Replica:
    """One of them.

    Args:
        folder: where its log goes.
        etcd: where the state is.
        prefix: under which keys.
        stack: ends what it needs.
        extra: further arguments of ``muster serve``.
        lease_ttl: seconds.
        program: the ``muster`` command.
        direct: without proxies, which cost time; then nothing can be cut.
    """

    def __init__(
        self,
        folder: Path,
        etcd: Cluster,
        prefix: str,
        stack: ExitStack,
        extra: Sequence[str] = (),
        lease_ttl: float = LEASE_TTL,
        program: tuple[str, ...] = MUSTER_PROGRAM,
        direct: bool = False,
    ) -> None:
        folder.mkdir()
        ports = [int(endpoint.rpartition(":")[2]) for endpoint in etcd.endpoints]
        self.to_etcd = [] if direct else [stack.enter_context(Proxy(port)) for port in ports]
        members = [proxy.endpoint for proxy in self.to_etcd] or etcd.endpoints
        self.coordinator = Coordinator(
            folder,
            state=f"etcd://{','.join(members)}/{prefix}",
            extra=(f"--lease-ttl={lease_ttl:g}", *extra),
            program=program,
        )
        self.to_workers = [] if direct else [stack.enter_context(Proxy(self.coordinator.port))]
        self.endpoint = self.coordinator.endpoint if direct else self.to_workers[0].endpoint
        """What it says of itself."""
        self.coordinator.advertise(self.endpoint)
        stack.callback(self.coordinator.kill)

    @property
    def leads(self) -> bool:
        """Whether it leads, and serves."""
        try:
            status, text = self.coordinator.get("/readyz", timeout=ANSWERS_WITHIN)
        except OSError:
            return False
        return (status, text) == (200, "ok\n")

    def status(self) -> dict[str, object]:
        """What a standby's page says, for programs."""
        found = json.loads(self.coordinator.get("/status.json")[1])
        assert isinstance(found, dict)
        return found

    def cut_from_etcd(self) -> None:
        """It reaches no member any more, without hearing of it."""
        for proxy in self.to_etcd:
            proxy.black_hole()

    def slow_etcd(self, seconds: float) -> None:
        """Each answer of etcd's comes late."""
        for proxy in self.to_etcd:
            proxy.delay(seconds)

    def say_late(self) -> None:
        """What it says to etcd now is under way until :meth:`heard_late`; then nothing gets through."""
        for proxy in self.to_etcd:
            proxy.hold()
        until(lambda: any(proxy.holds for proxy in self.to_etcd), "it says nothing")
        time.sleep(SAID_LATE)
        self.cut_from_etcd()

    def heard_late(self) -> None:
        """Etcd hears what was under way for so long."""
        assert sum(proxy.deliver() for proxy in self.to_etcd), "nothing was under way"

    def cut_from_workers(self) -> None:
        """Nothing from or to workers comes through, without anyone hearing of it."""
        for proxy in self.to_workers:
            proxy.black_hole()

    def heal(self) -> None:
        """All its connections are good again; what a black hole swallowed is lost with its connection."""
        for proxy in (*self.to_etcd, *self.to_workers):
            proxy.heal()
            proxy.cut()


class Replicas:
    """All of them.

    Args:
        members: one by one.
    """

    def __init__(self, members: list[Replica]) -> None:
        self.members = members

    @property
    def endpoint(self) -> str:
        """What workers are given: the addresses of all."""
        return ",".join(replica.endpoint for replica in self.members)

    def start(self) -> None:
        """Start all that do not run."""
        for replica in self.members:
            if not replica.coordinator.runs:
                replica.coordinator.start()

    def leader(self, *others: Replica, revived: bool = False) -> Replica:
        """Wait for a leader that is not one of these, and return it.

        Args:
            others: replicas that do not count.
            revived: start again who has ended by itself meanwhile, as Kubernetes would: on a busy machine one
                that takes over may lose its lease before it is found.
        """
        candidates = [one for one in self.members if one not in others]
        found: list[Replica] = []

        def leads() -> bool:
            if revived:
                for one in candidates:
                    if not one.coordinator.runs:
                        one.coordinator.begin()
            found[:] = [one for one in candidates if one.leads]
            return bool(found)

        until(leads, "nobody leads")
        return found[0]

    def standbys(self) -> list[Replica]:
        """The others that run."""
        leader = self.leader()
        return [one for one in self.members if one is not leader and one.coordinator.runs]


@contextmanager
def replicas(
    folder: Path,
    etcd: Cluster,
    count: int = 3,
    *,
    prefix: str = "muster",
    extra: Sequence[str] = (),
    lease_ttl: float = LEASE_TTL,
    program: tuple[str, ...] = MUSTER_PROGRAM,
    direct: bool = False,
) -> Iterator[Replicas]:
    """Several replicas that run, one of which leads."""
    with ExitStack() as stack:
        found = Replicas(
            [
                Replica(folder / f"replica-{number}", etcd, prefix, stack, extra, lease_ttl, program, direct)
                for number in range(count)
            ]
        )
        found.start()
        found.leader()
        yield found
