"""What a rank tells of its part of a save: what it may be, and how it stands on the wire."""

import pytest

from muster.client.protocol import MAX_STEP, MAX_WRITE_BYTES, MAX_WRITE_SECONDS
from muster.v1 import common_pb2 as pb
from muster.worker.groups.pending import pending
from muster.worker.groups.write_report import WriteReport


def test_report_travels_with_the_arrival_of_its_rank():
    report = WriteReport(step=7, bytes=1_024, seconds=1.2345, commits=True, gives_up=True)
    (arrival,) = pending("save", 3, 60.0, 0, b"", None, None, report).request.arrivals
    assert arrival.write == pb.WriteReport(step=7, bytes=1_024, write_ms=1_234, commits=True, gives_up=True)


def test_arrival_without_a_report_has_none():
    (arrival,) = pending("save", 3, 60.0, 0, b"", None, None).request.arrivals
    assert not arrival.HasField("write")


def test_unknown_values_are_absent_and_zero_is_present():
    message = WriteReport().message()
    assert not any(message.HasField(field) for field in ("step", "bytes", "write_ms"))
    zeros = WriteReport(step=0, bytes=0, seconds=0.0).message()
    assert all(zeros.HasField(field) for field in ("step", "bytes", "write_ms"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", MAX_STEP + 1),
        ("bytes", -1),
        ("bytes", MAX_WRITE_BYTES + 1),
        ("seconds", -0.1),
        ("seconds", float("nan")),
        ("seconds", float("inf")),
        ("seconds", MAX_WRITE_SECONDS + 1),
    ],
)
def test_out_of_range_number_is_refused(field: str, value: float):
    with pytest.raises(ValueError, match=rf"^{field} = .*: it must be from 0 to"):
        WriteReport(**{field: value})  # type: ignore[arg-type]
