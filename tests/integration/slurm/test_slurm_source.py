"""A watcher's source on a real Slurm: what ``scontrol`` does to a node is a notice until it is undone."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.patience import PATIENCE, until
from lab.processes.slurm import Slurm
from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.sources.slurm import Slurm as Source

NODE = "n1"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A cluster whose first node is busy, so that it does not reboot."""
    with tempfile.TemporaryDirectory(prefix="muster-slurm-") as folder, Slurm(Path(folder), 3) as cluster:
        job = int(cluster.call("sbatch", "--parsable", f"--nodelist={NODE}", "--wrap=sleep 1000"))
        until(lambda: cluster.job(job)["JobState"] == "RUNNING", cluster.logs)
        yield cluster


@pytest.fixture
def source(slurm: Slurm) -> Source:
    return Source(NODE, environment=slurm.environment, timeout=PATIENCE)


async def stopped_for(source: Source) -> Notice:
    (notice,) = await source.look()
    assert (notice.stop, notice.deadline) == (True, None)
    assert notice.id.startswith(f"slurm/node/{NODE}/20")
    assert await source.look() == [notice]
    return notice


async def test_drain_is_a_notice_until_the_node_is_resumed(slurm: Slurm, source: Source):
    assert await source.look() == []
    slurm.call("scontrol", "update", f"NodeName={NODE}", "State=DRAIN", "Reason=a fan [ann@noon] is loud")
    notice = await stopped_for(source)
    assert notice.reason == "Slurm drains the node n1: a fan [ann@noon] is loud"
    # Whatever the users' own form of times.
    odd = Source(NODE, environment=slurm.environment | {"SLURM_TIME_FORMAT": "relative"}, timeout=PATIENCE)
    assert await odd.look() == [notice]
    # One watcher may look at all nodes of a job.
    several = Source(NODE, nodes="n[1-2],n3", environment=slurm.environment, timeout=PATIENCE)
    assert await several.look() == [notice]
    slurm.call("scontrol", "update", f"NodeName={NODE}", "State=RESUME")
    assert await source.look() == await several.look() == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param([], "reboot requested", id="when idle"),
        pytest.param(["ASAP"], "Reboot ASAP", id="asap"),
        pytest.param(["ASAP", "reason=new firmware"], "new firmware", id="reason"),
    ],
)
async def test_reboot_is_a_notice_until_it_is_cancelled(
    slurm: Slurm, source: Source, options: list[str], reason: str
):
    slurm.call("scontrol", "reboot", *options, NODE)
    assert (await stopped_for(source)).reason.lower() == f"slurm is to reboot the node n1: {reason}".lower()
    slurm.call("scontrol", "cancel_reboot", NODE)
    slurm.call("scontrol", "update", f"NodeName={NODE}", "State=UNDRAIN")
    assert await source.look() == []


async def test_node_that_is_expected_to_fail_is_a_notice(slurm: Slurm, source: Source):
    slurm.call("scontrol", "update", f"NodeName={NODE}", "State=FAIL", "Reason=ECC errors")
    assert (await stopped_for(source)).reason == "Slurm expects the node n1 to fail: ECC errors"
    slurm.call("scontrol", "update", f"NodeName={NODE}", "State=RESUME")
    assert await source.look() == []


async def test_reservation_for_maintenance_is_no_notice(slurm: Slurm, source: Source):
    options = ["StartTime=now", "Duration=10", "Users=root", "Flags=MAINT,IGNORE_JOBS", f"Nodes={NODE}"]
    slurm.call("scontrol", "create", "reservation", "ReservationName=service", *options)
    try:
        until(lambda: "MAINT" in slurm.call("scontrol", "show", "node", NODE, "--oneliner"), slurm.logs)
        assert await source.look() == []
    finally:
        slurm.call("scontrol", "delete", "ReservationName=service")


async def test_node_that_slurm_does_not_know_is_a_failure(slurm: Slurm):
    source = Source("elsewhere", environment=slurm.environment, timeout=PATIENCE)
    with pytest.raises(LookError, match="ended with 1: Node elsewhere not found"):
        await source.look()
