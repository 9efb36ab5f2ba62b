"""What the command shows the coordinator, and what it expects of it: a token, and certificates."""

import functools
import inspect
import os
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import grpc
import typer

from muster.service.cli.failure import Exit, fail

TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="MUSTER_TOKEN_FILE", metavar="FILE", help="The file of the token to show."),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="MUSTER_TLS_CA",
        metavar="FILE",
        help="Speak TLS; the coordinator's certificate must be of one of these authorities.",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="MUSTER_TLS_CERT", metavar="FILE", help="The client certificate to show."),
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="MUSTER_TLS_KEY", metavar="FILE", help="The client certificate's key.")
]
TlsServerName = Annotated[
    str,
    typer.Option(
        envvar="MUSTER_TLS_SERVER_NAME",
        metavar="NAME",
        help="The name that the coordinator's certificate must have.  [default: the endpoint's host]",
        show_default=False,
    ),
]
OPTIONS: dict[str, tuple[Any, Any]] = {
    "token_file": (TokenFile, None),
    "tls_ca": (TlsCa, None),
    "tls_cert": (TlsCert, None),
    "tls_key": (TlsKey, None),
    "tls_server_name": (TlsServerName, ""),
}
"""The options of :func:`connecting`, with their types and defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What was given by options and environment."""

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    """Wins over ``token``."""
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str = ""

    def open_channel(
        self, endpoint: str, options: list[tuple[str, Any]], server_name: str = ""
    ) -> grpc.Channel:
        """A channel that shows them; what cannot be used ends the command.

        Args:
            endpoint: ``HOST:PORT``.
            options: gRPC's.
            server_name: the name that the certificate must have, unless another one was given; empty: the
                endpoint's host.
        """
        tls = self._tls()
        if tls is None:
            channel = grpc.insecure_channel(endpoint, options=options)
        else:
            name = self.tls_server_name or server_name
            override = [("grpc.ssl_target_name_override", name)] if name else []
            channel = grpc.secure_channel(endpoint, tls, options=[*options, *override])
        authorization = self.authorization()
        return grpc.intercept_channel(channel, _Bearer(authorization)) if authorization else channel

    def authorization(self) -> str:
        """The value of the ``authorization`` header; empty if there is no token."""
        token, where = self.token, "MUSTER_TOKEN"
        if self.token_file is not None:
            where = str(self.token_file)
            token = _read(self.token_file).decode("utf-8", "replace").strip()
        elif not token:
            return ""
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            fail(f"{where}: a token is one line of ASCII without spaces", Exit.USAGE)
        return f"Bearer {token}"

    def _tls(self) -> grpc.ChannelCredentials | None:
        if (self.tls_cert is None) != (self.tls_key is None):
            fail("a client certificate needs its key: give both --tls-cert and --tls-key", Exit.USAGE)
        if self.tls_ca is None:
            if self.tls_cert is not None:
                fail(
                    "--tls-cert needs --tls-ca: the file of the authority that signed the coordinator's "
                    "certificate",
                    Exit.USAGE,
                )
            return None
        ca = _read(self.tls_ca)
        # What gRPC would say of a file that it cannot use does not name it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            # Beside the certificates there may be words of any language.
            context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
        except (OSError, ValueError) as error:
            fail(f"{self.tls_ca} holds no certificates in PEM: {error}", Exit.USAGE)
        if self.tls_cert is None or self.tls_key is None:
            return grpc.ssl_channel_credentials(ca)
        cert, key = _read(self.tls_cert), _read(self.tls_key)
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.tls_cert, self.tls_key, password=lambda: b"")
        except OSError as error:
            fail(
                f"{self.tls_key} is not the key of the certificate in {self.tls_cert}, or one of them is not "
                f"in PEM: {error}",
                Exit.USAGE,
            )
        return grpc.ssl_channel_credentials(ca, key, cert)

    def fault(self, details: str) -> str:
        """What is wrong with TLS and what to do, from the details of a call that reached nobody.

        Returns:
            A sentence; empty if it does not look like TLS.
        """
        for sign, sentence in _FAULTS:
            if sign in details:
                return sentence
        if "failed to connect" not in details or not any(sign in details for sign in _CLOSED):
            return ""
        # A coordinator that turns a client away in the handshake has only closed the connection.
        if self.tls_ca is None:
            return "it closed the connection at once\n  next: if it speaks TLS, give --tls-ca"
        if self.tls_cert is None:
            return (
                "it closed the connection in the TLS handshake\n  next: it may ask for a client certificate: "
                "give --tls-cert and --tls-key"
            )
        return (
            "it closed the connection in the TLS handshake\n  next: see whether the client certificate "
            "(--tls-cert) has expired, or is of another authority than the coordinator's --tls-client-ca"
        )


_FAULTS = (
    (
        "certificate has expired",
        "its certificate has expired\n  next: renew the file that --tls-cert of muster serve names",
    ),
    (
        "certificate is not yet valid",
        "its certificate is not valid yet\n  next: compare the clocks of both machines",
    ),
    (
        "Hostname Verification Check failed",
        "its certificate is for another name than the endpoint's\n  next: give an --endpoint by a name that "
        "is in it, or --tls-server-name with one",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not of an authority in --tls-ca\n  next: give the file of the authority that "
        "signed it",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "it does not speak TLS on this port\n  next: leave --tls-ca (MUSTER_TLS_CA) out, or start it with "
        "--tls-cert",
    ),
)
_CLOSED = ("Socket closed", "Connection reset")

_given: ContextVar[Credentials | None] = ContextVar("credentials", default=None)


def given() -> Credentials:
    """What the running command was given; outside of one, what the environment's ``MUSTER_TOKEN`` says."""
    return _given.get() or Credentials(token=os.environ.get("MUSTER_TOKEN", ""))


def connecting(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options for a token and for TLS; :func:`given` hands out what they were set to.

    They are the same for all commands, and of no interest to any, so no command has them as parameters.
    """

    @functools.wraps(command)
    def run(**arguments: Any) -> None:  # noqa: ANN401
        mine = {name: arguments.pop(name) for name in OPTIONS}
        token = _given.set(Credentials(token=os.environ.get("MUSTER_TOKEN", ""), **mine))
        try:
            command(**arguments)
        finally:
            _given.reset(token)

    signature = inspect.signature(command)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in OPTIONS.items()
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = command.__annotations__ | {name: kind for name, (kind, _) in OPTIONS.items()}
    return run


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror or error}", Exit.USAGE)


class _Details(NamedTuple):
    """What gRPC asks of a ``ClientCallDetails``."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Puts the token into the metadata of each call; gRPC's own way wants TLS."""

    def __init__(self, authorization: str) -> None:
        self._authorization = authorization

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:  # noqa: ANN401
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:  # noqa: ANN401
        return continuation(self._with_token(client_call_details), request)

    def _with_token(self, details: grpc.ClientCallDetails) -> _Details:
        return _Details(
            details.method,
            details.timeout,
            [*(details.metadata or ()), ("authorization", self._authorization)],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
