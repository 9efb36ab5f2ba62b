"""How ``muster watch`` is told what to do, and what it says where it cannot."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muster.service.app import watcher as app_watcher
from muster.service.app.watcher import WatcherSettings
from muster.service.cli.failure import Exit
from muster.service.cli.main import app
from muster.service.cli.serving.watch import SourceName
from muster.watcher.sources.registry import SOURCES
from tests.unit.service.cli.serving.recording import recorded
from tests.unit.service.cli.test_main import invoke

GOOD = ("watch", "--source=kubernetes", "--endpoint=muster:7550")


@pytest.fixture
def started_with(monkeypatch: pytest.MonkeyPatch) -> list[WatcherSettings]:
    """The settings of the watchers that were started."""
    return recorded(monkeypatch, app_watcher, "run_watcher")


def test_each_source_of_the_registry_can_be_named():
    assert {one.value for one in SourceName} == set(SOURCES)


def test_watch_options_reach_the_watcher_settings(started_with: list[WatcherSettings]):
    result = invoke(
        *("watch", "--source", "kubernetes", "--source", "aws", "--source", "aws", "-e", "a:1, b:1,a:1"),
        *("--node", "node-7", "--http", "127.0.0.1:9", "--namespace", "team-a", "--namespace", "team-b"),
        *("--pod-selector", "app=train", "--cordon", "stop", "--taint", "example.org/leaving"),
        *("--kubeconfig", "/etc/k", "--metadata-url", "http://127.0.0.1:1", "--evictions"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    (settings,) = started_with
    options = settings.options
    assert (settings.endpoint, settings.sources) == ("a:1,b:1", ["kubernetes", "aws"])
    assert (settings.evictions, settings.annotate) == (True, False)
    assert str(settings.http) == "127.0.0.1:9"
    assert (options.node_name, options.namespaces) == ("node-7", ["team-a", "team-b"])
    assert (options.pod_selector, options.cordon, options.taints) == (
        "app=train",
        "stop",
        ("example.org/leaving",),
    )
    assert (options.kubeconfig, options.metadata_url) == ("/etc/k", "http://127.0.0.1:1")


def test_the_environment_is_asked_too(started_with: list[WatcherSettings]):
    environment = {
        "MUSTER_WATCH_SOURCE": "kubernetes aws",
        "MUSTER_ENDPOINT": "a:1",
        "MUSTER_NODE_NAME": "node-7",
        "MUSTER_WATCH_NAMESPACE": "team-a team-b",
    }
    assert CliRunner().invoke(app, ["watch"], env=environment).exit_code == 0
    (settings,) = started_with
    assert (settings.endpoint, settings.sources) == ("a:1", ["kubernetes", "aws"])
    assert (settings.options.node_name, settings.options.namespaces) == ("node-7", ["team-a", "team-b"])
    assert (settings.options.cordon, settings.http) == ("save", None)


def test_node_has_the_name_that_its_scheduler_gives_it(started_with: list[WatcherSettings]):
    environment = {"MUSTER_NODE_NAME": "", "SLURMD_NODENAME": "slurm"}
    assert CliRunner().invoke(app, [*GOOD], env=environment).exit_code == 0
    assert CliRunner().invoke(app, [*GOOD, "--node=mine"], env=environment).exit_code == 0
    assert [settings.options.node_name for settings in started_with] == ["slurm", "mine"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("watch", "--source=kubernetes"), "endpoint"),
        (("watch", "--endpoint=a:1"), "source"),
        (("watch", "--source=heroku", "--endpoint=a:1"), "heroku"),
        ((*GOOD, "--endpoint=a"), "host:port"),
        ((*GOOD, "--http=9"), "HOST:PORT"),
        ((*GOOD, "--cordon=panic"), "panic"),
        ((*GOOD, "--annotate"), "--annotate needs the namespaces"),
        ((*GOOD, "--evictions"), "--evictions needs the namespaces"),
        (
            ("watch", "--source=aws", "--endpoint=a:1", "--evictions", "--namespace=a"),
            "--evictions needs --source kubernetes",
        ),
    ],
)
def test_invalid_watch_options_are_refused(
    started_with: list[WatcherSettings], arguments: tuple[str, ...], words: str
):
    result = invoke(*arguments)
    assert result.exit_code == Exit.USAGE
    assert words in result.stderr
    assert not started_with


def test_token_that_cannot_be_read_is_named(started_with: list[WatcherSettings], tmp_path: Path):
    result = invoke(*GOOD, f"--token-file={tmp_path / 'none'}")
    assert result.exit_code == Exit.USAGE
    assert "--token-file" in result.stderr
    assert not started_with
    (tmp_path / "token").write_text("secret")
    assert invoke(*GOOD, f"--token-file={tmp_path / 'token'}").exit_code == 0
    assert started_with[0].credentials.token_file == tmp_path / "token"


def test_missing_library_is_named():
    program = (
        "import sys; sys.modules['kubernetes_asyncio'] = None\n"
        "from muster.service.cli.script import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *GOOD], capture_output=True, text=True, check=False, timeout=100
    )
    assert result.returncode == Exit.FAILED
    assert "kubernetes_asyncio, which is not installed" in result.stderr
    assert "muster-coordinator[service,watch]" in result.stderr
    assert "Traceback" not in result.stderr


def test_neither_torch_nor_the_sdk_is_imported():
    program = (
        "import sys, muster.service.app.watcher, muster.watcher.sources.kubernetes\n"
        "print([name for name in sys.modules if name == 'torch' or name.startswith('muster.worker')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert result.stdout.strip() == "[]"
