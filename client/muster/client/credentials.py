"""What this process shows the coordinator, and what it expects of it: a token, and certificates.

All of it comes from the environment. The files are read again for each connection (the token's for each
call), so that whoever renews them needs to restart nothing.
"""

import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from muster.client.addresses import is_socket, relays_of, target_of
from muster.client.errors import EnvironmentValueError

TOKEN_REFUSED = frozenset({"TOKEN_MISSING", "TOKEN_UNKNOWN"})
"""Reasons of a refusal that another token would mend."""
TOKEN_PATIENCE = 60.0
"""Seconds that a process that was welcome goes on trying when its token is refused: a new one that the
coordinator knows already may take so long to come to every node (Kubernetes updates secrets each minute)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What the environment says of security."""

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    """Wins over ``token``."""
    ca: Path | None = None
    """If given, TLS is spoken, and the coordinator must show a certificate of these authorities."""
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    """The name that the coordinator's certificate must have; empty: the host that is called."""

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> "Credentials":
        """From the variables ``MUSTER_TOKEN``, ``MUSTER_TOKEN_FILE`` and ``MUSTER_TLS_…``.

        Raises:
            EnvironmentValueError: one is missing that another one needs.
        """

        def path(variable: str) -> Path | None:
            return Path(environ[variable]) if environ.get(variable) else None

        ca, cert, key = path("MUSTER_TLS_CA"), path("MUSTER_TLS_CERT"), path("MUSTER_TLS_KEY")
        if (cert is None) != (key is None):
            raise EnvironmentValueError(
                "a client certificate needs its key: set both MUSTER_TLS_CERT and MUSTER_TLS_KEY."
            )
        if cert is not None and ca is None:
            raise EnvironmentValueError(
                "MUSTER_TLS_CERT is set, and MUSTER_TLS_CA is not: set it to the file of the authority that "
                "signed the coordinator's certificate."
            )
        return cls(
            token=environ.get("MUSTER_TOKEN", ""),
            token_file=path("MUSTER_TOKEN_FILE"),
            ca=ca,
            cert=cert,
            key=key,
            server_name=environ.get("MUSTER_TLS_SERVER_NAME", ""),
        )

    @classmethod
    def toward(cls, address: str) -> "Credentials":
        """What is shown to one address: nothing to a socket, where the file's permissions are the check.

        Raises:
            EnvironmentValueError: a variable is missing that another one needs.
        """
        return cls() if is_socket(address) else cls.of()

    def check(self) -> None:
        """See that every file can be used, before anyone waits for a connection.

        Raises:
            EnvironmentValueError: one cannot.
        """
        self.authorization()
        self.channel_credentials()

    def authorization(self) -> str:
        """The value of the ``authorization`` header; empty if there is no token.

        Raises:
            EnvironmentValueError: the token's file cannot be read, or what it holds cannot be a token.
        """
        token, where = self.token, "MUSTER_TOKEN"
        if self.token_file is not None:
            where = f"MUSTER_TOKEN_FILE = {self.token_file}"
            token = _read(self.token_file, "MUSTER_TOKEN_FILE").decode("utf-8", "replace").strip()
        elif not token:
            return ""
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise EnvironmentValueError(f"{where}: a token is one line of ASCII without spaces.")
        return f"Bearer {token}"

    def certificates(self) -> tuple[bytes, ...]:
        """What the files of authorities, certificate and key hold now.

        Raises:
            EnvironmentValueError: one cannot be read.
        """
        files = (
            (self.ca, "MUSTER_TLS_CA"),
            (self.cert, "MUSTER_TLS_CERT"),
            (self.key, "MUSTER_TLS_KEY"),
        )
        return tuple(_read(path, variable) for path, variable in files if path is not None)

    def open_channel(
        self, address: str, options: list[tuple[str, Any]], server_name: str = ""
    ) -> grpc.Channel:
        """A channel that shows them.

        Args:
            address: ``HOST:PORT``, or ``unix:///PATH``.
            options: gRPC's.
            server_name: the name that the coordinator's certificate must have, unless the environment
                demands another; empty: the address's host.

        Raises:
            EnvironmentValueError: a file cannot be used.
        """
        tls = self.channel_credentials()
        if tls is None:
            channel = grpc.insecure_channel(target_of(address), options=options)
        else:
            named = [*options, *self.name_options(server_name)]
            channel = grpc.secure_channel(address, tls, options=named)
        if self.token or self.token_file:
            channel = grpc.intercept_channel(channel, _Bearer(self))
        return channel

    def name_options(self, server_name: str = "") -> list[tuple[str, Any]]:
        """The options that say whom the coordinator's certificate must name.

        Args:
            server_name: as in :meth:`open_channel`.
        """
        name = self.server_name or server_name
        return [("grpc.ssl_target_name_override", name)] if name else []

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """What a channel that speaks TLS is opened with; None if it is not spoken.

        Raises:
            EnvironmentValueError: a file cannot be used.
        """
        if self.ca is None:
            return None
        ca = _read(self.ca, "MUSTER_TLS_CA")
        # What gRPC would say of a file that it cannot use does not name it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            # Beside the certificates there may be words of any language.
            context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
        except (OSError, ValueError) as error:
            raise EnvironmentValueError(
                f"MUSTER_TLS_CA = {self.ca}: it holds no certificates in PEM ({error})."
            ) from error
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(ca)
        cert, key = _read(self.cert, "MUSTER_TLS_CERT"), _read(self.key, "MUSTER_TLS_KEY")
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except OSError as error:
            raise EnvironmentValueError(
                f"MUSTER_TLS_KEY = {self.key}: it is not the key of the certificate in {self.cert}, or one "
                f"of them is not in PEM ({error})."
            ) from error
        return grpc.ssl_channel_credentials(ca, key, cert)

    def fault(self, details: str) -> str:
        """What is wrong with TLS and what to do, from the details of a call that reached nobody.

        gRPC does not say more than it does: a coordinator that turns a client away in the handshake has only
        closed the connection.

        Returns:
            A sentence; empty if it does not look like TLS.
        """
        for sign, sentence in _FAULTS:
            if sign in details:
                return sentence
        if "failed to connect" not in details or not any(sign in details for sign in _CLOSED):
            return ""
        if self.ca is None:
            return "the connection was closed at once: if the coordinator speaks TLS, set MUSTER_TLS_CA"
        if self.cert is None:
            return (
                "the connection was closed in the TLS handshake: the coordinator may ask for a client "
                "certificate; set MUSTER_TLS_CERT and MUSTER_TLS_KEY"
            )
        return (
            "the connection was closed in the TLS handshake: the client certificate may have expired, or be "
            "of another authority than the coordinator's --tls-client-ca; look at MUSTER_TLS_CERT"
        )


