"""The settings of a coordinator."""

from dataclasses import dataclass, field

from muster.service.address import Address
from muster.service.core.retention.retention import Retention
from muster.service.core.vocabulary.limits import Limits
from muster.service.etcd.location import Access
from muster.service.security.config import Security
from muster.serving.keepalive import Keepalive, keepalive_within


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of ``muster serve``."""

    listen: Address
    http: Address
    state: str
    session_ttl: float = 10.0
    """Seconds of silence after which a process counts as lost."""
    reset_grace: float = 3.0
    """Seconds that a process or a node may take to come back after its connection ended."""
    drain_grace: float = 5.0
    """Seconds that calls in flight have to finish when the coordinator stops."""
    limits: Limits = field(default_factory=Limits)
    security: Security = field(default_factory=Security)
    insecure: bool = False
    """Whether it may listen to other machines without TLS, or without checking their tokens."""
    retention: Retention = field(default_factory=Retention)
    advertise: Address | None = None
    """The address at which workers reach this replica; None: the address that it listens at."""
    lease_ttl: float = 5.0
    """Seconds without news of the leader after which another replica leads."""
    etcd: Access = field(default_factory=Access)

    @property
    def keepalive(self) -> Keepalive:
        """When the server pings its clients."""
        return keepalive_within(self.session_ttl, self.reset_grace)
