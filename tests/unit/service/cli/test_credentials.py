"""The options for token and certificates, and what is wrong with them."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from muster.service.cli.credentials import Credentials, connecting, given
from muster.service.cli.failure import Exit
from tests.support.authority import Authority

SECRET = "s3cr3t-0123456789"
app = typer.Typer()


@app.command()
@connecting
def show(name: str) -> None:
    """Show what was given."""
    mine = given()
    typer.echo(f"{name} {mine.tls_server_name} {mine.authorization() == f'Bearer {SECRET}'}")
    mine.open_channel("localhost:1", []).close()


def invoke(*arguments: str, **environ: str):
    blank = {name: "" for name in ("MUSTER_TOKEN", "MUSTER_TOKEN_FILE", "MUSTER_TLS_CA")}
    return CliRunner().invoke(app, ["x", *arguments], env=blank | environ)


def test_a_command_is_given_them_and_only_for_its_time(tmp_path: Path):
    (tmp_path / "token").write_text(SECRET)
    done = invoke(f"--token-file={tmp_path / 'token'}", "--tls-server-name=n", MUSTER_TOKEN="another")
    assert done.stdout == "x n True\n"
    assert invoke(MUSTER_TOKEN=SECRET, MUSTER_TLS_SERVER_NAME="m").stdout == "x m True\n"
    assert given().tls_server_name == ""


def test_what_cannot_be_used_is_a_usage_error_that_names_it(tmp_path: Path):
    authority = Authority(tmp_path)
    pair, other, junk = authority.issue("a"), authority.issue("b"), tmp_path / "junk"
    junk.write_text("two words")
    ca = f"--tls-ca={authority.ca}"
    for arguments, said in (
        ([f"--token-file={tmp_path / 'nowhere'}"], "nowhere cannot be read"),
        ([f"--token-file={junk}"], "junk: a token is one line"),
        ([f"--tls-ca={junk}"], "junk holds no certificates"),
        ([ca, f"--tls-cert={pair.cert}"], "give both --tls-cert and --tls-key"),
        ([f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"], "--tls-cert needs --tls-ca"),
        ([ca, f"--tls-cert={pair.cert}", f"--tls-key={other.key}"], "b.key is not the key"),
    ):
        done = invoke(*arguments)
        assert done.exit_code == Exit.USAGE
        assert said in done.stderr
        assert "two words" not in done.stderr
    assert invoke(ca, f"--tls-cert={pair.cert}", f"--tls-key={pair.key}").exit_code == 0


def test_a_token_is_not_shown():
    assert SECRET not in repr(Credentials(token=SECRET))


FAILED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.7:1: "


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ("certificate has expired", "its certificate has expired"),
        ("certificate is not yet valid", "compare the clocks"),
        ("Hostname Verification Check failed", "--tls-server-name"),
        ("CERTIFICATE_VERIFY_FAILED", "not of an authority in --tls-ca"),
        ("WRONG_VERSION_NUMBER", "does not speak TLS"),
        (f"{FAILED}Socket closed", "give --tls-cert and --tls-key"),
        (f"{FAILED}Connection refused", ""),
    ],
)
def test_what_grpc_says_of_tls_becomes_a_sentence_with_a_next_step(details: str, said: str):
    fault = Credentials(tls_ca=Path("ca")).fault(details)
    assert said in fault
    assert bool(said) == ("\n  next: " in fault)
