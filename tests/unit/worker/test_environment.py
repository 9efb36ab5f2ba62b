"""What a worker may leave to its environment: arguments win, and what is not usable is named."""

import socket
from collections.abc import Callable
from typing import Any

import pytest

from muster.worker import environment
from muster.worker.environment import EnvironmentValueError

NUMBERS: list[tuple[Callable[..., int], str, list[str]]] = [
    (environment.generation, "generation", ["MUSTER_ROUND", "TORCHELASTIC_RESTART_COUNT"]),
    (environment.rank, "global_rank", ["RANK"]),
    (environment.world_size, "global_world_size", ["WORLD_SIZE"]),
]
CASES = [
    (environment.endpoint, "a:1", "b:2", ["MUSTER_ENDPOINT"]),
    (environment.run_id, "a", "b", ["MUSTER_RUN_ID", "TORCHELASTIC_RUN_ID"]),
    *((function, 1, "2", variables) for function, _, variables in NUMBERS),
]


@pytest.mark.parametrize(("function", "given", "_text", "variables"), CASES)
def test_argument_wins_over_the_environment(
    function: Callable[..., Any], given: Any, _text: str, variables: list[str]
):
    assert function(given, dict.fromkeys(variables, "not even valid")) == given


@pytest.mark.parametrize(("function", "_given", "text", "variables"), CASES)
def test_variables_count_in_their_order(
    function: Callable[..., Any], _given: Any, text: str, variables: list[str]
):
    for position, variable in enumerate(variables):
        environ = {variable: text} | dict.fromkeys(variables[position + 1 :], "3:3" if ":" in text else "3")
        assert str(function(None, environ)) == text
        # An empty variable is as good as none.
        environ = dict.fromkeys(variables[:position], "") | {variable: text}
        assert str(function(None, environ)) == text


def test_default_counts_last():
    assert environment.run_id(None, {}) == "default"
    assert environment.run_id("", {}) == "default"
    assert environment.generation(None, {}) == 0


def test_zero_is_a_valid_rank_and_generation():
    assert environment.rank(0, {"RANK": "5"}) == 0
    assert environment.generation(0, {"MUSTER_ROUND": "5"}) == 0
    assert environment.generation(None, {"MUSTER_ROUND": "0", "TORCHELASTIC_RESTART_COUNT": "5"}) == 0


def test_environment_defaults_to_the_process_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_ENDPOINT", "muster.example:7550")
    monkeypatch.setenv("RANK", "3")
    assert environment.endpoint(None) == "muster.example:7550"
    assert environment.rank(None) == 3


@pytest.mark.parametrize("function", [environment.rank, environment.world_size, environment.endpoint])
def test_value_without_a_default_is_required(function: Callable[..., Any]):
    with pytest.raises(EnvironmentValueError, match=r"MUSTER_ENDPOINT|RANK is not set|WORLD_SIZE is not set"):
        function(None, {})


@pytest.mark.parametrize("value", ["-1", "1.5", "x", " 3", "1e3", "³", "٣", "+2", "0x1", "2147483648"])
@pytest.mark.parametrize(("function", "name", "variables"), NUMBERS)
def test_unusable_number_is_named_with_its_variable(
    function: Callable[..., int], name: str, variables: list[str], value: str
):
    for variable in variables:
        with pytest.raises(EnvironmentValueError) as caught:
            function(None, {variable: value})
        assert str(caught.value) == f"{variable} = {value}: it must be a whole number from 0 to 2147483647."
    with pytest.raises(EnvironmentValueError) as caught:
        function(value, {})
    assert str(caught.value).startswith(f"{name} = {value}")


@pytest.mark.parametrize(
    "value", ["host", "host:", ":7550", "host:x", "host:0", "host:65536", "host:-1", "host:²", "host:7550/x"]
)
def test_unusable_endpoint_is_named(value: str):
    given: list[tuple[str | None, dict[str, str]]] = [(value, {}), (None, {"MUSTER_ENDPOINT": value})]
    for argument, environ in given:
        with pytest.raises(EnvironmentValueError) as caught:
            environment.endpoint(argument, environ)
        assert f'"{value}" is not host:port, such as muster.example:7550' in str(caught.value)


@pytest.mark.parametrize("value", ["host:1", "10.0.0.1:65535", "[::1]:7550", "a.b.c:80"])
def test_endpoint_is_not_changed(value: str):
    assert environment.endpoint(value, {}) == value


def test_endpoint_may_name_several_addresses():
    assert environment.endpoint("unix:///r, a:1", {}) == "unix:///r,a:1"
    assert environment.endpoint("a:1,b:2,[::1]:3", {}) == "a:1,b:2,[::1]:3"
    assert environment.endpoint(None, {"MUSTER_ENDPOINT": " a:1, b:2 ,a:1"}) == "a:1,b:2"


@pytest.mark.parametrize(("value", "bad"), [("a:1,b", "b"), ("a:1,", ""), (",", ""), ("a:1,b:x,c:1", "b:x")])
def test_unusable_part_of_an_endpoint_is_named(value: str, bad: str):
    with pytest.raises(EnvironmentValueError) as caught:
        environment.endpoint(value, {})
    assert f'endpoint "{value}": "{bad}" is not host:port' in str(caught.value)
    assert "Several have commas between." in str(caught.value)


def test_machine_without_a_name_has_a_placeholder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-0")
    assert environment.host() == "node-0"
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    assert environment.host() == "unknown host"


def test_error_is_a_value_error():
    assert issubclass(EnvironmentValueError, ValueError)


@pytest.mark.parametrize(
    ("environ", "rank"), [({}, None), ({"GROUP_RANK": ""}, None), ({"GROUP_RANK": "0"}, 0)]
)
def test_node_rank_is_torchruns(environ: dict[str, str], rank: int | None):
    assert environment.node_rank(environ) == rank


@pytest.mark.parametrize("value", ["-1", "x", "1.5"])
def test_unusable_node_rank_is_named(value: str):
    with pytest.raises(EnvironmentValueError, match=f"GROUP_RANK = {value}"):
        environment.node_rank({"GROUP_RANK": value})
