"""Checks of ``muster doctor`` for a run's keepers: connections, space, speed and failure domains."""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator

from muster.service.cli.client.coordinator_client import CallError, Client
from muster.service.cli.doctor.checks import Check, Result
from muster.service.cli.views.table import counted
from muster.service.core.vocabulary import report
from muster.service.formatting.cells import size
from muster.service.formatting.local_checkpoints import (
    disk_text,
    domain_of,
    node_names,
    pair_speeds,
    some_of,
    speed_text,
    used_ratio,
)
from muster.v1 import local_pb2

FULL = 0.9
"""The part of its quota that a keeper may use without a warning."""
MAX_PAIRS = 8
"""Pairs of keepers whose speed one line has. It counts the others, which are faster."""
CHECKPOINTS_HELD = 3
"""Checkpoints for which a keeper needs space: two that are kept, and one that is being written."""


def keepers(client: Client, run_id: str) -> Iterator[Check]:
    """Check the keepers of a run.

    Args:
        client: calls the coordinator.
        run_id: the run.
    """
    try:
        found = client.local_checkpoints(run_id)
    except CallError as error:
        # An older coordinator knows no keepers, and a token for other runs has its own check.
        if error.reason == "RUN_NOT_FOUND":
            message = f"run {report.shown(run_id)} is not known yet, so it has no keepers to check"
            yield Check("keepers", Result.OK, message)
        return
    if not found.keepers:
        yield Check(
            "keepers", Result.OK, f"run {report.shown(run_id)} has none: it uses no local checkpoints"
        )
        return
    names = node_names(found.keepers)
    yield connections(found, names)
    if any(one.connected for one in found.keepers):
        yield space(found, names)
        yield bandwidth(found, names)
        yield domains(found, names)


def connections(found: local_pb2.LocalCheckpointServiceListResponse, names: dict[str, str]) -> Check:
    """Check that all keepers are connected, and have one version."""
    away = [names[one.keeper.id] for one in found.keepers if not one.connected]
    message = f"{len(found.keepers) - len(away)} of {len(found.keepers)} are connected"
    if away:
        return Check(
            "keepers",
            Result.WARNING,
            f"{message}; away: {some_of(away)}",
            "see keeper.log in the local folder of those nodes, and whether they reach the coordinator",
        )
    versions = sorted({one.keeper.version for one in found.keepers if one.keeper.version})
    if len(versions) > 1:
        return Check(
            "keepers",
            Result.WARNING,
            f"{message}; their versions are {', '.join(map(report.shown, versions))}",
            "use the same version on all nodes",
        )
    return Check("keepers", Result.OK, message)


def space(found: local_pb2.LocalCheckpointServiceListResponse, names: dict[str, str]) -> Check:
    """Check that the keepers have space for the checkpoints of the run."""
    connected = [one for one in found.keepers if one.connected]
    fullest = max(connected, key=lambda one: used_ratio(one.disk))
    message = f"the fullest is {report.shown(names[fullest.keeper.id])}: {disk_text(fullest.disk)}"
    needed = _needed(found, len(connected))
    tight = [names[one.keeper.id] for one in connected if 0 < one.disk.quota < needed]
    if tight:
        return Check(
            "space",
            Result.WARNING,
            f"{message}; {CHECKPOINTS_HELD} checkpoints with their copies need about {size(needed)} on each "
            f"node, more than the quota of {some_of(tight)}",
            "raise the quota (MUSTER_LOCAL_QUOTA), or give the run more nodes",
        )
    if used_ratio(fullest.disk) > FULL:
        return Check(
            "space",
            Result.WARNING,
            message,
            "raise the quota (MUSTER_LOCAL_QUOTA), or see which checkpoints wait for shared storage: "
            "muster get checkpoints RUN",
        )
    return Check("space", Result.OK, message)


