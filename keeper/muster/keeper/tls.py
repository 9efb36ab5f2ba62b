"""TLS between keepers: each shows the certificate that it shows the coordinator."""

import ssl

from muster.client.credentials import Credentials
from muster.client.errors import EnvironmentValueError


def contexts(credentials: Credentials) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Return the contexts with which a keeper serves and calls others; None: without a certificate.

    A peer's certificate must be of the same authority. Its name is not looked at, for nodes come and go: the
    coordinator names the peers, and the token of the run admits them.

    Raises:
        EnvironmentValueError: a file cannot be used.
    """
    if credentials.ca is None or credentials.cert is None or credentials.key is None:
        return None
    serving, calling = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    calling.check_hostname = False
    for context in (serving, calling):
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(credentials.ca)
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(credentials.cert, credentials.key, password=lambda: b"")
        except OSError as error:
            names = credentials.names
            raise EnvironmentValueError(
                f"keepers cannot use the certificate of {names.cert}, {names.key} and {names.ca}: {error}."
            ) from error
    return serving, calling
