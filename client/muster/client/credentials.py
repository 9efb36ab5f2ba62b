"""Credentials of this process for the coordinator: a token, and certificates.

They come from the environment; the command has options for them, too. Certificates are read again for each
connection and a token's file for each call, so new files need no restart. A helper command for the token runs
again when its token is about to expire.
"""

import ipaddress
import logging
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from muster.client.addresses import host_of, is_socket, relays_of, target_of
from muster.client.errors import EnvironmentValueError
from muster.client.protocol import MAX_TOKEN
from muster.client.token_command import COMMANDS, CommandError

logger = logging.getLogger(__name__)
_warned: set[str] = set()
"""Addresses that were warned of, because a token goes there without TLS."""

TOKEN_REFUSED = frozenset({"TOKEN_MISSING", "TOKEN_UNKNOWN", "TOKEN_EXPIRED"})
"""Reasons of a refusal that another token would fix."""
TOKEN_PATIENCE = 60.0
"""Seconds that a process whose token was accepted before tries again when it is refused. A new token may take
so long to reach every node: Kubernetes updates secrets each minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The name of each credential in messages: what the reader can set."""

    token: str
    token_file: str
    token_command: str
    ca: str
    cert: str
    key: str
    server_name: str


ENVIRONMENT = Names(
    token="MUSTER_TOKEN",
    token_file="MUSTER_TOKEN_FILE",
    token_command="MUSTER_TOKEN_COMMAND",
    ca="MUSTER_TLS_CA",
    cert="MUSTER_TLS_CERT",
    key="MUSTER_TLS_KEY",
    server_name="MUSTER_TLS_SERVER_NAME",
)
"""The variables."""


def _is_elsewhere(address: str) -> bool:
    """Return whether messages to an address leave this machine."""
    host = host_of(address)
    if is_socket(address) or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


