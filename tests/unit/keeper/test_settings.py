"""A keeper's settings, and how it is reached."""

import pytest

from muster.keeper.__main__ import main
from muster.keeper.settings import host_and_port, own_host, url_of


@pytest.mark.parametrize(
    ("text", "found"),
    [("0.0.0.0:0", ("0.0.0.0", 0)), ("[::1]:80", ("::1", 80)), ("node:65535", ("node", 65_535))],
)
def test_address_is_read(text: str, found: tuple[str, int]):
    assert host_and_port(text) == found


@pytest.mark.parametrize("text", ["", "80", ":80", "node:", "node:65536", "node:-1", "node:٣"])
def test_text_that_is_no_address_is_refused(text: str):
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        host_and_port(text)


def test_url_of_an_ipv6_address_has_brackets():
    assert url_of("http", "::1", 80) == "http://[::1]:80"
    assert url_of("https", "10.0.0.1", 80) == "https://10.0.0.1:80"


def test_own_host_is_the_one_on_the_way_to_the_coordinator():
    assert own_host("unix:///run/relay.sock,127.0.0.1:7550") == "127.0.0.1"
    assert own_host("unix:///run/relay.sock")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--endpoint=nowhere"], "is not host:port"),
        (["--endpoint="], "no coordinator is named"),
        (["--quota=much"], "--quota = 'much': it is a whole number of bytes"),
        (["--listen=here"], "is not HOST:PORT"),
    ],
)
def test_wrong_argument_is_named(given: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--folder=/x", "--run-id=job", "--endpoint=a:1", *given])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
