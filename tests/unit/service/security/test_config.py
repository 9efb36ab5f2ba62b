from pathlib import Path

import pytest

from muster.service.security.config import Security, TlsFiles

FILES = TlsFiles(cert=Path("cert"), key=Path("key"))
CLIENTS = TlsFiles(cert=Path("cert"), key=Path("key"), client_ca=Path("ca"))
TOKENS = Path("tokens.toml")


@pytest.mark.parametrize(
    ("security", "knows"),
    [
        (Security(), True),
        (Security(tls=FILES), True),
        (Security(tokens_file=TOKENS), False),
        (Security(tokens_file=TOKENS, http_tokens=True), True),
        (Security(tls=CLIENTS), False),
        (Security(tls=CLIENTS, http_tls=True), True),
        (Security(tls=CLIENTS, http_tls=True, tokens_file=TOKENS), False),
        (Security(tls=CLIENTS, tokens_file=TOKENS, http_tokens=True), False),
    ],
)
def test_http_port_knows_operators_if_it_asks_what_the_other_asks(security: Security, knows: bool):
    assert security.http_knows_operators == knows
