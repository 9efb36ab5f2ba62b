"""The audit log of drains, which watchers repeat every few seconds."""

from muster.service.security import access
from muster.service.security.audit import AuditedCall
from muster.v1 import run_pb2

METHOD = "/muster.v1.RunService/DrainNode"


def audited(*changed: str) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    call = AuditedCall(entries.append, METHOD, access.changes(METHOD), False, "10.0.0.1")
    call.ask(run_pb2.DrainNodeRequest(node_name="node-1", stop=True, notice_id="n1"))
    call.changed(changed)
    call.answer()
    return entries


def test_drain_that_changes_nothing_has_no_entry():
    assert audited() == []


def test_drain_names_the_runs_that_it_asks_to_save():
    (entry,) = audited("job1", "job2")
    assert (entry["node_name"], entry["notice_id"], entry["runs"]) == ("node-1", "n1", "job1, job2")
    assert entry["result"] == "OK"