def _needed(found: local_pb2.LocalCheckpointServiceListResponse, nodes: int) -> int:
    """Return about how many bytes a node needs for the run's checkpoints and copies; 0: that is not known."""
    if not found.checkpoints:
        return 0
    newest = found.checkpoints[0].checkpoint
    return CHECKPOINTS_HELD * newest.size * (1 + newest.replicas) // nodes


def bandwidth(found: local_pb2.LocalCheckpointServiceListResponse, names: dict[str, str]) -> Check:
    """Check that copies are made faster than checkpoints, by the last fetches of the keepers."""
    speeds = pair_speeds(found.keepers)
    if not speeds:
        return Check(
            "bandwidth", Result.OK, "no keeper has fetched enough from another one to tell its speed"
        )
    shown = [
        f"{report.shown(names[one.source])} to {report.shown(names[one.target])} {speed_text(one.speed)}"
        for one in speeds[:MAX_PAIRS]
    ]
    if len(speeds) > MAX_PAIRS:
        shown.append(f"{counted(len(speeds) - MAX_PAIRS, 'faster pair', 'faster pairs')}")
    message = ", ".join(shown)
    interval = _save_interval(found)
    if interval is None:
        return Check("bandwidth", Result.OK, message)
    views = {one.keeper.id: one for one in found.keepers}
    for one in speeds:
        size_of_part = _part(found, views[one.source])
        seconds = size_of_part / one.speed if one.speed else float("inf")
        if one.target in views[one.source].copies_to and seconds > interval:
            return Check(
                "bandwidth",
                Result.WARNING,
                f"{message}; the copy of {size(size_of_part)} from {report.shown(names[one.source])} takes "
                f"{seconds:,.0f} s, and saves come every {interval:,.0f} s",
                "save less often, or have the keepers use a faster network (MUSTER_NODE_ADDRESS)",
            )
    return Check("bandwidth", Result.OK, f"{message}; saves come every {interval:,.0f} s")


def _save_interval(found: local_pb2.LocalCheckpointServiceListResponse) -> float | None:
    """Return the usual seconds between two checkpoints; None if there are too few."""
    ages = [one.age_seconds for one in found.checkpoints]  # The newest first.
    gaps = [older - newer for newer, older in itertools.pairwise(ages)]
    return statistics.median(gaps) if gaps else None


def _part(found: local_pb2.LocalCheckpointServiceListResponse, keeper: local_pb2.KeeperView) -> int:
    """Return about how many bytes the ranks of a keeper write for each checkpoint."""
    newest = found.checkpoints[0].checkpoint
    return newest.size * len(keeper.ranks) // max(newest.world_size, 1)


def domains(found: local_pb2.LocalCheckpointServiceListResponse, names: dict[str, str]) -> Check:
    """Check that copies are in other failure domains than their originals, and than each other."""
    domain = {one.keeper.id: domain_of(one.keeper) for one in found.keepers}
    together = []
    for one in found.keepers:
        holders = [one.keeper.id, *(holder for holder in one.copies_to if holder in domain)]
        if len({domain[holder] for holder in holders}) < len(holders):
            together.append(names[one.keeper.id])
    counts = Counter(domain_of(one.keeper) for one in found.keepers if one.connected)
    if all(not one.keeper.failure_domain for one in found.keepers):
        message = f"none is set, so each of the {len(counts)} nodes is one of its own"
    else:
        message = f"the connected nodes are in {len(counts)}"
    wanted = found.checkpoints[0].checkpoint.replicas if found.checkpoints else 0
    if sum(counts.values()) <= wanted:
        return Check(
            "domains",
            Result.WARNING,
            f"{message}; {counted(wanted, 'copy needs', 'copies need')} {wanted + 1} nodes",
            "give the run more nodes, or ask for fewer copies (replicas)",
        )
    if together:
        return Check(
            "domains",
            Result.WARNING,
            f"{message}; copies of {some_of(together)} are in the failure domain of the original or of "
            "another copy",
            "place the job's nodes in more failure domains, or set MUSTER_FAILURE_DOMAIN to smaller ones",
        )
    return Check("domains", Result.OK, message)
