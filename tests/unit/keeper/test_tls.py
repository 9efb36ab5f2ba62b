"""Certificates of a keeper that are replaced while it runs."""

import shutil
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from lab.authority import Authority, Pair
from muster.client.credentials import Credentials
from muster.client.errors import EnvironmentValueError
from muster.keeper.tls import Tls


class Keeper:
    """The files of a keeper's certificates, and what uses them."""

    def __init__(self, folder: Path, authority: Authority, name: str) -> None:
        folder.mkdir()
        self.files = Pair(folder / "cert.pem", folder / "key.pem")
        self.ca = folder / "ca.pem"
        self.use(authority, authority.issue(name))
        self.tls = Tls(Credentials(ca=self.ca, cert=self.files.cert, key=self.files.key))
        self.serving = self.tls.for_serving()

    def use(self, authority: Authority, pair: Pair) -> None:
        """Replace the files."""
        for source, target in (
            (authority.ca, self.ca),
            (pair.cert, self.files.cert),
            (pair.key, self.files.key),
        ):
            draft = target.with_suffix(".draft")
            shutil.copy(source, draft)
            draft.rename(target)


def serial_of(server: Keeper, client: Keeper) -> str:
    """Shake hands in memory; return the serial number of the certificate that the server shows."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.serving.wrap_bio(to_server, to_client, server_side=True)
    calling = client.tls.for_calling().wrap_bio(to_client, to_server)
    for end in (calling, serving, calling, serving):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    with pytest.raises(ssl.SSLWantReadError):  # Else the server has refused the client's certificate.
        serving.read(1)
    shown = calling.getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(tmp_path: Path, authority: Authority) -> tuple[Keeper, Keeper]:
    return Keeper(tmp_path / "node-a", authority, "a"), Keeper(tmp_path / "node-b", authority, "b")


def test_new_connection_shows_the_new_certificate(authority: Authority, pair: tuple[Keeper, Keeper]):
    a, b = pair
    before = serial_of(a, b)
    assert serial_of(a, b) == before
    a.use(authority, authority.issue("renewed"))
    assert serial_of(a, b) != before


def test_former_authority_is_not_trusted_after_its_replacement(
    tmp_path: Path, authority: Authority, pair: tuple[Keeper, Keeper]
):
    a, b = pair
    (tmp_path / "next").mkdir()
    following = Authority(tmp_path / "next", "following")
    for keeper in pair:
        keeper.use(following, following.issue("node"))
    serial_of(a, b)
    b.use(authority, authority.issue("outdated"))
    with pytest.raises(ssl.SSLError):
        serial_of(a, b)


def test_unusable_new_files_leave_the_former_certificate_in_use(
    authority: Authority, pair: tuple[Keeper, Keeper], caplog: pytest.LogCaptureFixture
):
    a, b = pair
    before = serial_of(a, b)
    other = authority.issue("other")
    shutil.copy(other.key, a.files.key)
    assert serial_of(a, b) == before
    assert "still using the former certificate" in caplog.text
    shutil.copy(other.cert, a.files.cert)
    assert serial_of(a, b) != before


def test_unusable_files_at_the_start_are_refused(tmp_path: Path, authority: Authority):
    one, other = authority.issue("one"), authority.issue("other")
    with pytest.raises(EnvironmentValueError, match="MUSTER_TLS_KEY"):
        Tls(Credentials(ca=authority.ca, cert=one.cert, key=other.key))
