import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from muster.service import core
from muster.service.cli.failure import Exit
from muster.service.cli.main import app
from muster.service.security.config import TrafficLimits


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_top_refuses_a_stdout_that_is_not_a_terminal():
    result = invoke("top")
    assert result.exit_code == Exit.USAGE
    assert "stdout is not one" in result.stderr
    assert "muster get barriers --watch" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("get", "runs", "--output=yaml"),
        ("get", "runs", "--timeout=nan"),
        ("get", "barriers", "--timeout=inf"),
        ("get", "barriers", "--history=0"),
        ("get", "members"),
        ("get", "members", "job1", "--interval=0"),
        ("get", "members", "job\udcff"),
        ("describe", "member", "job1", "-1"),
        ("describe", "barrier", "job1", "checkpoint", str(2**64)),
        ("abort", "job1"),
        ("abort", "job1", "checkpoint", "--sequence=-1"),
        ("abort", "job1", "checkpoint", "--reason=\udcff"),
        ("get", "rounds"),
        ("get", "rounds", "job1", "--interval=0"),
        ("close",),
        ("close", "job1", "--reason=\udcff"),
        ("evict", "job1"),
        ("evict", "job1", "-1"),
        ("evict", "job1", str(2**31)),
        ("evict", "job1", "three"),
        ("forget",),
        ("stack",),
        ("stack", "job1", "three"),
        ("stack", "job1", "--missing=\udcff"),
        ("stack", "job1", "--missing="),
        ("stack", "job1", "--interval=1"),
    ],
)
def test_invalid_arguments_are_a_usage_error(arguments):
    result = invoke(*arguments)
    assert result.exit_code == Exit.USAGE
    assert "Error: " in result.stderr
    assert result.stdout == ""


def test_every_limit_that_a_refusal_says_to_raise_is_an_option_of_serve():
    source = "".join(module.read_text() for module in Path(*core.__path__).rglob("*.py"))
    limits = set(re.findall(r'limit_exceeded\(\s*"(\w+)"', source))
    assert limits >= {"max_runs", "max_relayed_processes", "max_groups_per_run", "max_unheard_decisions"}
    shown = invoke("serve", "--help").stdout
    assert [name for name in limits if f"--{name.replace('_', '-')} " not in shown] == []


def test_the_client_commands_do_not_load_the_server():
    heavy = ["aiohttp", "uvloop", "structlog", "sqlite3", "prometheus_client", "torch", "rich.live"]
    program = f"import sys, muster.service.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def commands(group, *path):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


def test_every_command_that_connects_takes_token_and_certificates():
    security = {"--token-file", "--tls-ca", "--tls-cert", "--tls-key", "--tls-server-name"}
    lacking = {}
    for path, command in commands(typer.main.get_command(app)):
        options = {option for parameter in command.params for option in parameter.opts}
        if "--endpoint" in options and not security <= options:
            lacking[path] = security - options
    assert lacking == {}


def test_the_bounds_of_peers_are_options_of_serve():
    shown = invoke("serve", "--help").stdout
    for field in dataclasses.fields(TrafficLimits):
        assert f"--{field.name.replace('_', '-')} " in shown
