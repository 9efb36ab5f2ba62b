"""What this process shows the coordinator, and what it expects of it: a token, and certificates.

It comes from the environment; the command has options for it, too. The files are read again for each
connection (the token's for each call), so that whoever renews them needs to restart nothing. A helper command
that gives the token is run again when what it gave is about to expire.
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
from muster.client.token_command import COMMANDS, CommandError

logger = logging.getLogger(__name__)
_warned: set[str] = set()
"""Addresses to which a token went without TLS, once that was said."""

TOKEN_REFUSED = frozenset({"TOKEN_MISSING", "TOKEN_UNKNOWN", "TOKEN_EXPIRED"})
"""Reasons of a refusal that another token would mend."""
MOST_TOKEN = 7_000
"""Characters of a token: with more, gRPC would refuse the call for the size of its headers."""
TOKEN_PATIENCE = 60.0
"""Seconds that a process that was welcome goes on trying when its token is refused: a new one that the
coordinator knows already may take so long to come to every node (Kubernetes updates secrets each minute)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What messages call each of the credentials: as whoever reads them can set it."""

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
    """Whether what is said to an address leaves this machine."""
    host = host_of(address)
    if is_socket(address) or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


class Fault(NamedTuple):
    """Why TLS has failed, as far as can be told; as text, one sentence."""

    what: str
    next: str
    """What to do."""

    def __str__(self) -> str:
        return f"{self.what}; {self.next}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What is shown and expected; :meth:`check` tells whether it can be used."""

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    """Wins over ``token_command``."""
    token_command: str = field(default="", repr=False)
    """Wins over ``token``: a command that writes it to stdout."""
    ca: Path | None = None
    """If given, TLS is spoken, and the coordinator must show a certificate of these authorities."""
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    """The name that the coordinator's certificate must have; empty: the host that is called."""
    names: Names = ENVIRONMENT

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> "Credentials":
        """What the variables say."""

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
        """What is shown to one address: nothing to a socket, where the file's permissions are the check."""
        return cls() if is_socket(address) else cls.of()

    def check(self) -> None:
        """See that all of it can be used, before anyone waits for a connection.

        Raises:
            EnvironmentValueError: something cannot, or is missing that another one needs.
        """
        self.channel_credentials()
        self.authorization()

    def authorization(self) -> str:
        """The value of the ``authorization`` header; empty if there is no token.

        Raises:
            EnvironmentValueError: the token's file cannot be read, its command gave none, or what they hold
                cannot be a token.
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
        if len(token) > MOST_TOKEN:
            raise EnvironmentValueError(
                f"{where}: it has {len(token):,} characters, and a token has {MOST_TOKEN:,} at the most. Ask "
                "its issuer for one with fewer claims."
            )
        return f"Bearer {token}"

    def refused(self) -> None:
        """Take note that the token was refused, so that a command is asked for another."""
        COMMANDS.forget(self.token_command)

    def certificates(self) -> tuple[bytes, ...]:
        """What the files of authorities, certificate and key hold now.

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
        """A channel that shows them.

        Args:
            address: ``HOST:PORT``, or ``unix:///PATH``.
            options: gRPC's.
            server_name: the name that the coordinator's certificate must have, unless
                ``self.server_name`` is another; empty: the address's host.

        Raises:
            EnvironmentValueError: a file cannot be used, or is missing that another one needs.
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
        """Say once for each address that a token crosses the network readably; call it where TLS is off."""
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
        """The options that say whom the coordinator's certificate must name.

        Args:
            server_name: as in :meth:`open_channel`.
        """
        name = self.server_name or server_name
        return [("grpc.ssl_target_name_override", name)] if name else []

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """What a channel that speaks TLS is opened with; None if it is not spoken.

        Raises:
            EnvironmentValueError: a file cannot be used, or is missing that another one needs.
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
        # What gRPC would say of a file that it cannot use does not name it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            # Beside the certificates there may be words of any language.
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
        """What is wrong with TLS, from the details of a call that reached nobody; None: it is not TLS.

        gRPC does not say more than it does: a coordinator that turns a client away in the handshake has only
        closed the connection.
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
    """What a few words of gRPC's mean; the first that are found count."""
    # Where the option was not given, the variable is set.
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
        """The process was let in: the next refusal is a first one."""
        self._since = None


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EnvironmentValueError(
            f"{name} = {path}: it cannot be read ({error.strerror or error})."
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
