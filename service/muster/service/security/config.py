"""What ``muster serve`` may be told of security. All of it is off unless it is asked for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Where the certificates are, in PEM."""

    cert: Path
    """The server's certificate, and those between it and its authority."""
    key: Path
    client_ca: Path | None = None
    """The authorities of clients; if given, a client must show a certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficLimits:
    """How much one peer, and all peers, may ask; 0 is without a bound. A peer is an IP address."""

    max_sessions_per_peer: int = 0
    """Open streams."""
    max_messages_per_second_per_peer: int = 0
    """Messages on streams, and calls. Beyond it they are read later."""
    max_messages_per_second: int = 0
    """The same, of all peers together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Everything that guards one coordinator.

    Raises:
        ValueError: one option asks for another that is not given.
    """

    tls: TlsFiles | None = None
    tokens_file: Path | None = None
    http_tls: bool = False
    """Whether the HTTP port uses the certificate, too."""
    http_tokens: bool = False
    """Whether the HTTP port asks for a viewer's token, too."""
    http_hosts: tuple[str, ...] = ()
    """The names by which the HTTP port may be called, beside IP addresses and ``localhost``."""
    audit_log: str = ""
    """The file of the audit log; ``-``: it goes to the log; empty: there is none."""
    traffic: TrafficLimits = TrafficLimits()

    @property
    def knows_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return self.tls is not None and self.tls.client_ca is not None

    @property
    def http_knows_operators(self) -> bool:
        """Whether the HTTP port asks all of its callers that the gRPC port does, and may show as much."""
        return (self.http_tokens or self.tokens_file is None) and (self.http_tls or not self.knows_clients)

    def __post_init__(self) -> None:
        if self.http_tls and self.tls is None:
            raise ValueError("--http-tls needs a certificate: give --tls-cert and --tls-key as well.")
        if self.http_tokens and self.tokens_file is None:
            raise ValueError("--http-tokens needs tokens: give --tokens-file as well.")


def tls_files(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    """The files of TLS; None if none is given.

    Raises:
        ValueError: some that are needed are missing.
    """
    if cert is None or key is None:
        if cert or key or client_ca:
            raise ValueError("TLS needs a certificate and its key: give both --tls-cert and --tls-key.")
        return None
    return TlsFiles(cert=cert, key=key, client_ca=client_ca)
