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
        "bandwidth": (Result.OK, "no keeper has fetched enough from another one to tell its speed"),
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


def fetched(number: int, megabytes: int, seconds: float = 1.0) -> local_pb2.Transfer:
    """What came from the keeper of a node."""
    return local_pb2.Transfer(
        url=f"http://10.0.0.{number}:40123", bytes=megabytes * 10**6, elapsed_ms=round(seconds * 1000)
    )


def saves(*ages: float) -> list[local_pb2.LocalCheckpointView]:
    """Checkpoints of 3 GiB."""
    return [local_checkpoint(number=20 - n, age_seconds=age) for n, age in enumerate(ages)]


def test_speed_of_each_pair_is_said_the_slowest_first():
    nodes = [pair(0, 1, transfers=[fetched(1, 2000)]), pair(1, 0, transfers=[fetched(0, 812, 2)])]
    check = found(local_checkpoints(saves(5, 25, 45), nodes))["bandwidth"]
    assert (check.result, check.message) == (
        Result.OK,
        "node-0 to node-1 406 MB/s, node-1 to node-0 2,000 MB/s; saves come every 20 s",
    )
    alone = found(local_checkpoints(saves(5), nodes))["bandwidth"]
    assert alone.message == "node-0 to node-1 406 MB/s, node-1 to node-0 2,000 MB/s"


def test_copy_that_takes_longer_than_the_save_interval_is_a_warning():
    slow = [pair(0, 1), pair(1, 0, transfers=[fetched(0, 300, 200)])]
    check = found(local_checkpoints(saves(5, 25), slow))["bandwidth"]
    assert check.result is Result.WARNING
    assert check.message == (
        "node-0 to node-1 1.5 MB/s; the copy of 1.5 GiB from node-0 takes 1,074 s, and saves come every 20 s"
    )
    assert "save less often" in check.next


def test_slow_pair_that_no_copy_goes_between_is_no_warning():
    nodes = [pair(0, 1), pair(1, 0), pair(2, 0, transfers=[fetched(0, 1, 100)])]
    assert found(local_checkpoints(saves(5, 25), nodes))["bandwidth"].result is Result.OK


def test_keepers_that_are_gone_have_no_speed():
    nodes = [pair(0, 1, transfers=[fetched(7, 100), fetched(1, 0, 0)]), pair(1, 0)]
    assert "to tell its speed" in found(local_checkpoints(saves(5, 25), nodes))["bandwidth"].message


def test_many_pairs_are_counted():
    nodes = [pair(n, (n + 1) % 20, transfers=[fetched((n + 1) % 20, 100 + n)]) for n in range(20)]
    message = found(local_checkpoints([], nodes))["bandwidth"].message
    assert message.startswith("node-1 to node-0 100 MB/s, ")
    assert message.endswith("107 MB/s, 12 faster pairs")


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
