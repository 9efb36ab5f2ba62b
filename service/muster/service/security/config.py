"""The security settings of ``muster serve``. All are off by default."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of the certificates, in PEM."""

    cert: Path
    """The server's certificate and its intermediate certificates."""
    key: Path
    client_ca: Path | None = None
    """The authorities of client certificates. If given, a client must show a certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficLimits:
    """Limits of one peer and of all peers; 0: no limit. A peer is an IP address."""

    max_sessions_per_peer: int = 0
    """Open streams."""
    max_messages_per_second_per_peer: int = 0
    """Messages on streams, and calls. Further ones are read later."""
    max_messages_per_second: int = 0
    """Messages and calls of all peers together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The security settings of one coordinator.

    Raises:
        ValueError: an option needs another one that is not given.
    """

    tls: TlsFiles | None = None
    max_connections_per_peer: int = 0
    """gRPC connections of one IP address; 0: no limit. With TLS each takes about 70 KiB."""
    tokens_file: Path | None = None
    http_tls: bool = False
    """Whether the HTTP port uses the certificate as well."""
    http_tokens: bool = False
    """Whether the HTTP port needs a viewer's token as well."""
    http_hosts: tuple[str, ...] = ()
    """Host names in requests to the HTTP port, beside IP addresses and ``localhost``."""
    audit_log: str = ""
    """The file of the audit log; ``-``: entries go to the log; empty: no audit log."""
    traffic: TrafficLimits = TrafficLimits()

    @property
    def knows_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return self.tls is not None and self.tls.client_ca is not None

    @property
    def http_knows_operators(self) -> bool:
        """Whether the HTTP port checks callers as the gRPC port does, so that it may show as much."""
        return (self.http_tokens or self.tokens_file is None) and (self.http_tls or not self.knows_clients)

    def __post_init__(self) -> None:
        if self.http_tls and self.tls is None:
            raise ValueError("--http-tls needs a certificate: give --tls-cert and --tls-key as well.")
        if self.http_tokens and self.tokens_file is None:
            raise ValueError("--http-tokens needs tokens: give --tokens-file as well.")


def tls_files(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    """Return the files of TLS; None: no file is given.

    Raises:
        ValueError: a required file is missing.
    """
    if cert is None or key is None:
        if cert or key or client_ca:
            raise ValueError("TLS needs a certificate and its key: give both --tls-cert and --tls-key.")
        return None
    return TlsFiles(cert=cert, key=key, client_ca=client_ca)
