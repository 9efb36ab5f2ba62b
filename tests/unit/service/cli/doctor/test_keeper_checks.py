"""What the doctor says of a run's keepers."""

from typing import cast

import pytest

from muster.service.cli.client.coordinator_client import CallError, Client
from muster.service.cli.doctor.checks import Check, Result
from muster.service.cli.doctor.keeper_checks import keepers
from muster.service.cli.failure import Exit
from muster.v1 import local_pb2
from tests.unit.service.cli.samples import keeper, local_checkpoint, local_checkpoints

GIB = 1 << 30


class Answering:
    """A client whose coordinator answers this."""

    def __init__(self, answer: local_pb2.LocalCheckpointServiceListResponse | CallError) -> None:
        self._answer = answer

    def local_checkpoints(self, run_id: str) -> local_pb2.LocalCheckpointServiceListResponse:
        if isinstance(self._answer, CallError):
            raise self._answer
        return self._answer


def found(answer: local_pb2.LocalCheckpointServiceListResponse | CallError) -> dict[str, Check]:
    return {check.name: check for check in keepers(cast(Client, Answering(answer)), "job1")}


def pair(number: int, peer: int, **more: object) -> local_pb2.KeeperView:
    """A keeper whose copies go to another one."""
    given = {"domain": f"rack-{number}", "copies_to": [f"keeper-{peer}"], **more}
    return keeper(number, **given)  # type: ignore[arg-type]


def test_keepers_that_are_well():
    checks = found(local_checkpoints([local_checkpoint()], [pair(0, 1), pair(1, 0)]))
    assert {name: (check.result, check.message) for name, check in checks.items()} == {
        "keepers": (Result.OK, "2 of 2 are connected"),
        "space": (Result.OK, "the fullest is node-0: 12.0 GiB of 40.0 GiB (30%)"),
        "domains": (Result.OK, "the connected nodes are in 2"),
    }


def test_keepers_without_domains_are_each_in_one_of_their_own():
    checks = found(local_checkpoints([], [pair(0, 1, domain=""), pair(1, 0, domain="")]))
    assert checks["domains"].result is Result.OK
    assert checks["domains"].message == "none is set, so each of the 2 nodes is one of its own"


def test_keepers_that_are_away_are_named():
    check = found(local_checkpoints([], [pair(0, 1), pair(1, 0, connected=False)]))["keepers"]
    assert (check.result, check.message) == (Result.WARNING, "1 of 2 are connected; away: node-1")
    assert "keeper.log" in check.next
    assert list(found(local_checkpoints([], [keeper(0, connected=False)]))) == ["keepers"]


def test_keepers_of_two_versions():
    other = pair(1, 0)
    other.keeper.version = "0.2.0"
    check = found(local_checkpoints([], [pair(0, 1), other]))["keepers"]
    assert (check.result, check.next) == (Result.WARNING, "use the same version on all nodes")
    assert check.message.endswith("their versions are 0.1.0, 0.2.0")


@pytest.mark.parametrize(
    ("disk", "said"),
    [
        (local_pb2.Disk(used=19 * GIB, quota=20 * GIB), "19.0 GiB of 20.0 GiB (95%)"),
        (
            local_pb2.Disk(used=1 * GIB, quota=8 * GIB),
            "3 checkpoints with their copies need about 9.0 GiB on each node, more than the quota of node-1",
        ),
    ],
)
def test_keeper_with_too_little_space(disk: local_pb2.Disk, said: str):
    check = found(local_checkpoints([local_checkpoint()], [pair(0, 1), pair(1, 0, disk=disk)]))["space"]
    assert check.result is Result.WARNING
    assert said in check.message
    assert "MUSTER_LOCAL_QUOTA" in check.next


def test_keepers_without_a_quota_have_space():
    disk = local_pb2.Disk(used=5 * GIB)
    assert (
        found(local_checkpoints([local_checkpoint()], [pair(0, 1, disk=disk)]))["space"].result is Result.OK
    )


def test_copy_in_the_domain_of_its_original():
    check = found(local_checkpoints([], [pair(0, 1, domain="rack"), pair(1, 0, domain="rack")]))["domains"]
    assert (check.result, check.message) == (
        Result.WARNING,
        "the connected nodes are in 1; copies of node-0, node-1 are in the failure domain of the original or "
        "of another copy",
    )


def test_one_node_cannot_have_copies():
    check = found(local_checkpoints([local_checkpoint()], [keeper(0)]))["domains"]
    assert check.result is Result.WARNING
    assert check.message.endswith("; 1 copy needs 2 nodes")


def test_run_without_keepers_is_well():
    check = found(local_checkpoints([], []))["keepers"]
    assert (check.result, check.message) == (Result.OK, "run job1 has none: it uses no local checkpoints")


def test_run_that_has_not_begun_is_well():
    unknown = CallError("no run job1 is known", Exit.FAILED, reason="RUN_NOT_FOUND")
    assert found(unknown)["keepers"].result is Result.OK


def test_older_coordinator_has_no_keepers_to_check():
    assert found(CallError("not implemented", Exit.FAILED)) == {}
