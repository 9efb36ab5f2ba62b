"""What the doctor says of a member of etcd."""

import pytest

from muster.etcd.v3 import etcd_pb2 as pb
from muster.service.cli.doctor.checks import Result
from muster.service.cli.doctor.etcd_checks import member

MIB = 1024**2


def status(**more: object) -> pb.StatusResponse:
    response = pb.StatusResponse(version="3.5.9", leader=7, db_size=3 * MIB)
    response.header.member_id = 7
    for name, value in more.items():
        if name == "errors":
            response.errors.append(str(value))
        else:
            setattr(response, name, value)
    return response


def test_healthy_member_is_ok_with_its_version_and_space():
    check = member("etcd-0:2379", status(), 0.004)
    assert check.result is Result.OK
    assert check.message == ("etcd-0:2379 is etcd 3.5.9, leads, uses 3.0 MiB of 2,048.0 MiB, answers in 4 ms")


@pytest.mark.parametrize(
    ("more", "took", "result", "step"),
    [
        ({"version": "3.3.27"}, 0.0, Result.FAILED, "use etcd 3.4 or newer"),
        ({"errors": "NOSPACE"}, 0.0, Result.FAILED, "etcdctl alarm list"),
        ({"leader": 0}, 0.0, Result.FAILED, "bring the majority back"),
        ({"db_size": 90 * MIB, "db_size_quota": 100 * MIB}, 0.0, Result.WARNING, "compact and defragment"),
        ({}, 0.3, Result.WARNING, "look at its disk"),
    ],
)
def test_unhealthy_member_names_the_next_step(
    more: dict[str, object], took: float, result: Result, step: str
):
    check = member("etcd-0:2379", status(**more), took)
    assert check.result is result
    assert step in check.next
