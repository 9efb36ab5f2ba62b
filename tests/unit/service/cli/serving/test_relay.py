"""How ``muster relay`` is told what to do, and what it says where it cannot."""

import socket
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muster.relay.server import SOCKET_MODE
from muster.service.app import relay as app_relay
from muster.service.app.relay import RelaySettings
from muster.service.cli.failure import Exit
from muster.service.cli.main import app
from muster.service.telemetry import logs
from tests.unit.service.cli.serving.recording import recorded
from tests.unit.service.cli.test_main import invoke

GOOD = ("relay", "--listen=127.0.0.1:7551", "--upstream=muster:7550")


@pytest.fixture
def started_with(monkeypatch: pytest.MonkeyPatch) -> list[RelaySettings]:
    """The settings of the relays that were started."""
    return recorded(monkeypatch, app_relay, "run_relay")


def test_relay_options_reach_the_relay_settings(started_with: list[RelaySettings], tmp_path: Path):
    result = invoke(
        *("relay", "--listen", "unix:///run/muster/relay.sock", "--upstream", "a:1, unix:///run/up.sock,a:1"),
        *("--http", "127.0.0.1:9", "--fold-window-ms", "3.5", "--socket-mode", "660"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    (settings,) = started_with
    assert settings.listen.path == Path("/run/muster/relay.sock")
    assert settings.upstream == "a:1,unix:///run/up.sock"
    assert str(settings.http) == "127.0.0.1:9"
    assert (settings.fold_window, settings.socket_mode, settings.insecure) == (0.0035, 0o660, False)


def test_the_environment_is_asked_too(started_with: list[RelaySettings]):
    environment = {"MUSTER_RELAY_LISTEN": "127.0.0.1:1", "MUSTER_ENDPOINT": "a:1"}
    assert CliRunner().invoke(app, ["relay"], env=environment).exit_code == 0
    environment["MUSTER_RELAY_UPSTREAM"] = "b:1"
    assert CliRunner().invoke(app, ["relay"], env=environment).exit_code == 0
    assert [settings.upstream for settings in started_with] == ["a:1", "b:1"]
    assert started_with[0].http is None
    assert started_with[0].socket_mode == SOCKET_MODE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("relay", "--listen=127.0.0.1:1"), "upstream"),
        (("relay", "--upstream=a:1"), "listen"),
        (("relay", "--listen=here", "--upstream=a:1"), "here"),
        (("relay", "--listen=unix://here", "--upstream=a:1"), "here"),
        (("relay", f"--listen=unix:///{'x' * 107}", "--upstream=a:1"), "108 bytes"),
        (("relay", "--listen=a:1,b:1", "--upstream=a:1"), "more than one place"),
        ((*GOOD, "--upstream="), "is not host:port"),
        ((*GOOD, "--upstream=a"), '"a" is not host:port'),
        ((*GOOD, "--upstream=a:1,,b:1"), "is not host:port"),
        ((*GOOD, "--upstream=a:0"), "is not host:port"),
        ((*GOOD, "--http=here"), "here"),
        ((*GOOD, "--fold-window-ms=-1"), "fold-window-ms"),
        ((*GOOD, "--fold-window-ms=1001"), "fold-window-ms"),
        ((*GOOD, "--socket-mode=888"), "not a file mode"),
        ((*GOOD, "--socket-mode=1777"), "not a file mode"),
        ((*GOOD, "--socket-mode=66"), "not a file mode"),
        ((*GOOD, "--socket-mode=rw"), "not a file mode"),
        ((*GOOD, "--socket-mode=٦٦٠"), "not a file mode"),
        ((*GOOD, "--tls-cert=c"), "key"),
        (("relay", "--listen=unix:///s", "--upstream=a:1", "--tokens-file=t"), "guarded by its file's"),
        (
            ("relay", "--listen=unix:///s", "--upstream=a:1", "--tls-cert=c", "--tls-key=k"),
            "guarded by its file's",
        ),
    ],
)
def test_invalid_options_of_a_relay_are_a_usage_error(
    started_with: list[RelaySettings], arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MUSTER_ENDPOINT", raising=False)
    result = invoke(*arguments)
    said = " ".join(result.stderr.replace("│", " ").split())
    assert (result.exit_code, started_with) == (Exit.USAGE, [])
    assert words in said
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--listen=0.0.0.0:0",), "is not host:port"),
        (("--listen=0.0.0.0:1",), "reachable from other machines"),
        (("--listen=[::]:1",), "--insecure"),
        (("--listen=127.0.0.1:1", "--tokens-file=/nowhere"), "/nowhere"),
        (("--listen=127.0.0.1:1", "--tls-cert=/nowhere", "--tls-key=/nowhere"), "/nowhere"),
        (("--listen=unix:///proc/nowhere/relay.sock",), "/proc/nowhere"),
        (("--listen=unix:///proc/self/status/relay.sock",), "is no folder"),
    ],
)
def test_where_it_cannot_begin_it_says_why(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logs, "configure", lambda _: None)
    result = invoke("relay", "--upstream=a:1", *arguments)
    assert result.exit_code != 0
    assert "Traceback" not in result.stderr
    assert words in " ".join(result.stderr.split())


def test_a_port_in_use_is_named_and_no_socket_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "configure", lambda _: None)
    with tempfile.TemporaryDirectory(prefix="m-") as folder, socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        for ports in ([f"--listen={taken}"], [f"--listen=unix://{folder}/s", f"--http={taken}"]):
            result = invoke("relay", "--upstream=a:1", *ports)
            assert result.exit_code == Exit.FAILED
            assert taken in result.stderr
            assert list(Path(folder).iterdir()) == []
