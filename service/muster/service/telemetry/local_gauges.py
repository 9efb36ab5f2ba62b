"""Prometheus gauges of local checkpoints and keepers, read from the state at each scrape.

Their number does not grow with a run's nodes: of keepers they have counts, sums and the worst one.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily

from muster.service.core.local.copies import Copies
from muster.service.core.local.tier import LocalTier
from muster.service.core.vocabulary.local import Level

LEVELS = {level: level.name.lower() for level in Level}
"""The label value of each level."""


def local_families() -> dict[str, GaugeMetricFamily]:
    """Return the families without samples."""
    return {
        "local_step": GaugeMetricFamily(
            "muster_local_checkpoint_step",
            "Step of the run's newest local checkpoint that has at least this level.",
            labels=["run", "level"],
        ),
        "local_age": GaugeMetricFamily(
            "muster_local_checkpoint_age_seconds",
            "Time since the ranks made that checkpoint.",
            labels=["run", "level"],
        ),
        "local_behind": GaugeMetricFamily(
            "muster_local_checkpoint_behind_seconds",
            "Age of the oldest local checkpoint that waits for copies or for shared storage; 0 if none does.",
            labels=["run"],
        ),
        "local_single": GaugeMetricFamily(
            "muster_local_checkpoint_single_copies",
            "Parts on one node only, of the newest local checkpoint that is to have copies.",
            labels=["run"],
        ),
        "local_domains": GaugeMetricFamily(
            "muster_local_checkpoint_domains",
            "Fewest failure domains that hold a part of the newest replicated local checkpoint.",
            labels=["run"],
        ),
        "keepers": GaugeMetricFamily(
            "muster_keepers",
            "Keepers of the run that are connected, and those of its current generation that are not.",
            labels=["run", "state"],
        ),
        "keeper_used": GaugeMetricFamily(
            "muster_keeper_disk_used_bytes", "Space that the run's connected keepers use.", labels=["run"]
        ),
        "keeper_quota": GaugeMetricFamily(
            "muster_keeper_disk_quota_bytes",
            "Space that the run's connected keepers may use together.",
            labels=["run"],
        ),
        "keeper_fullest": GaugeMetricFamily(
            "muster_keeper_disk_used_ratio",
            "Used part of the quota, at the connected keeper of the run that is fullest.",
            labels=["run"],
        ),
    }


def add_local(families: Mapping[str, GaugeMetricFamily], run_label: str, tier: LocalTier, now: float) -> None:
    """Add the local checkpoints and the keepers of a run; nothing for a run without them.

    Args:
        families: receive the samples.
        run_label: the run.
        tier: its local checkpoints.
        now: seconds since 1970.
    """
    copies = tier.copies
    if copies:
        _add_checkpoints(families, run_label, copies, now)
    if copies or len(tier.keepers):
        _add_keepers(families, run_label, tier)
    domains = {keeper.info.id: keeper.domain for keeper in tier.keepers}
    for one in reversed(copies):
        if one.checkpoint.replicas and one.level >= Level.REPLICATED:
            fewest = min(len({domains[holder] for holder in holders}) for holders in one.holders)
            families["local_domains"].add_metric([run_label], fewest)
            break


def _add_checkpoints(
    families: Mapping[str, GaugeMetricFamily], run_label: str, copies: list[Copies], now: float
) -> None:
    for level, name in LEVELS.items():
        newest = next((one for one in reversed(copies) if one.level >= level), None)
        if newest is not None:
            families["local_step"].add_metric([run_label, name], newest.checkpoint.step)
            families["local_age"].add_metric([run_label, name], _age(newest, now))
    behind = max((_age(one, now) for one in _waiting(copies)), default=0.0)
    families["local_behind"].add_metric([run_label], behind)
    wanted = next((one for one in reversed(copies) if one.checkpoint.replicas), None)
    if wanted is not None:
        single = sum(len(holders) == 1 for holders in wanted.holders)
        families["local_single"].add_metric([run_label], single)


def _waiting(copies: list[Copies]) -> Iterator[Copies]:
    """Yield the checkpoints that wait for a level.

    Skip a checkpoint if a newer one already has the level.
    """
    replicated = persisted = False
    for one in reversed(copies):
        replicated |= one.level >= Level.REPLICATED
        persisted |= one.level >= Level.PERSISTED
        if (one.checkpoint.replicas and not replicated) or (one.checkpoint.persist_to and not persisted):
            yield one


def _age(one: Copies, now: float) -> float:
    return max(0.0, now - one.record.made_at)


def _add_keepers(families: Mapping[str, GaugeMetricFamily], run_label: str, tier: LocalTier) -> None:
    connected = tier.keepers.connected()
    families["keepers"].add_metric([run_label, "connected"], len(connected))
    # A keeper of an earlier generation may go: its node has left the run.
    away = sum(keeper.session is None for keeper in tier.keepers.current())
    families["keepers"].add_metric([run_label, "disconnected"], away)
    disks = [keeper.disk for keeper in connected]
    families["keeper_used"].add_metric([run_label], sum(disk.used for disk in disks))
    families["keeper_quota"].add_metric([run_label], sum(disk.quota for disk in disks))
    ratios = [disk.used / disk.quota for disk in disks if disk.quota]
    if ratios:
        families["keeper_fullest"].add_metric([run_label], max(ratios))
