"""Which ports are closed to strangers, and which are not opened."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from muster.service.address import Address
from muster.service.app.ports import StartError, check_exposed
from muster.service.security.config import Security, TlsFiles

TLS = TlsFiles(cert=Path("c"), key=Path("k"))
MUTUAL = TlsFiles(cert=Path("c"), key=Path("k"), client_ca=Path("ca"))
TOKENS = Path("tokens.toml")


def check(listen: str, security: Security, insecure: bool = False) -> None:
    check_exposed(Address.parse(listen), security, insecure=insecure, use="whoever reaches it could do harm")


@pytest.mark.parametrize("listen", ["localhost:1", "127.0.0.2:1", "[::1]:1"])
def test_port_on_loopback_needs_neither_tls_nor_tokens(listen: str):
    check(listen, Security())


@pytest.mark.parametrize("listen", ["10.0.0.1:1", "0.0.0.0:1", "[::]:1", "muster.example:1"])
@pytest.mark.parametrize(
    ("security", "lacking"),
    [
        (Security(), "--tls-cert and --tls-key and --tokens-file or --tls-client-ca"),
        (Security(tokens_file=TOKENS), "without TLS: whoever reaches it could do harm. Give --tls-cert and"),
        (Security(tls=TLS), "without checking their tokens: whoever reaches it .* Give --tokens-file or"),
        (Security(tls=TLS, tokens_file=TOKENS), ""),
        (Security(tls=MUTUAL), ""),
    ],
)
def test_port_beyond_loopback_needs_tls_and_known_callers(listen: str, security: Security, lacking: str):
    with pytest.raises(StartError, match=lacking) if lacking else nullcontext() as caught:
        check(listen, security)
    if caught is not None:
        assert f"--listen {listen} is reachable from other machines" in str(caught.value)
        assert "say --insecure" in str(caught.value)
    check(listen, security, insecure=True)
