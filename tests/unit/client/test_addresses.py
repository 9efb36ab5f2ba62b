"""What an endpoint is made of."""

import pytest

from muster.client.addresses import MAX_PATH_BYTES, checked, is_address, is_socket, relays_of, target_of
from muster.client.errors import EnvironmentValueError

LONGEST = f"unix:///{'x' * (MAX_PATH_BYTES - 1)}"


@pytest.mark.parametrize("text", ["a:1", "10.0.0.1:65535", "[::1]:7550", "unix:7550"])
def test_host_and_port_are_an_address(text: str):
    assert is_address(text)
    assert not is_socket(text)


@pytest.mark.parametrize("text", ["unix:///run/muster/relay.sock", "unix:///a b:1", LONGEST])
def test_socket_of_this_machine_is_an_address(text: str):
    assert is_address(text)
    assert is_socket(text)


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:x", "a:²", "http://a:1/", "[]:1"])
def test_other_text_is_no_address(text: str):
    assert not is_address(text)


@pytest.mark.parametrize(
    "text",
    ["unix://", "unix:///", "unix://a.sock", "unix:/a.sock", "unix:///a/", "unix:///\0", "unix:///\udcff"],
)
def test_socket_without_an_absolute_path_is_named(text: str):
    assert not is_address(text)
    with pytest.raises(EnvironmentValueError) as caught:
        checked(f"a:1,{text}")
    assert str(caught.value) == (
        f'endpoint "a:1,{text}": "{text}" is not unix:// and the absolute path of a socket: '
        "name one such as unix:///run/muster/relay.sock."
    )


def test_path_too_long_for_a_socket_is_named_with_its_length():
    text = f"unix:///{'é' * 65}"
    with pytest.raises(EnvironmentValueError) as caught:
        checked(text)
    assert str(caught.value) == (
        f'endpoint "{text}" has a path of 131 bytes; a socket\'s may have 107: '
        "name one such as unix:///run/muster/relay.sock."
    )


def test_endpoint_has_each_address_once():
    assert checked(" unix:///r , a:1,unix:///r") == "unix:///r,a:1"
    assert relays_of("unix:///r,a:1,unix:///s") == ["unix:///r", "unix:///s"]


def test_path_of_a_socket_is_quoted_for_grpc():
    assert target_of("unix:///tmp/a b%#?é") == "unix:///tmp/a%20b%25%23%3F%C3%A9"
    assert target_of("[::1]:7550") == "[::1]:7550"
