"""The server's certificates, for gRPC and for HTTP, replaced while it runs.

Both servers ask for what is in force at every handshake; connections that are open are not disturbed.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from cryptography import x509

from muster.service.security.config import TlsFiles
from muster.service.security.files import FileError, Reloaded, read


@dataclass(frozen=True, slots=True, eq=False)
class Certificates:
    """What one reading of the files has come to."""

    grpc: grpc.ServerCertificateConfiguration
    http: ssl.SSLContext
    expires_at: float
    """When the first certificate of the chain ends, in seconds since 1970."""


class Tls:
    """The certificates in force, and credentials of servers that follow them.

    Args:
        files: where they are.

    Raises:
        FileError: they cannot be read or used.
    """

    def __init__(self, files: TlsFiles) -> None:
        paths = [files.cert, files.key, *([files.client_ca] if files.client_ca else [])]
        self._asks_clients = files.client_ca is not None
        self.certificates = Reloaded("certificate", paths, lambda: load(files))

    @property
    def expires_at(self) -> float:
        """When the certificate ends, in seconds since 1970."""
        return self.certificates.value.expires_at

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For ``add_secure_port``; clients must show a certificate if their authorities are given."""
        return grpc.dynamic_ssl_server_credentials(
            self.certificates.value.grpc,
            _news(self.certificates),  # type: ignore[arg-type]  # None is for no news
            require_client_authentication=self._asks_clients,
        )

    def http_context(self) -> ssl.SSLContext:
        """For the HTTP port; a client may show a certificate, and whether it must is for the port to say."""
        context = _context(self._asks_clients)

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.certificates.value.http

        context.sni_callback = choose
        return context


def _news(
    certificates: Reloaded[Certificates],
) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """What gRPC asks at each handshake, in threads of its own: the certificates, if they are new to it."""
    known = certificates.value.grpc

    def news() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        now = certificates.value.grpc
        if now is known:
            return None
        known = now
        return now

    return news


def load(files: TlsFiles) -> Certificates:
    """Read and check the files.

    Raises:
        FileError: one cannot be read, is not PEM, or the key is not that of the certificate.
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
            context.load_verify_locations(cadata=client_ca.decode())
        except (OSError, ValueError) as error:
            raise FileError(f"{files.client_ca} holds no certificates in PEM: {_why(error)}.") from error
    if (read(files.cert), read(files.key)) != (cert, key):
        raise FileError(f"{files.cert} and {files.key} are being replaced just now.")
    return Certificates(
        grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca),
        context,
        min(one.not_valid_after_utc.timestamp() for one in chain),
    )


def _why(error: Exception) -> str:
    return (isinstance(error, ssl.SSLError) and error.reason) or str(error)


def _context(asks_clients: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A session that is resumed is not checked again, against authorities that may have been replaced.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    if asks_clients:
        context.verify_mode = ssl.CERT_OPTIONAL
    return context
