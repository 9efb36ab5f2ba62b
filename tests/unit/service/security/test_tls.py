"""The server's certificates: what is refused, and that both servers get the new ones."""

from pathlib import Path

import pytest

from muster.service.security.config import TlsFiles, tls_files
from muster.service.security.files import FileError
from muster.service.security.tls import Tls, _news, load
from tests.support.authority import Authority


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


def test_the_first_end_of_the_chain_is_its_end(authority: Authority, folder: Path):
    late, soon = authority.issue("late", days=20), authority.issue("soon", days=3)
    chain = folder / "chain.crt"
    chain.write_bytes(late.cert.read_bytes() + soon.cert.read_bytes())
    alone = load(TlsFiles(cert=late.cert, key=late.key)).expires_at
    together = load(TlsFiles(cert=chain, key=late.key)).expires_at
    assert alone - together == pytest.approx(17 * 86_400, abs=60)


def test_each_file_that_cannot_be_used_is_named(authority: Authority, folder: Path):
    good, other = authority.issue("good"), authority.issue("other")
    junk = folder / "junk"
    junk.write_text("junk")
    for cert, key, ca, named in (
        (junk, good.key, None, "junk holds no certificate"),
        (good.cert, junk, None, "junk is not the key"),
        (good.cert, other.key, None, r"other\.key is not the key of the certificate in .*good\.crt"),
        (good.cert, good.key, junk, "junk holds no certificates"),
        (good.cert, folder / "nowhere", None, "nowhere cannot be read"),
    ):
        with pytest.raises(FileError, match=named):
            load(TlsFiles(cert=cert, key=key, client_ca=ca))


def test_a_certificate_and_its_key_are_given_together(tmp_path: Path):
    assert tls_files(None, None, None) is None
    for given in ((tmp_path, None, None), (None, tmp_path, None), (None, None, tmp_path)):
        with pytest.raises(ValueError, match="give both --tls-cert and --tls-key"):
            tls_files(*given)


def test_grpc_is_told_of_new_certificates_once(authority: Authority):
    first = authority.issue("mine")
    tls = Tls(TlsFiles(cert=first.cert, key=first.key))
    before = tls.expires_at
    news = _news(tls.certificates)
    assert news() is None
    authority.issue("mine", days=99)
    tls.certificates.look()
    assert tls.expires_at > before
    assert news() is tls.certificates.value.grpc
    assert news() is None
