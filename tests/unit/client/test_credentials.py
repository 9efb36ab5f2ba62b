"""What the environment says of token and certificates."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from lab.authority import Authority
from muster.client import credentials
from muster.client.credentials import TOKEN_PATIENCE, Credentials, TokenPatience, check_credentials
from muster.client.errors import EnvironmentValueError

SECRET = "s3cr3t-0123456789"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def test_no_variables_mean_no_credentials():
    given = Credentials.of({})
    given.check()
    assert given == Credentials()
    assert given.authorization() == ""


def test_token_file_is_read_at_each_call_and_wins(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}-1\n")
    given = Credentials.of({"MUSTER_TOKEN": SECRET, "MUSTER_TOKEN_FILE": str(file)})
    assert given.authorization() == f"Bearer {SECRET}-1"
    file.write_text(f"{SECRET}-2")
    assert given.authorization() == f"Bearer {SECRET}-2"
    assert Credentials.of({"MUSTER_TOKEN": SECRET}).authorization() == f"Bearer {SECRET}"
    assert SECRET not in repr(Credentials.of({"MUSTER_TOKEN": SECRET}))


def test_token_too_long_for_grpc_is_refused():
    with pytest.raises(EnvironmentValueError, match="it has 7,001 characters, and a token has 7,000"):
        Credentials(token="x" * 7_001).check()
    Credentials(token="x" * 7_000).check()


def test_command_gives_the_token_without_a_file(tmp_path: Path):
    environ = {"MUSTER_TOKEN": "other", "MUSTER_TOKEN_COMMAND": f"echo {SECRET}-{tmp_path.name}"}
    given = Credentials.of(environ)
    assert given.authorization() == f"Bearer {SECRET}-{tmp_path.name}"
    assert SECRET not in repr(given)
    (tmp_path / "token").write_text("of-the-file")
    file = {"MUSTER_TOKEN_FILE": str(tmp_path / "token")}
    assert Credentials.of(environ | file).authorization() == "Bearer of-the-file"
    with pytest.raises(EnvironmentValueError, match="MUSTER_TOKEN_COMMAND: no token: false ended with 1"):
        Credentials(token_command=f"false {SECRET}").check()
    with pytest.raises(EnvironmentValueError, match="MUSTER_TOKEN_COMMAND: a token is one line") as caught:
        Credentials(token_command=f"echo {SECRET} x").check()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", f"{SECRET} x", f"{SECRET}\nx", f"{SECRET}é", f"{SECRET}\x1b"])
def test_refusal_of_a_bad_token_does_not_contain_it(tmp_path: Path, text: str):
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(EnvironmentValueError, match=f"MUSTER_TOKEN_FILE = {file}: a token is") as caught:
        Credentials.of({"MUSTER_TOKEN_FILE": str(file)}).check()
    assert SECRET not in str(caught.value)


def test_missing_or_unusable_file_is_named(authority: Authority, tmp_path: Path):
    pair, other, junk = authority.issue("a"), authority.issue("b"), tmp_path / "junk"
    junk.write_text("junk")
    nowhere = tmp_path / "nowhere"
    ca = {"MUSTER_TLS_CA": authority.ca}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"MUSTER_TOKEN_FILE": nowhere}, "MUSTER_TOKEN_FILE = .*nowhere: it cannot be read"),
        ({"MUSTER_TLS_CA": nowhere}, "MUSTER_TLS_CA = .*nowhere: it cannot be read"),
        ({"MUSTER_TLS_CA": junk}, "MUSTER_TLS_CA = .*junk: it holds no certificates"),
        (ca | {"MUSTER_TLS_CERT": pair.cert}, "set both MUSTER_TLS_CERT and MUSTER_TLS_KEY"),
        (ca | {"MUSTER_TLS_KEY": pair.key}, "set both MUSTER_TLS_CERT and MUSTER_TLS_KEY"),
        (
            {"MUSTER_TLS_CERT": pair.cert, "MUSTER_TLS_KEY": pair.key},
            "MUSTER_TLS_CERT needs MUSTER_TLS_CA: the file of the authority",
        ),
        (
            ca | {"MUSTER_TLS_CERT": pair.cert, "MUSTER_TLS_KEY": other.key},
            r"MUSTER_TLS_KEY = .*b\.key: it is not the key of the certificate in .*a\.crt",
        ),
    ]
    for environ, said in cases:
        with pytest.raises(EnvironmentValueError, match=said):
            Credentials.of({name: str(value) for name, value in environ.items()}).check()
    whole = ca | {"MUSTER_TLS_CERT": pair.cert, "MUSTER_TLS_KEY": pair.key}
    Credentials.of({name: str(value) for name, value in whole.items()}).check()


FAILED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.7:1: "
PLAIN, TLS = Credentials(), Credentials(ca=Path("ca"))
MUTUAL = Credentials(ca=Path("ca"), cert=Path("cert"), key=Path("key"))


@pytest.mark.parametrize(
    ("given", "details", "said"),
    [
        (
            TLS,
            "CERTIFICATE_VERIFY_FAILED: certificate has expired: OK",
            "certificate has expired; renew the file",
        ),
        (TLS, "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "compare the clocks"),
        (
            TLS,
            "CERTIFICATE_VERIFY_FAILED: unable to get issuer",
            "not of an authority in MUSTER_TLS_CA",
        ),
        (TLS, "Hostname Verification Check failed.", "set MUSTER_TLS_SERVER_NAME"),
        (TLS, "WRONG_VERSION_NUMBER", "does not speak TLS on this port; leave MUSTER_TLS_CA out"),
        (TLS, f"{FAILED}Socket closed", "set MUSTER_TLS_CERT and MUSTER_TLS_KEY"),
        (MUTUAL, f"{FAILED}Socket closed", "client certificate (MUSTER_TLS_CERT) has expired"),
        (PLAIN, f"{FAILED}Socket closed", "if the coordinator speaks TLS, set MUSTER_TLS_CA"),
        (TLS, "Socket closed", ""),
        (TLS, f"{FAILED}Connection refused", ""),
    ],
)
def test_grpcs_tls_error_becomes_a_sentence(given: Credentials, details: str, said: str):
    fault = given.fault(details)
    assert said in str(fault or "")
    assert bool(said) == bool(fault)


def test_refused_token_is_retried_only_if_it_may_be_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(credentials.Credentials, "of", lambda: Credentials(token_file=Path("x")))
    now = 100.0
    patience = TokenPatience("a:1", lambda: now)
    now += 2 * TOKEN_PATIENCE  # Without a coordinator: nobody has refused anything yet.
    assert patience.lasts("TOKEN_UNKNOWN")
    now += TOKEN_PATIENCE - 1
    assert patience.lasts("TOKEN_MISSING")
    assert not patience.lasts("RUN_NOT_ALLOWED")
    now += 1
    assert not patience.lasts("TOKEN_UNKNOWN")
    patience.renew()
    assert patience.lasts("TOKEN_UNKNOWN")
    monkeypatch.setattr(credentials.Credentials, "of", lambda: Credentials(token_command="x"))
    assert patience.lasts("TOKEN_EXPIRED")
    monkeypatch.setattr(credentials.Credentials, "of", lambda: Credentials(token=SECRET))
    assert not patience.lasts("TOKEN_UNKNOWN")
    assert not patience.lasts("TOKEN_EXPIRED")


def test_refused_token_is_retried_if_a_relay_may_be_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(credentials.Credentials, "of", lambda: Credentials(token=SECRET))
    now = 100.0
    patience = TokenPatience("unix:///r,a:1", lambda: now)
    assert patience.lasts("TOKEN_UNKNOWN")
    assert not patience.lasts("RUN_NOT_ALLOWED")
    now += TOKEN_PATIENCE
    assert not patience.lasts("TOKEN_UNKNOWN")


def test_socket_gets_no_credentials_and_other_addresses_get_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_TOKEN", SECRET)
    assert Credentials.toward("unix:///r") == Credentials()
    assert Credentials.toward("a:1").authorization() == f"Bearer {SECRET}"


def test_unusable_credentials_do_not_matter_for_a_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MUSTER_TOKEN_FILE", str(tmp_path / "nowhere"))
    check_credentials("unix:///r")
    with pytest.raises(EnvironmentValueError, match="MUSTER_TOKEN_FILE"):
        check_credentials("unix:///r,a:1")


def test_asyncio_channel_uses_the_same_credentials(authority: Authority):
    given = Credentials.of({"MUSTER_TLS_CA": str(authority.ca), "MUSTER_TLS_SERVER_NAME": "muster"})
    assert isinstance(given.channel_credentials(), grpc.ChannelCredentials)
    assert given.name_options("called") == [("grpc.ssl_target_name_override", "muster")]
    given = Credentials.of({})
    assert given.channel_credentials() is None
    assert given.name_options("called") == [("grpc.ssl_target_name_override", "called")]
    assert given.name_options() == []


@pytest.mark.parametrize(
    ("address", "warns"),
    [
        ("muster.example:7550", True),
        ("10.0.0.1:7550", True),
        ("[fd00::1]:7550", True),
        ("localhost:7550", False),
        ("127.0.0.1:7550", False),
        ("[::1]:7550", False),
        ("unix:///run/muster/relay.sock", False),
    ],
)
def test_token_without_tls_causes_one_warning_for_each_address(
    address: str, warns: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(credentials, "_warned", set())
    for _ in range(2):
        Credentials(token="s3cr3t").open_channel(address, []).close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warns
    assert all(f"{address} without TLS" in line and "MUSTER_TLS_CA" in line for line in said)
    caplog.clear()
    Credentials().open_channel("other.example:1", []).close()
    assert not caplog.records
