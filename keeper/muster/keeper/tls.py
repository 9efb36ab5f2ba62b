"""TLS between keepers: each shows the certificate that it shows the coordinator.

The files may be replaced while the keeper runs. New connections use the new ones; open connections stay open.
"""

import logging
import os
import ssl
import threading
from pathlib import Path
from typing import NamedTuple

from muster.client.credentials import Credentials
from muster.client.errors import EnvironmentValueError

logger = logging.getLogger(__name__)

_Signature = tuple[tuple[int, int, int], ...]


class _Contexts(NamedTuple):
    serving: ssl.SSLContext
    calling: ssl.SSLContext


class Tls:
    """The current certificate of this keeper and the authority of its peers. Several threads use it.

    A peer's certificate must be of the same authority. Its name is not checked, because nodes come and go:
    the coordinator names the peers, and the token of the run admits them.

    Args:
        credentials: the files. All three are needed.

    Raises:
        EnvironmentValueError: a file cannot be used.
    """

    def __init__(self, credentials: Credentials) -> None:
        assert credentials.ca is not None
        assert credentials.cert is not None
        assert credentials.key is not None
        self._files = credentials.ca, credentials.cert, credentials.key
        self._names = credentials.names
        self._lock = threading.Lock()
        try:
            self._signature: _Signature | None = _signature(self._files)
            self._contexts = _load(*self._files)
        except OSError as error:
            raise EnvironmentValueError(self._why(error)) from error

    @classmethod
    def of(cls, credentials: Credentials) -> "Tls | None":
        """Return the certificates; None if keepers are to send without TLS."""
        has_all = credentials.ca is not None and credentials.cert is not None and credentials.key is not None
        return cls(credentials) if has_all else None

    def for_serving(self) -> ssl.SSLContext:
        """Return a context for a port. It uses the current certificates at every handshake."""

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._current().serving

        context = _serving()
        context.sni_callback = choose
        return context

    def for_calling(self) -> ssl.SSLContext:
        """Return the context for the next connection to another keeper."""
        return self._current().calling

    def _current(self) -> _Contexts:
        with self._lock:
            try:
                signature = _signature(self._files)
                if signature != self._signature:
                    self._signature = signature
                    self._contexts = _load(*self._files)
                    logger.info("using the new certificate in %s", self._files[1])
            except OSError as error:
                # They are being replaced, or the new ones are unusable. The next connection looks again.
                self._signature = None
                logger.warning("still using the former certificate: %s", self._why(error))
            return self._contexts

    def _why(self, error: OSError) -> str:
        names = self._names
        return f"keepers cannot use the certificate of {names.cert}, {names.key} and {names.ca}: {error}."


def _signature(files: tuple[Path, ...]) -> _Signature:
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in map(os.stat, files))


def _load(ca: Path, cert: Path, key: Path) -> _Contexts:
    """Read the files.

    Raises:
        OSError: one cannot be used.
    """
    serving, calling = _serving(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    calling.check_hostname = False
    calling.minimum_version = ssl.TLSVersion.TLSv1_2
    calling.verify_mode = ssl.CERT_REQUIRED
    for context in (serving, calling):
        context.load_verify_locations(ca)
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert, key, password=lambda: b"")
    return _Contexts(serving, calling)


def _serving() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A resumed session is not verified again, although the authority may have been replaced. TLS 1.2 resumes
    # sessions also without tickets.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.verify_mode = ssl.CERT_REQUIRED
    return context
