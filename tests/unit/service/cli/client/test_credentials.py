"""The options for token and certificates, and what is wrong with them."""

from pathlib import Path

import grpc
import pytest
import typer
from typer.testing import CliRunner

from lab.authority import Authority
from muster.client.credentials import Credentials
from muster.service.cli.client import coordinator_client as client
from muster.service.cli.client.credentials import NAMES, connecting, given
from muster.service.cli.failure import Exit
from muster.v1 import run_pb2, run_pb2_grpc
from tests.unit.service.cli.client.test_coordinator_client import failed

SECRET = "s3cr3t-0123456789"
app = typer.Typer()


@app.command()
@connecting
def show(name: str) -> None:
    """Show what was given."""
    mine = given()
    typer.echo(f"{name} {mine.server_name} {mine.authorization() == f'Bearer {SECRET}'}")
    mine.open_channel("localhost:1", []).close()


def invoke(*arguments: str, **environ: str):
    blank = {name: "" for name in ("MUSTER_TOKEN", "MUSTER_TOKEN_FILE", "MUSTER_TLS_CA")}
    return CliRunner().invoke(app, ["x", *arguments], env=blank | environ)


def test_command_has_its_credentials_only_while_it_runs(tmp_path: Path):
    (tmp_path / "token").write_text(SECRET)
    done = invoke(f"--token-file={tmp_path / 'token'}", "--tls-server-name=n", MUSTER_TOKEN="another")
    assert done.stdout == "x n True\n"
    assert invoke(MUSTER_TOKEN=SECRET, MUSTER_TLS_SERVER_NAME="m").stdout == "x m True\n"
    assert given().server_name == ""


def test_unusable_option_is_a_usage_error_that_names_it(tmp_path: Path):
    authority = Authority(tmp_path)
    pair, other, junk = authority.issue("a"), authority.issue("b"), tmp_path / "junk"
    junk.write_text("two words")
    ca = f"--tls-ca={authority.ca}"
    for arguments, said in (
        ([f"--token-file={tmp_path / 'nowhere'}"], "--token-file = {}nowhere: it cannot be read"),
        ([f"--token-file={junk}"], "--token-file = {}junk: a token is one line"),
        ([f"--tls-ca={junk}"], "--tls-ca = {}junk: it holds no certificates"),
        ([ca, f"--tls-cert={pair.cert}"], "set both --tls-cert and --tls-key"),
        ([f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"], "--tls-cert needs --tls-ca"),
        ([ca, f"--tls-cert={pair.cert}", f"--tls-key={other.key}"], "--tls-key = {}b.key: it is not the key"),
    ):
        done = invoke(*arguments)
        assert done.exit_code == Exit.USAGE
        assert said.format(f"{tmp_path}/") in done.stderr
        assert "two words" not in done.stderr
    assert invoke(ca, f"--tls-cert={pair.cert}", f"--tls-key={pair.key}").exit_code == 0


@pytest.mark.parametrize("method", ["List", "Watch"])
def test_missing_token_file_ends_the_command_at_its_next_call(tmp_path: Path, method: str):
    app, file = typer.Typer(), tmp_path / "token"
    file.write_text(SECRET)

    @app.command()
    @connecting
    def call() -> None:
        with given().open_channel("localhost:1", []) as channel:
            file.unlink()
            stub = run_pb2_grpc.RunServiceStub(channel)
            if method == "List":
                stub.List(run_pb2.RunServiceListRequest())
            else:
                next(stub.Watch(run_pb2.WatchRequest()))

    done = CliRunner().invoke(app, [f"--token-file={file}"])
    assert done.exit_code == Exit.USAGE
    assert done.stderr.startswith(f"Error: --token-file = {file}: it cannot be read (")


def test_unusable_option_ends_the_command_before_its_first_call(tmp_path: Path):
    app = typer.Typer()

    @app.command()
    @connecting
    def status() -> None:
        with client.connect("localhost:1", 1) as connected:
            connected.status()

    done = CliRunner().invoke(app, [f"--token-file={tmp_path / 'nowhere'}"])
    assert done.exit_code == Exit.USAGE
    assert "nowhere: it cannot be read" in done.stderr


FAILED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.7:1: "


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ("certificate has expired", "the coordinator's certificate has expired"),
        ("certificate is not yet valid", "compare the clocks"),
        ("Hostname Verification Check failed", "--tls-server-name"),
        ("CERTIFICATE_VERIFY_FAILED", "not of an authority in --tls-ca"),
        ("WRONG_VERSION_NUMBER", "does not speak TLS"),
        ("WRONG_VERSION_NUMBER", "leave --tls-ca (MUSTER_TLS_CA) out"),
        (f"{FAILED}Socket closed", "set --tls-cert and --tls-key"),
    ],
)
def test_grpcs_tls_error_becomes_a_sentence_with_a_next_step(
    monkeypatch: pytest.MonkeyPatch, details: str, said: str
):
    monkeypatch.setattr(client, "given", lambda: Credentials(ca=Path("ca"), names=NAMES))
    error = client.explain(failed(grpc.StatusCode.UNAVAILABLE, details), "host:1", 1)
    begin, step, end = str(error).partition("\n  next: ")
    assert begin.startswith("the coordinator at host:1 cannot be reached: ")
    assert "last error" not in begin
    assert said in begin + end
    assert step


def test_other_grpc_errors_are_shown_unchanged():
    assert Credentials(ca=Path("ca"), names=NAMES).fault(f"{FAILED}Connection refused") is None
