import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.service.address import Address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7550", "127.0.0.1", 7550),
        ("0.0.0.0:0", "0.0.0.0", 0),
        ("localhost:65535", "localhost", 65535),
        ("[::1]:7550", "::1", 7550),
        ("[::]:0", "::", 0),
        ("muster.example:80", "muster.example", 80),
    ],
)
def test_host_and_port_are_read_and_written_alike(text: str, host: str, port: int):
    address = Address.parse(text)
    assert address == Address(host, port)
    assert str(address) == text


def test_ipv6_host_is_understood_without_brackets_and_written_with_them():
    assert str(Address.parse("::1:7550")) == "[::1]:7550"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "7550",
        "host",
        "host:",
        ":7550",
        "[]:7550",
        "host:-1",
        "host:65536",
        "host:x",
        "host: 1",
        "host:²",
    ],
)
def test_invalid_address_is_refused_with_an_example(text: str):
    with pytest.raises(ValueError) as caught:
        Address.parse(text)
    assert f'"{text}" is not HOST:PORT' in str(caught.value)
    assert "0.0.0.0:7550" in str(caught.value)


@given(st.text() | st.from_regex(r"\[?[a-f0-9:.]*\]?:\d*", fullmatch=True))
def test_any_text_is_an_address_or_a_value_error(text: str):
    try:
        address = Address.parse(text)
    except ValueError:
        return
    assert address.host
    assert 0 <= address.port <= 65535


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("node-1", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, loopback: bool):
    assert Address(host, 1).is_loopback is loopback
