"""Which ports are closed to strangers, and which are not opened."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from muster.service.address import Address
from muster.service.app.ports import StartError, check_coordinator_exposed, check_rpc_exposed
from muster.service.config import Config
from muster.service.security.config import Security, TlsFiles

TLS = TlsFiles(cert=Path("c"), key=Path("k"))
MUTUAL = TlsFiles(cert=Path("c"), key=Path("k"), client_ca=Path("ca"))
TOKENS = Path("tokens.toml")


LOOPBACK = ["localhost:1", "127.0.0.2:1", "[::1]:1"]
BEYOND = ["10.0.0.1:1", "0.0.0.0:1", "[::]:1", "muster.example:1"]


def check(listen: str, security: Security, insecure: bool = False) -> None:
    address = Address.parse(listen)
    check_rpc_exposed(address, security, insecure=insecure, use="anyone could do harm")


def check_http(http: str, security: Security, insecure: bool = False) -> None:
    listen, address = Address.parse("127.0.0.1:1"), Address.parse(http)
    check_coordinator_exposed(
        Config(listen=listen, http=address, state="memory:", security=security, insecure=insecure)
    )


@pytest.mark.parametrize("address", LOOPBACK)
def test_port_on_loopback_needs_neither_tls_nor_tokens(address: str):
    check(address, Security())
    check_http(address, Security())


@pytest.mark.parametrize("address", BEYOND)
@pytest.mark.parametrize(
    ("security", "lacking"),
    [
        (Security(), "without --tls-cert and without --tokens-file or --tls-client-ca: anyone .* Give them"),
        (Security(tokens_file=TOKENS), "without --tls-cert: anyone could do harm. Give it"),
        (Security(tls=TLS), "without --tokens-file or --tls-client-ca: anyone .* Give it"),
        (Security(tls=TLS, tokens_file=TOKENS), ""),
        (Security(tls=MUTUAL), ""),
    ],
)
def test_port_beyond_loopback_needs_tls_and_known_callers(address: str, security: Security, lacking: str):
    with pytest.raises(StartError, match=lacking) if lacking else nullcontext() as caught:
        check(address, security)
    if caught is not None:
        assert f"--listen {address} is reachable from other machines" in str(caught.value)
        assert "say --insecure" in str(caught.value)
    check(address, security, insecure=True)


@pytest.mark.parametrize("address", BEYOND)
@pytest.mark.parametrize(
    ("security", "lacking"),
    [
        (Security(tls=MUTUAL, tokens_file=TOKENS), "without --http-tls: anyone"),
        (Security(tls=TLS, tokens_file=TOKENS, http_tls=True), "without --http-tokens or --tls-client-ca"),
        (Security(tls=TLS, tokens_file=TOKENS, http_tokens=True), "without --http-tls: anyone"),
        (Security(tls=TLS, tokens_file=TOKENS, http_tls=True, http_tokens=True), ""),
        (Security(tls=MUTUAL, http_tls=True), ""),
    ],
)
def test_http_port_beyond_loopback_needs_the_same(address: str, security: Security, lacking: str):
    with pytest.raises(StartError, match=lacking) if lacking else nullcontext() as caught:
        check_http(address, security)
    if caught is not None:
        assert f"--http {address} is reachable from other machines" in str(caught.value)
    check_http(address, security, insecure=True)
