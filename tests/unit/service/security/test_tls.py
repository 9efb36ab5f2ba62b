"""The server's certificates: what is refused, and that both servers get the new ones."""

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from lab.authority import Authority
from muster.service.security import tls as tls_module
from muster.service.security.config import TlsFiles, tls_files
from muster.service.security.files import FileError
from muster.service.security.tls import RESUMED_FOR, Tls, _changes, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


def test_first_end_of_the_chain_is_its_end(authority: Authority, folder: Path):
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


def test_certificate_and_its_key_are_given_together(tmp_path: Path):
    assert tls_files(None, None, None) is None
    for given in ((tmp_path, None, None), (None, tmp_path, None), (None, None, tmp_path)):
        with pytest.raises(ValueError, match="give both --tls-cert and --tls-key"):
            tls_files(*given)


def test_grpc_gets_new_certificates_once(authority: Authority):
    first = authority.issue("mine")
    tls = Tls(TlsFiles(cert=first.cert, key=first.key))
    before = tls.expires_at
    news = _changes(tls.certificates)
    assert news() is None
    authority.issue("mine", days=99)
    tls.certificates.look()
    assert tls.expires_at > before
    assert news() is not None
    assert news() is None


def test_grpc_reloads_certificates_so_that_old_sessions_end(authority: Authority):
    pair = authority.issue("server")
    tls = Tls(TlsFiles(cert=pair.cert, key=pair.key))
    now = 0.0
    news = _changes(tls.certificates, lambda: now)
    now = RESUMED_FOR - 1
    assert news() is None
    now += 1
    assert news() is not None
    assert news() is None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_session_is_not_resumed_for_ever(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, version: ssl.TLSVersion
):
    """A resumed one would let a client in whose certificate has ended meanwhile."""
    pair, client = authority.issue("server"), authority.issue("client", "node-0")
    tls = Tls(TlsFiles(cert=pair.cert, key=pair.key, client_ca=authority.ca))
    asking = ssl.create_default_context(cafile=authority.ca)
    asking.verify_flags |= ssl.VERIFY_X509_STRICT  # Python's default from 3.13 on.
    asking.load_cert_chain(client.cert, client.key)
    asking.minimum_version = asking.maximum_version = version
    asking.set_alpn_protocols(["h2"])

    def resumed(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession, bool]:
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            asking.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            assert connection.recv(200)
            assert connection.session is not None
            return connection.session, bool(connection.session_reused)

    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", tls.grpc_credentials())
    server.start()
    try:
        session, _ = resumed(None)
        assert resumed(session)[1], "or there is nothing to test here"
        monkeypatch.setattr(tls_module, "RESUMED_FOR", 0)
        assert not resumed(session)[1]
    finally:
        server.stop(None).wait()


def test_words_beside_certificates_may_be_of_any_language(authority: Authority, folder: Path):
    pair, annotated = authority.issue("server"), folder / "annotated.crt"
    annotated.write_text(f"# Főtanúsítvány\n{authority.ca.read_text()}")
    load(TlsFiles(cert=pair.cert, key=pair.key, client_ca=annotated))
    annotated.write_bytes(b"\x30\x82\xff")
    with pytest.raises(FileError, match=r"annotated\.crt holds no certificates"):
        load(TlsFiles(cert=pair.cert, key=pair.key, client_ca=annotated))


def test_where_clients_show_certificates_http_speaks_tls_1_3(authority: Authority):
    """TLS 1.2 resumes for any client: a session of a client of a removed authority."""
    pair = authority.issue("server")
    for ca, version in ((None, ssl.TLSVersion.TLSv1_2), (authority.ca, ssl.TLSVersion.TLSv1_3)):
        tls = Tls(TlsFiles(cert=pair.cert, key=pair.key, client_ca=ca))
        assert tls.http_context().minimum_version == tls.certificates.value.http.minimum_version == version
