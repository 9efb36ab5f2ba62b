import pytest

from muster.watcher.drain import request_of
from muster.watcher.notice import Notice

NOW = 1_700_000_000.0


def test_request_has_what_the_notice_says():
    notice = Notice(id="aws/spot/1", reason="spot", stop=False, deadline=NOW + 120.5)
    request = request_of(notice, "node-1", "watcher@node-1", NOW)
    assert (request.node_name, request.by) == ("node-1", "watcher@node-1")
    assert (request.notice_id, request.reason, request.stop) == ("aws/spot/1", "spot", False)
    assert request.deadline_ms == 120_500


@pytest.mark.parametrize(
    ("deadline", "milliseconds"), [(None, 0), (NOW, 1), (NOW - 3600, 1), (NOW + 0.0001, 1)]
)
def test_deadline_that_has_passed_is_not_no_deadline(deadline: float | None, milliseconds: int):
    notice = Notice(id="a", reason="why", deadline=deadline)
    assert request_of(notice, "node-1", "by", NOW).deadline_ms == milliseconds


def test_notice_may_be_of_another_node():
    notice = Notice(id="slurm/node/node-2/1", reason="a fan", node="node-2")
    assert request_of(notice, "node-1", "by", NOW).node_name == "node-2"
