"""How a run was closed, for people."""

from muster.v1 import common_pb2 as pb
from muster.worker.closed import Closed, closed_from_pb


def test_text_names_the_author_and_the_reason():
    assert str(Closed("node-1 (pid 7)", "the job is over", 0.0)) == "node-1 (pid 7): the job is over"


def test_text_without_a_reason_names_the_author():
    assert str(Closed("ops", "", 0.0)) == "ops"


def test_closed_is_read_from_its_message_with_its_time():
    message = pb.Closed(by="ops", reason="done")
    message.closed_at.FromMilliseconds(1_700_000_000_250)
    assert closed_from_pb(message) == Closed("ops", "done", 1_700_000_000.25)
