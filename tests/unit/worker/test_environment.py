"""What a worker may leave to its environment: arguments win, and what is not usable is named."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.client import launchers
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


ALL = (launchers.TORCH, *launchers.OTHERS)
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_JOB_ID": "71"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_JOB_ID": "71"}
"""What a batch script has: it is one process, and no rank."""


def placed(environ: dict[str, str]) -> tuple[int, int]:
    return environment.rank(None, environ), environment.world_size(None, environ)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OPEN_MPI, (1, 2)),
        (PMI, (3, 4)),
        (SLURM, (5, 6)),
        # srun started the daemons of an MPI launcher, and these the ranks.
        (SLURM | PMI, (3, 4)),
        (SLURM | PMI | OPEN_MPI, (1, 2)),
        # torchrun under srun.
        (SLURM | PMI | OPEN_MPI | {"RANK": "7", "WORLD_SIZE": "8"}, (7, 8)),
    ],
)
def test_rank_and_world_size_come_from_the_innermost_launcher(
    environ: dict[str, str], expected: tuple[int, int]
):
    assert placed(environ) == expected
    assert (environment.rank(9, environ), environment.world_size(10, environ)) == (9, 10)


@given(
    st.dictionaries(
        st.sampled_from([name for one in ALL for name in (one.rank, one.world_size)]),
        st.integers(0, 99).map(str),
    )
)
def test_rank_and_world_size_never_come_from_two_launchers(environ: dict[str, str]):
    try:
        found = placed(environ)
    except EnvironmentValueError:
        return
    pairs = [(environ.get(one.rank), environ.get(one.world_size)) for one in ALL]
    assert tuple(map(str, found)) in pairs


@pytest.mark.parametrize(
    ("environ", "missing"),
    [({"RANK": "0"}, "WORLD_SIZE"), ({"WORLD_SIZE": "2"}, "RANK")],
)
def test_half_of_torchs_variables_is_refused_beside_a_whole_launcher(environ: dict[str, str], missing: str):
    with pytest.raises(
        EnvironmentValueError, match=f"{missing} is not set. RANK and WORLD_SIZE come from one"
    ):
        placed(SLURM | environ)


def test_half_of_a_launchers_variables_is_passed_over():
    assert placed(SLURM | {"PMI_RANK": "3", "OMPI_COMM_WORLD_SIZE": ""}) == (5, 6)


@pytest.mark.parametrize("environ", [{}, BATCH])
def test_missing_rank_names_all_variables_that_were_looked_for(environ: dict[str, str]):
    with pytest.raises(EnvironmentValueError) as caught:
        environment.rank(None, environ)
    assert str(caught.value) == (
        "global_rank is not given and RANK is not set. No other launcher says it either; looked for "
        "OMPI_COMM_WORLD_RANK (Open MPI), PMI_RANK (PMI), SLURM_PROCID (Slurm). Pass it, or start the "
        "process by a launcher."
    )


def test_unusable_rank_of_a_launcher_is_named():
    with pytest.raises(EnvironmentValueError, match="SLURM_PROCID = x: it must be a whole number"):
        environment.rank(None, SLURM | {"SLURM_PROCID": "x"})


@pytest.mark.parametrize(
    ("environ", "run"),
    [
        ({"SLURM_JOB_ID": "71"}, "71"),
        ({"SLURM_JOB_ID": "73", "SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "2"}, "71_2"),
        ({"PMIX_NAMESPACE": "prterun-node-9@1"}, "prterun-node-9@1"),
        ({"PMIX_NAMESPACE": "slurm.pmix.71.0", "SLURM_JOB_ID": "71"}, "71"),
        ({"TORCHELASTIC_RUN_ID": "torch", "SLURM_JOB_ID": "71"}, "torch"),
        ({"MUSTER_RUN_ID": "own", "SLURM_JOB_ID": "71"}, "own"),
    ],
)
def test_run_is_named_after_the_launchers_job(environ: dict[str, str], run: str):
    assert environment.run_id(None, environ) == run
    assert environment.run_id("given", environ) == "given"


def test_generation_is_the_restart_count_of_the_slurm_job():
    restarted = SLURM | {"SLURM_RESTART_COUNT": "2"}
    assert environment.generation(None, SLURM) == 0
    assert environment.generation(None, restarted) == 2
    assert environment.generation(None, restarted | {"TORCHELASTIC_RESTART_COUNT": "0"}) == 0
    assert environment.generation(None, restarted | {"MUSTER_ROUND": "7"}) == 7
    # Several jobs may follow one another under such a name, and each begins to count at 0.
    assert environment.generation(None, restarted | {"MUSTER_RUN_ID": "own"}) == 0
    assert environment.generation(None, restarted, given_run_id="own") == 0
    assert environment.generation(None, restarted, given_run_id="71") == 2


def test_log_says_once_where_the_rank_comes_from(caplog: pytest.LogCaptureFixture):
    environ = {"SLURM_PROCID": "12345", "SLURM_STEP_NUM_TASKS": "23456"}
    with caplog.at_level(logging.INFO, "muster.worker.environment"):
        for _ in range(2):
            placed(environ)
            placed({"RANK": "0", "WORLD_SIZE": "1"})
    assert [record.getMessage() for record in caplog.records] == [
        "this is rank 12345 of 23456, as Slurm says (SLURM_PROCID, SLURM_STEP_NUM_TASKS)"
    ]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("110", 110),
        ("86400", 86_400),
        ("86401", None),
        ("0", None),
        ("", None),
        ("-1", None),
        ("9" * 30, None),
    ],
)
def test_shutdown_timeout_is_known_only_below_torchrun(value: str, seconds: int | None):
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": value}
    assert environment.shutdown_timeout(environ) is None
    assert environment.shutdown_timeout(environ | {"TORCHELASTIC_RUN_ID": "job"}) == seconds


PRELOADING = {"PYTHON_EXEC": "/opt/bin/muster-python"}


@pytest.mark.parametrize(
    ("environ", "modules"),
    [
        ({}, ()),
        ({"PYTHON_EXEC": "python"}, ()),
        ({"MUSTER_PRELOAD": "torch"}, ()),
        (PRELOADING, environment.DEFAULT_PRELOAD),
        (PRELOADING | {"MUSTER_PRELOAD": ""}, environment.DEFAULT_PRELOAD),
        (PRELOADING | {"MUSTER_PRELOAD": "torch, my_job.model"}, ("torch", "my_job.model")),
    ],
)
def test_modules_are_preloaded_for_muster_python_alone(environ: dict[str, str], modules: tuple[str, ...]):
    assert environment.preloaded_modules(environ) == modules


@pytest.mark.parametrize("value", [",", "torch,", "torch;numpy", "torch..distributed", "./train.py", "a b"])
def test_other_than_names_of_modules_are_refused(value: str):
    with pytest.raises(EnvironmentValueError, match="is not the name of a module"):
        environment.preloaded_modules(PRELOADING | {"MUSTER_PRELOAD": value})