class Fault(NamedTuple):
    """Why TLS failed, as far as gRPC's details tell; as text, one sentence."""

    what: str
    next: str
    """What to do."""

    def __str__(self) -> str:
        return f"{self.what}; {self.next}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """A token and certificates; :meth:`check` tells whether they can be used."""

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    """Wins over ``token_command``."""
    token_command: str = field(default="", repr=False)
    """Wins over ``token``: a command that writes it to stdout."""
    ca: Path | None = None
    """If given, connections use TLS, and the coordinator's certificate must be of these authorities."""
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    """The name that the coordinator's certificate must have; empty: the host that is called."""
    names: Names = ENVIRONMENT

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> "Credentials":
        """Read the environment variables."""

        def path(variable: str) -> Path | None:
            return Path(environ[variable]) if environ.get(variable) else None

        return cls(
            token=environ.get(ENVIRONMENT.token, ""),
            token_file=path(ENVIRONMENT.token_file),
            token_command=environ.get(ENVIRONMENT.token_command, ""),
            ca=path(ENVIRONMENT.ca),
            cert=path(ENVIRONMENT.cert),
            key=path(ENVIRONMENT.key),
            server_name=environ.get(ENVIRONMENT.server_name, ""),
        )

    @classmethod
    def toward(cls, address: str) -> "Credentials":
        """Return the credentials for an address: none for a socket, whose file's permissions decide."""
        return cls() if is_socket(address) else cls.of()

    def valid_for(self, address: str) -> "Credentials":
        """Return these credentials; none for a socket."""
        return Credentials() if is_socket(address) else self

    def check(self) -> None:
        """Check that all credentials can be used, before a caller waits for a connection.

        Raises:
            EnvironmentValueError: one cannot be used, or one that it needs is missing.
        """
        self.channel_credentials()
        self.authorization()

    def authorization(self) -> str:
        """Return the value of the ``authorization`` header; empty if there is no token.

        Raises:
            EnvironmentValueError: the token's file cannot be read, its command failed, or the text cannot be
                a token.
        """
        token, where = self.token, self.names.token
        if self.token_file is not None:
            where = f"{self.names.token_file} = {self.token_file}"
            token = _read(self.token_file, self.names.token_file).decode("utf-8", "replace").strip()
        elif self.token_command:
            where = self.names.token_command
            try:
                token = COMMANDS.token(self.token_command)
            except CommandError as error:
                raise EnvironmentValueError(f"{where}: no token: {error}.") from None
        elif not token:
            return ""
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise EnvironmentValueError(f"{where}: a token is one line of ASCII without spaces.")
        if len(token) > MAX_TOKEN:
            raise EnvironmentValueError(
                f"{where}: it has {len(token):,} characters, and a token has {MAX_TOKEN:,} at the most. Ask "
                "its issuer for one with fewer claims."
            )
        return f"Bearer {token}"

    def refused(self) -> None:
        """Note that the token was refused, so that the command runs again."""
        COMMANDS.forget(self.token_command)

    def certificates(self) -> tuple[bytes, ...]:
        """Read the files of authorities, certificate and key.

        Raises:
            EnvironmentValueError: one cannot be read.
        """
        files = (
            (self.ca, self.names.ca),
            (self.cert, self.names.cert),
            (self.key, self.names.key),
        )
        return tuple(_read(path, name) for path, name in files if path is not None)

    def open_channel(
        self, address: str, options: list[tuple[str, Any]], server_name: str = ""
    ) -> grpc.Channel:
        """Open a channel with these credentials.

        Args:
            address: ``HOST:PORT``, or ``unix:///PATH``.
            options: gRPC's.
            server_name: the name that the coordinator's certificate must have, unless
                ``self.server_name`` is another; empty: the address's host.

        Raises:
            EnvironmentValueError: a file cannot be used, or one that it needs is missing.
        """
        tls = self.channel_credentials()
        if tls is None:
            self.warn_if_readable(address)
            channel = grpc.insecure_channel(target_of(address), options=options)
        else:
            named = [*options, *self.name_options(server_name)]
            channel = grpc.secure_channel(address, tls, options=named)
        if self.token or self.token_file or self.token_command:
            channel = grpc.intercept_channel(channel, _Bearer(self))
        return channel

    def warn_if_readable(self, address: str) -> None:
        """Warn once for each address that a token crosses the network readably; call it where TLS is off."""
        has_token = self.token or self.token_file or self.token_command
        if not has_token or address in _warned or not _is_elsewhere(address):
            return
        _warned.add(address)
        logger.warning(
            "the token goes to %s without TLS, readable on the way: set %s to the file of the authority that "
            "signed the coordinator's certificate",
            address,
            self.names.ca,
        )

    def name_options(self, server_name: str = "") -> list[tuple[str, Any]]:
        """Return the channel options for the name that the coordinator's certificate must have.

        Args:
            server_name: as in :meth:`open_channel`.
        """
        name = self.server_name or server_name
        return [("grpc.ssl_target_name_override", name)] if name else []

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of a channel with TLS; None without TLS.

        Raises:
            EnvironmentValueError: a file cannot be used, or one that it needs is missing.
        """
        names = self.names
        if (self.cert is None) != (self.key is None):
            raise EnvironmentValueError(
                f"a client certificate needs its key: set both {names.cert} and {names.key}."
            )
        if self.ca is None:
            if self.cert is not None:
                raise EnvironmentValueError(
                    f"{names.cert} needs {names.ca}: the file of the authority that signed the coordinator's "
                    "certificate."
                )
            return None
        ca = _read(self.ca, names.ca)
        # gRPC's own error for an unusable file does not name the file.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            # The file may have text in any language beside the certificates.
            context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
        except (OSError, ValueError) as error:
            raise EnvironmentValueError(
                f"{names.ca} = {self.ca}: it holds no certificates in PEM ({error})."
            ) from error
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(ca)
        cert, key = _read(self.cert, names.cert), _read(self.key, names.key)
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except OSError as error:
            raise EnvironmentValueError(
                f"{names.key} = {self.key}: it is not the key of the certificate in {self.cert}, or one of "
                f"them is not in PEM ({error})."
            ) from error
        return grpc.ssl_channel_credentials(ca, key, cert)

    def fault(self, details: str) -> Fault | None:
        """Explain a failure of TLS from the details of a failed call; None: TLS is not at fault.

        gRPC shows little: if a coordinator refuses a client in the handshake, the connection is just closed.
        """
        names = self.names
        for sign, fault in _faults(names).items():
            if sign in details:
                return fault
        if "failed to connect" not in details or not any(sign in details for sign in _CLOSED):
            return None
        if self.ca is None:
            return Fault(
                "the connection was closed at once", f"if the coordinator speaks TLS, set {names.ca}"
            )
        what = "the connection was closed in the TLS handshake"
        if self.cert is None:
            return Fault(
                what,
                f"the coordinator may ask for a client certificate: set {names.cert} and {names.key}",
            )
        return Fault(
            what,
            f"see whether the client certificate ({names.cert}) has expired, or is of another authority than "
            "the coordinator's --tls-client-ca",
        )


_CLOSED = ("Socket closed", "Connection reset")


def _faults(names: Names) -> dict[str, Fault]:
    """Return what gRPC's error texts mean; the first that occurs counts."""
    # Without the option, the variable is set.
    ca = names.ca if names == ENVIRONMENT else f"{names.ca} ({ENVIRONMENT.ca})"
    return {
        "certificate has expired": Fault(
            "the coordinator's certificate has expired",
            "renew the file that --tls-cert of muster serve names",
        ),
        "certificate is not yet valid": Fault(
            "the coordinator's certificate is not valid yet", "compare the clocks of both machines"
        ),
        "Hostname Verification Check failed": Fault(
            "the coordinator's certificate is for another name than the endpoint's",
            f"connect by a name that is in it, or set {names.server_name} to one",
        ),
        "CERTIFICATE_VERIFY_FAILED": Fault(
            f"the coordinator's certificate is not of an authority in {names.ca}",
            f"set {names.ca} to the file of the authority that signed it",
        ),
        "WRONG_VERSION_NUMBER": Fault(
            "the coordinator does not speak TLS on this port",
            f"leave {ca} out, or start the coordinator with --tls-cert",
        ),
    }


def check_credentials(endpoint: str) -> None:
    """Check that the credentials for an endpoint's addresses can be used.

    Raises:
        EnvironmentValueError: they cannot.
    """
    for address in endpoint.split(","):
        Credentials.toward(address).check()


class TokenPatience:
    """How long a process with a refused token waits for another token, or for a relay.

    It counts from the first refusal. Only a process whose token was accepted before waits.

    Args:
        endpoint: the addresses that it calls.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._relays = relays_of(endpoint)
        self._clock = clock
        self._since: float | None = None

    def lasts(self, reason: str) -> bool:
        """Return whether to try again: the token may be replaced, or a relay may be back.

        Args:
            reason: the reason of the refusal.
        """
        if reason not in TOKEN_REFUSED:
            return False
        mine = Credentials.of()
        if not (self._relays or mine.token_file or mine.token_command):
            return False
        now = self._clock()
        if self._since is None:
            self._since = now
        return now - self._since < TOKEN_PATIENCE

    def renew(self) -> None:
        """Note that the token was accepted: the next refusal counts as the first."""
        self._since = None


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EnvironmentValueError(
            f"{name} = {path}: it cannot be read ({error.strerror or error})."
        ) from error


class _Details(NamedTuple):
    """The fields of gRPC's ``ClientCallDetails``."""

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
    """Adds the token to the metadata of each call; gRPC's own way requires TLS."""

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
