"""What launchers and the fork server tell each other, and which workers can be forked."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.preload.messages import (
    PER_WORKER,
    Command,
    Ended,
    ProcessContext,
    Refused,
    Started,
    StartRequest,
    decode_reply,
    encode_reply,
)

SERVER = ProcessContext("/usr/bin/python", "/usr", "/job", (0, 1), {"OMP_NUM_THREADS": "1", "RANK": "0"})


def test_equal_contexts_do_not_differ():
    assert SERVER.difference(replace(SERVER)) is None


@pytest.mark.parametrize("name", sorted(PER_WORKER))
def test_variables_of_one_worker_may_differ(name: str):
    assert SERVER.difference(replace(SERVER, environment={**SERVER.environment, name: "other"})) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefix": "/venv"}, "its Python is that of /venv, and the fork server's is that of /usr"),
        (
            {"executable": "/bin/python"},
            "its Python is /bin/python, and the fork server's is /usr/bin/python",
        ),
        ({"folder": "/other"}, "it starts in /other, and the fork server in /job"),
        ({"cpus": (0,)}, "it is bound to other processor cores than the fork server"),
        ({"environment": {"OMP_NUM_THREADS": "2"}}, "differs from the fork server's in OMP_NUM_THREADS"),
        ({"environment": {}}, "differs from the fork server's in OMP_NUM_THREADS"),
        (
            {"environment": {"OMP_NUM_THREADS": "1", "LD_PRELOAD": "a", "B": ""}},
            "differs from the fork server's in B, LD_PRELOAD",
        ),
    ],
)
def test_other_differences_are_named(change: dict[str, Any], said: str):
    found = SERVER.difference(replace(SERVER, **change))
    assert found is not None
    assert found.endswith(said)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["-u", "train.py"], Command("train.py", False, ())),
        (["-u", "train.py", "-m", "4"], Command("train.py", False, ("-m", "4"))),
        (["-u", "-m", "job.train", "--lr", "1"], Command("job.train", True, ("--lr", "1"))),
        ([], None),
        (["-u"], None),
        (["-u", ""], None),
        (["train.py"], None),
        (["-u", "-c", "pass"], None),
        (["-u", "-"], None),
        (["-u", "-m"], None),
        (["-u", "-m", "-c"], None),
        (["-u", "-X", "dev", "train.py"], None),
    ],
)
def test_command_is_a_script_or_a_module(arguments: list[str], command: Command | None):
    assert Command.parse(arguments) == command


@given(
    st.lists(st.text()),
    st.dictionaries(st.text(), st.text() | st.just("\udcff")),
    st.lists(st.integers(0, 1024)),
)
def test_request_is_the_same_after_decoding(command: list[str], environment: dict[str, str], cpus: list[int]):
    request = StartRequest(
        tuple(command), ProcessContext("python", "/venv", "/job", tuple(cpus), environment)
    )
    assert StartRequest.decode(request.encode()) == request


@pytest.mark.parametrize("reply", [Started(7), Refused("it differs"), Ended(9)])
def test_reply_is_the_same_after_decoding(reply: Started | Refused | Ended):
    assert decode_reply(encode_reply(reply)) == reply


CONTEXT = {"executable": "python", "prefix": "/venv", "folder": "/job", "cpus": [0], "environment": {}}


def encoded(**changes: object) -> bytes:
    return json.dumps({"command": ["-u", "a.py"], "context": CONTEXT, **changes}).encode()


def test_unchanged_request_is_decoded():
    assert StartRequest.decode(encoded()).command == ("-u", "a.py")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b"{}",
        encoded(command=1),
        encoded(command=[1]),
        encoded(context=None),
        encoded(context={}),
        encoded(context={**CONTEXT, "environment": 5}),
        encoded(context={**CONTEXT, "environment": {"RANK": 1}}),
        encoded(context={**CONTEXT, "cpus": 1}),
    ],
)
def test_other_messages_are_no_requests(message: bytes):
    with pytest.raises(ValueError, match=r"."):
        StartRequest.decode(message)
