import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.service.core.vocabulary.limits import Limits
from muster.watcher.drain import MAX_DEADLINE, request_of, short_name
from muster.watcher.notice import Notice

NOW = 1_700_000_000.0


def test_request_has_what_the_notice_says():
    notice = Notice(id="aws/spot/1", reason="spot", stop=False, deadline=NOW + 120.5, run_id="job1")
    request = request_of(notice, "node-1", "watcher@node-1", NOW)
    assert (request.node_name, request.by) == ("node-1", "watcher@node-1")
    assert (request.notice_id, request.reason, request.stop) == ("aws/spot/1", "spot", False)
    assert (request.deadline_ms, request.run_id) == (120_500, "job1")


@pytest.mark.parametrize(
    ("deadline", "milliseconds"), [(None, 0), (NOW, 1), (NOW - 3600, 1), (NOW + 0.0001, 1)]
)
def test_deadline_that_has_passed_is_not_no_deadline(deadline: float | None, milliseconds: int):
    notice = Notice(id="a", reason="why", deadline=deadline)
    assert request_of(notice, "node-1", "by", NOW).deadline_ms == milliseconds


def test_deadline_beyond_the_longest_is_the_longest():
    limits = Limits()
    assert limits.max_timeout_seconds >= MAX_DEADLINE
    notice = Notice(id="a", reason="why", deadline=NOW + 365 * 86_400)
    assert request_of(notice, "node-1", "by", NOW).deadline_ms == MAX_DEADLINE * 1000


@given(st.text(), st.text(), st.text(), st.text())
def test_coordinator_accepts_each_name_and_reason(name: str, reason: str, by: str, run_id: str):
    limits = Limits()
    notice = Notice(id=name * 20, reason=reason * 1000, run_id=run_id * 20)
    request = request_of(notice, "node-1", by * 20, NOW)
    for text in (request.notice_id, request.by, request.run_id):
        assert len(text.encode()) <= limits.max_name_bytes
        assert text.isprintable()
    assert len(request.reason.encode()) <= limits.max_reason_bytes


def test_long_names_stay_different():
    first, second = (f"kubernetes/taint/{'x' * 300}/{n}" for n in range(2))
    assert short_name(first) == short_name(first)
    assert short_name(first) != short_name(second)
    assert short_name("kubernetes/cordon/1") == "kubernetes/cordon/1"


def test_notice_may_be_of_another_node():
    notice = Notice(id="slurm/node/node-2/1", reason="a fan", node="node-2")
    assert request_of(notice, "node-1", "by", NOW).node_name == "node-2"
