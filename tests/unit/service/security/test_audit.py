"""The audit log: its entries, and what becomes of too many of them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from lab.patience import until
from muster.service.rpc.server import METHODS
from muster.service.security import access, audit
from muster.service.security.audit import MAX_TEXT, MAX_UNKNOWN, WINDOW, AuditedCall, AuditFile, Bounded
from muster.service.security.files import FileError
from muster.service.security.grants import Grant, Role
from muster.v1 import run_pb2, store_pb2

ANN = Grant(name="ann", role=Role.OPERATOR, digest=b"")


def call(written: list[Any], *, changes: bool = True, lasts: bool = False) -> AuditedCall:
    return AuditedCall(
        written.append, "/muster.v1.RunService/Evict", changes=changes, lasts=lasts, address="ipv4:10.0.0.7:1"
    )


def test_entry_of_a_change_names_caller_call_run_address_and_result():
    written: list[Any] = []
    made = call(written)
    made.grant = ANN
    made.ask(run_pb2.EvictRequest(run_id="job1", rank=3, reason="bad disk"))
    made.answer()
    made.end("OK")
    assert written == [
        {
            "who": "ann",
            "role": "operator",
            "from": "ipv4:10.0.0.7:1",
            "call": "/muster.v1.RunService/Evict",
            "run": "job1",
            "rank": 3,
            "reason": "bad disk",
            "dry_run": False,
            "result": "OK",
        }
    ]


@pytest.mark.parametrize("lasts", [False, True])
def test_entry_shows_the_begin_of_a_run_id_that_is_too_long(lasts: bool):
    written: list[Any] = []
    made = call(written, lasts=lasts)
    made.ask(run_pb2.EvictRequest(run_id="x" * 1_000_000))
    made.refuse("INVALID_ARGUMENT", "too long")
    made.open("x" * 1_000_000)
    assert {one["run"] for one in written} == {"x" * MAX_TEXT}


def test_call_that_changes_nothing_is_written_only_if_it_is_refused():
    written: list[Any] = []
    made = call(written, changes=False)
    made.ask(run_pb2.RunServiceGetRequest(run_id="job1"))
    made.end("OK")
    assert written == []
    made.refuse("RUN_NOT_ALLOWED", "not for job1")
    assert [(one["run"], one["result"], one["message"]) for one in written] == [
        ("job1", "RUN_NOT_ALLOWED", "not for job1")
    ]


def test_each_operation_of_a_stream_has_an_entry_without_its_value():
    written: list[Any] = []
    made = call(written)
    for key in ("a", "b"):
        entries = [store_pb2.KeyValue(key=key, value=b"secret")]
        change = store_pb2.SetRequest(run_id="job1", entries=entries)
        made.ask(store_pb2.OperateRequest(set=change))
        if key == "a":
            made.answer()
    made.refuse("LIMIT_EXCEEDED", "too many keys")
    assert [(one["operation"], one["keys"], one["result"]) for one in written] == [
        ("set", ["a"], "OK"),
        ("set", ["b"], "LIMIT_EXCEEDED"),
    ]
    assert "secret" not in str(written)


def test_call_that_lasts_has_an_entry_when_it_begins():
    written: list[Any] = []
    made = call(written, lasts=True)
    made.ask(run_pb2.EvictRequest(run_id="job1"))
    made.answer()
    made.end("CANCELLED")
    assert [(one["run"], one["result"]) for one in written] == [("job1", "OPEN"), ("job1", "CANCELLED")]


def test_methods_that_change_something_are_all_but_those_that_read():
    reads = {method for method in METHODS if not access.changes(method)}
    assert {method.rpartition("/")[2] for method in reads} == {
        *("Status", "Replicas", "List", "Get", "Members", "Watch", "Stacks"),
        *("Wait", "Check", "ListKeys", "NumKeys"),
    }
    assert access.changes("/muster.v1.RunService/OfALaterVersion")


def test_refusals_of_unknown_callers_are_bounded_and_counted():
    """Anyone who reaches a port could fill the disk with entries."""
    now = 0.0
    written: list[Any] = []
    bounded = Bounded(written.append, lambda: now)
    for _ in range(MAX_UNKNOWN + 5):
        bounded.write({"who": "", "result": "TOKEN_MISSING"})
    assert len(written) == MAX_UNKNOWN
    bounded.write({"who": "ann", "result": "RUN_NOT_ALLOWED"})
    bounded.write({"who": "", "result": "OK"})
    assert [one.get("left_out") for one in written[MAX_UNKNOWN:]] == [5, None]
    now = WINDOW
    bounded.write({"who": "", "result": "TOKEN_MISSING"})
    assert len(written) == MAX_UNKNOWN + 3


def test_file_may_be_renamed_and_is_its_owners(tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    file = AuditFile(path)
    assert path.stat().st_mode & 0o777 == 0o600
    file.write({"who": "ann"})
    until(path.read_text)
    path.rename(tmp_path / "audit.1")
    file.write({"who": "bob\n"})
    until(lambda: path.exists() and path.read_text())
    file.close()
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["who"] == "bob\n"
    assert json.loads((tmp_path / "audit.1").read_text())["time"].endswith("+00:00")


def test_entries_that_cannot_be_written_are_counted(tmp_path: Path):
    path = tmp_path / "folder" / "audit.jsonl"
    path.parent.mkdir()
    file = AuditFile(path)
    path.unlink()
    path.parent.rmdir()
    with capture_logs() as logged:
        for _ in range(3):
            file.write({"who": "ann"})
        until(lambda: file._lost == 3)
    assert [line["event"] for line in logged] == ["audit.lost"]
    path.parent.mkdir()
    file.write({"who": "bob"})
    until(path.exists)
    file.close()
    assert json.loads(path.read_text())["lost"] == 3


def test_file_that_cannot_be_written_ends_the_start(tmp_path: Path):
    with pytest.raises(FileError, match="cannot be written"):
        audit.writer(os.fspath(tmp_path / "nowhere" / "audit.jsonl"))


def test_entries_may_go_to_the_log():
    with capture_logs() as logged:
        audit.writer("-")({"who": "ann", "result": "OK"})
    assert logged == [{"event": "audit", "log_level": "info", "who": "ann", "result": "OK"}]
