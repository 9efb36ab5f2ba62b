"""The server's certificates for gRPC and HTTP, which may be replaced while it runs.

Both servers read the current certificates at every handshake. Open connections stay open.
"""

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from cryptography import x509

from muster.service.security.config import TlsFiles
from muster.service.security.files import FileError, Reloaded, read

RESUMED_FOR = 3_600.0
"""Seconds for which gRPC may resume a TLS session. The server checks a client's certificate only at the begin
of a session. BoringSSL would resume sessions for a day, even if the certificate has expired meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class Certificates:
    """The content of the files at one time."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    http: ssl.SSLContext
    expires_at: float
    """The time at which the first certificate of the chain expires, in seconds since 1970."""

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        """Return a new configuration of gRPC's server. It does not resume sessions of another one."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.cert)], root_certificates=self.client_ca
        )


class Tls:
    """The current certificates, and server credentials that follow them.

    Args:
        files: the files.

    Raises:
        FileError: a file cannot be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        paths = [files.cert, files.key, *([files.client_ca] if files.client_ca else [])]
        self._asks_clients = files.client_ca is not None
        self.certificates = Reloaded("certificate", paths, lambda: load(files))

    @property
    def expires_at(self) -> float:
        """The time at which the certificate expires, in seconds since 1970."""
        return self.certificates.value.expires_at

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for ``add_secure_port``. They demand client certificates if so configured."""
        return grpc.dynamic_ssl_server_credentials(
            self.certificates.value.for_grpc(),
            _changes(self.certificates),  # type: ignore[arg-type]  # None: no change
            require_client_authentication=self._asks_clients,
        )

    def http_context(self) -> ssl.SSLContext:
        """Return the context of the HTTP port. The port decides whether a client must show a certificate."""
        context = _context(self._asks_clients)

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.certificates.value.http

        context.sni_callback = choose
        return context


def _changes(
    certificates: Reloaded[Certificates], clock: Callable[[], float] = time.monotonic
) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """Return the function that gRPC calls in its threads at each handshake, for changed certificates."""
    known, since = certificates.value, clock()

    def news() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known, since
        now = certificates.value
        if now is known and clock() - since < RESUMED_FOR:
            return None
        known, since = now, clock()
        return now.for_grpc()

    return news


def load(files: TlsFiles) -> Certificates:
    """Read and check the files.

    Raises:
        FileError: a file cannot be read or is not PEM, or the key does not belong to the certificate.
    """
    cert, key = read(files.cert), read(files.key)
    client_ca = read(files.client_ca) if files.client_ca is not None else None
    context = _context(client_ca is not None)
    try:
        chain = x509.load_pem_x509_certificates(cert)
    except ValueError as error:
        raise FileError(f"{files.cert} holds no certificate in PEM: {error}.") from error
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    except OSError as error:
        raise FileError(
            f"{files.key} is not the key of the certificate in {files.cert}, is encrypted, or is no key in "
            f"PEM: {_why(error)}."
        ) from error
    if client_ca is not None:
        try:
            # The file may have text in any language beside the certificates.
            context.load_verify_locations(cadata=client_ca.decode("ascii", "ignore"))
        except (OSError, ValueError) as error:
            raise FileError(f"{files.client_ca} holds no certificates in PEM: {_why(error)}.") from error
    if (read(files.cert), read(files.key)) != (cert, key):
        raise FileError(f"{files.cert} and {files.key} are being replaced just now.")
    expires_at = min(one.not_valid_after_utc.timestamp() for one in chain)
    return Certificates(cert, key, client_ca, context, expires_at)


def _why(error: Exception) -> str:
    return (isinstance(error, ssl.SSLError) and error.reason) or str(error)


def _context(asks_clients: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A resumed session is not checked again, although the authorities may have been replaced.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    if asks_clients:
        context.verify_mode = ssl.CERT_OPTIONAL
        # TLS 1.2 also resumes sessions without tickets, and Python cannot turn that off.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
