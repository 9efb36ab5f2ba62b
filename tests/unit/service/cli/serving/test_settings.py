"""Settings by flag, environment, file and default, and what is said of a file that is wrong."""

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from muster.service.cli.main import app
from muster.service.cli.serving.serve import serve
from muster.service.core.vocabulary.limits import Limits
from muster.service.security.config import Security, TrafficLimits


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LISTEN", "HTTP", "STATE", "SESSION_TTL", "LOG_FORMAT", "CONFIG"):
        monkeypatch.delenv(f"MUSTER_{name}", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "muster.toml"


def run(*arguments: str, command: str = "config", **environment: str) -> Result:
    return CliRunner().invoke(app, [command, *arguments], env=environment)


def shown(*arguments: str, **environment: str) -> dict[str, tuple[object, str]]:
    """By setting: its value and its source."""
    done = run("-o", "json", *arguments, **environment)
    assert (done.exit_code, done.stderr) == (0, "")
    return {name: (one["value"], one["from"]) for name, one in json.loads(done.stdout).items()}


def test_a_flag_wins_over_the_environment_that_over_the_file_and_that_over_the_default(file: Path):
    file.write_text("max_runs = 1\nmax_sessions = 1\nmax_groups_per_run = 1\n")
    given = shown(
        f"--config={file}",
        "--max-runs=3",
        MUSTER_SERVE_MAX_RUNS="2",
        MUSTER_SERVE_MAX_SESSIONS="2",
    )
    assert given["max_runs"] == (3, "flag --max-runs")
    assert given["max_sessions"] == (2, "environment MUSTER_SERVE_MAX_SESSIONS")
    assert given["max_groups_per_run"] == (1, f"file {file}")
    assert given["max_store_keys"] == (262_144, "default")


def test_the_older_names_in_the_environment_stay_and_the_newer_ones_are_there_for_all(file: Path):
    file.write_text('listen = "127.0.0.1:1"')
    given = shown(
        MUSTER_LISTEN="127.0.0.1:2",
        MUSTER_SERVE_LISTEN="127.0.0.1:3",
        MUSTER_SERVE_HTTP="127.0.0.1:4",
        MUSTER_CONFIG=str(file),
    )
    assert given["listen"] == ("127.0.0.1:2", "environment MUSTER_LISTEN")
    assert given["http"] == ("127.0.0.1:4", "environment MUSTER_SERVE_HTTP")


def test_every_option_of_serve_is_a_setting_and_nothing_else_is():
    names = {line.split()[0] for line in run(COLUMNS="200").stdout.splitlines()[1:]}
    helped = run("--help", command="serve", COLUMNS="200").stdout.split()
    flags = {word.removeprefix("--").replace("-", "_") for word in helped if word.startswith("--")}
    assert names <= flags
    assert flags - names <= {"config", "help"} | {flag for flag in flags if flag.startswith("no_")}


def test_the_table_says_where_each_value_comes_from(file: Path):
    file.write_text('log_format = "json"\nkeep_idle_runs = 0\n')
    lines = [line.split(maxsplit=2) for line in run(f"--config={file}").stdout.splitlines()]
    assert lines[0] == ["SETTING", "VALUE", "FROM"]
    assert ["log_format", "json", f"file {file}"] in lines
    assert ["keep_idle_runs", "0.0", f"file {file}"] in lines
    assert ["listen", "127.0.0.1:7550", "default"] in lines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_runz = 5", ["max_runz is no setting. Did you mean max_runs?"]),
        ("max-runs = 5", ["max-runs is no setting. Did you mean max_runs"]),
        ("tea = true", ["tea is no setting. See: muster config"]),
        ("config = 'x'", ["config is no setting"]),
        ("output = 'json'", ["output is no setting"]),
        ("[limits]\nmax_runs = 5", ["limits is no setting"]),
        ("max_runs = 0", ["max_runs = 0: Input should be greater than or equal to 1"]),
        ("max_runs = 'many'", ['max_runs = "many": Input should be a valid integer']),
        ("max_runs = true", ["max_runs = true: it must be a number or a text"]),
        ("max_runs = [1]", ["max_runs = [1]: it must be a number or a text"]),
        ("max_runs = {a = 1}", ["max_runs = {'a': 1}: it must be a number"]),
        ("log_format = 'xml'", ['log_format = "xml": ', "console"]),
        ("session_ttl = inf", ["session_ttl = inf: inf is not a number of seconds"]),
        ("drain_grace = inf", ["drain_grace = inf: inf is not a number of seconds"]),
        ("keep_idle_runs = inf", ["keep_idle_runs = inf: inf is not a number of seconds"]),
        ("state = ''", ['state = "": ', "names no storage"]),
        ("state = 'muster.db'", ['state = "muster.db": ', "names no storage"]),
        ("listen = 7550", ["listen = 7550: ", '"7550" is not HOST:PORT']),
        ("max_runs = ", ["is not TOML"]),
        ("a = 1\na = 2", ["is not TOML"]),
    ],
)
@pytest.mark.parametrize("command", ["serve", "config"])
def test_a_file_that_is_wrong_is_named_with_the_key_and_what_was_meant(
    file: Path, text: str, words: list[str], command: str
):
    file.write_text(text)
    done = run(f"--config={file}", command=command, COLUMNS="400")
    assert (done.exit_code, done.stdout) == (2, "")
    said = " ".join(done.stderr.replace("│", " ").split())
    for word in [str(file), *words]:
        assert word in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http_tls = true", "--http-tls needs a certificate"),
        ("http_tokens = true", "--http-tokens needs tokens"),
        ("tls_cert = 'cert.pem'", "give both --tls-cert and --tls-key"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_both_commands_in_the_same_words(
    file: Path, text: str, words: str
):
    file.write_text(text)
    checked, served = (run(f"--config={file}", command=command) for command in ("config", "serve"))
    assert words in checked.stderr
    assert (checked.exit_code, checked.stdout, checked.stderr) == (2, "", served.stderr)
    assert served.exit_code == 2


def test_port_that_is_open_to_strangers_is_refused_as_by_serve(file: Path):
    file.write_text("http = '0.0.0.0:0'")
    result = run(f"--config={file}", command="config")
    assert "--http 0.0.0.0:0 is reachable from other machines" in result.stderr
    assert (result.exit_code, result.stdout) == (1, "")
    file.write_text("http = '0.0.0.0:0'\ninsecure = true")
    assert run(f"--config={file}", command="config").exit_code == 0


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    done = run(f"--config={tmp_path / 'none.toml'}", COLUMNS="400")
    assert done.exit_code == 2
    assert "none.toml cannot be read: No such file or directory." in done.stderr
    assert run(f"--config={tmp_path}", COLUMNS="400").exit_code == 2


def test_a_bad_value_in_the_environment_names_the_setting():
    done = run(MUSTER_SERVE_MAX_RUNS="many", COLUMNS="400")
    assert done.exit_code == 2
    assert "Invalid value for '--max-runs'" in done.stderr


def test_every_bound_among_the_options_is_a_field_that_it_fills():
    """They are matched by name, so that one with a slip would be taken and mean nothing."""
    options = {name for name in inspect.signature(serve).parameters if name.startswith("max_")}
    assert options
    assert options <= {field.name for kind in (Limits, TrafficLimits, Security) for field in fields(kind)}