_FAULTS = (
    (
        "certificate has expired",
        "the coordinator's certificate has expired; it must be renewed (--tls-cert of muster serve)",
    ),
    (
        "certificate is not yet valid",
        "the coordinator's certificate is not valid yet; compare the clocks of both machines",
    ),
    (
        "Hostname Verification Check failed",
        "the coordinator's certificate is for another name than the endpoint's; connect by a name that is in "
        "it, or set MUSTER_TLS_SERVER_NAME to one",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the coordinator's certificate is not of an authority in MUSTER_TLS_CA; set it to the file of the "
        "authority that signed it",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "the coordinator does not speak TLS on this port; unset MUSTER_TLS_CA, or start it with --tls-cert",
    ),
)
_CLOSED = ("Socket closed", "Connection reset")


def check_credentials(endpoint: str) -> None:
    """See that what is to be shown to an endpoint's addresses can be used.

    Raises:
        EnvironmentValueError: it cannot.
    """
    for address in endpoint.split(","):
        Credentials.toward(address).check()


class TokenPatience:
    """How long a process that was welcome waits for another token, or a relay: from the first refusal on.

    Args:
        endpoint: whom it calls.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._relays = relays_of(endpoint)
        self._clock = clock
        self._since: float | None = None

    def lasts(self, reason: str) -> bool:
        """Whether to try again after a refusal, since the token may be replaced or a relay be back meanwhile.

        Args:
            reason: of the refusal.
        """
        if reason not in TOKEN_REFUSED or not (self._relays or Credentials.of().token_file):
            return False
        now = self._clock()
        if self._since is None:
            self._since = now
        return now - self._since < TOKEN_PATIENCE

    def renew(self) -> None:
        """The process was let in: the next refusal is a first one."""
        self._since = None


def _read(path: Path, variable: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EnvironmentValueError(
            f"{variable} = {path}: it cannot be read ({error.strerror or error})."
        ) from error


class _Details(NamedTuple):
    """What gRPC asks of a ``ClientCallDetails``."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Puts the token into the metadata of each call; gRPC's own way wants TLS."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:  # noqa: ANN401
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:  # noqa: ANN401
        return continuation(self._with_token(client_call_details), request)

    def intercept_stream_stream(
        self,
        continuation: Any,  # noqa: ANN401
        client_call_details: Any,  # noqa: ANN401
        request_iterator: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        return continuation(self._with_token(client_call_details), request_iterator)

    def _with_token(self, details: grpc.ClientCallDetails) -> "_Details":
        return _Details(
            details.method,
            details.timeout,
            [*(details.metadata or ()), ("authorization", self._credentials.authorization())],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
