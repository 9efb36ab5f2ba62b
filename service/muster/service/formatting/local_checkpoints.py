"""Local checkpoints and keepers as table rows: how many copies there are, and what a loss would cost."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from muster.service.core.vocabulary import report
from muster.service.formatting.cells import NOTHING, size
from muster.v1 import local_pb2

MAX_NAMED = 3
"""Nodes that one cell names; it counts the others."""

LEVELS = (
    local_pb2.DURABILITY_LEVEL_LOCAL,
    local_pb2.DURABILITY_LEVEL_REPLICATED,
    local_pb2.DURABILITY_LEVEL_PERSISTED,
)
"""The levels, from the least safe one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One local checkpoint."""

    view: local_pb2.LocalCheckpointView
    attempt: str
    """Generation and number of the save, as in the name of its folder: ``2-17``."""
    level: str
    single_copies: int
    """Parts that are on one node only."""
    copies: str
    """On how many nodes the parts are: ``2 nodes each``."""
    loss: str
    """The cost of losing a node, for example ``losing node-3 loses it``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperRow:
    """One keeper."""

    view: local_pb2.KeeperView
    node: str
    state: str
    ranks: str
    copies_to: str
    """The nodes that get copies of its parts."""
    fetched: str
    """The nodes from which it has fetched parts lately, with the speed: ``node-0 812 MB/s``."""
    disk: str
    """Used bytes, quota, and their ratio: ``12.0 GiB of 40.0 GiB (30%)``."""


def checkpoint_rows(found: local_pb2.LocalCheckpointServiceListResponse) -> list[CheckpointRow]:
    """Return the local checkpoints, newest first."""
    names = node_names(found.keepers)
    return [_checkpoint(one, found.keepers, names) for one in found.checkpoints]


def newest_of_levels(rows: Iterable[CheckpointRow]) -> dict[str, CheckpointRow]:
    """Return the newest checkpoint of at least each level, by the name of the level.

    Args:
        rows: the checkpoints, newest first.
    """
    found: dict[str, CheckpointRow] = {}
    for row in rows:
        for level in LEVELS:
            if row.view.level >= level:
                found.setdefault(level_name(level), row)
    return {name: found[name] for level in LEVELS if (name := level_name(level)) in found}


def keeper_rows(found: local_pb2.LocalCheckpointServiceListResponse) -> list[KeeperRow]:
    """Return the keepers, by the names of their nodes."""
    names = node_names(found.keepers)
    speeds = pair_speeds(found.keepers)
    rows = [_keeper(one, names, speeds) for one in found.keepers]
    return sorted(rows, key=lambda row: _in_order(row.node))


@dataclass(frozen=True, slots=True)
class PairSpeed:
    """How fast one keeper has fetched from another one lately."""

    source: str
    """The id of the keeper that sent."""
    target: str
    """The id of the keeper that fetched."""
    speed: float
    """Bytes a second."""


def pair_speeds(keepers: Sequence[local_pb2.KeeperView]) -> list[PairSpeed]:
    """Return how fast keepers have fetched from each other lately, the slowest first."""
    ids = {one.keeper.url: one.keeper.id for one in keepers}
    found = [
        PairSpeed(ids[transfer.url], one.keeper.id, transfer.bytes * 1000 / transfer.elapsed_ms)
        for one in keepers
        for transfer in one.transfers
        if transfer.url in ids and transfer.elapsed_ms
    ]
    return sorted(found, key=lambda one: one.speed)


def speed_text(speed: float) -> str:
    """Describe a speed: ``812 MB/s``."""
    megabytes = speed / 1e6
    return f"{megabytes:,.0f} MB/s" if megabytes >= 10 else f"{megabytes:.1f} MB/s"


def placement(found: local_pb2.LocalCheckpointServiceListResponse) -> str:
    """Return where copies go, node by node: ``node-0 to node-1; node-1 to node-2``; empty: nowhere."""
    rows = [row for row in keeper_rows(found) if row.view.copies_to]
    return "; ".join(f"{row.node} to {row.copies_to}" for row in rows)


def node_names(keepers: Iterable[local_pb2.KeeperView]) -> dict[str, str]:
    """Return the name of each keeper's node, by the keeper's id.

    It is the scheduler's name, or the host at which the keeper is reached. Keepers that share it have their
    id behind it.
    """
    names = {one.keeper.id: one.keeper.node_name or _host(one.keeper) for one in keepers}
    uses = Counter(names.values())
    return {key: f"{name} ({key[:8]})" if uses[name] > 1 else name for key, name in names.items()}


def level_name(level: local_pb2.DurabilityLevel.ValueType) -> str:
    """Return ``LOCAL``, ``REPLICATED`` or ``PERSISTED``; a level of a newer coordinator as its number."""
    known = local_pb2.DurabilityLevel.DESCRIPTOR.values_by_number.get(level)
    return known.name.removeprefix("DURABILITY_LEVEL_") if known is not None else str(level)


def domain_of(keeper: local_pb2.Keeper) -> str:
    """Return the failure domain of a keeper; one without a domain is a domain of its own."""
    return keeper.failure_domain or f"node {keeper.id}"


def used_ratio(disk: local_pb2.Disk) -> float:
    """Return the used part of the quota; 0 if there is no quota."""
    return disk.used / disk.quota if disk.quota else 0.0


def _checkpoint(
    view: local_pb2.LocalCheckpointView, keepers: Sequence[local_pb2.KeeperView], names: dict[str, str]
) -> CheckpointRow:
    attempt = view.checkpoint.attempt
    holders = _holders(view.checkpoint, keepers)
    fewest, most = min(map(len, holders), default=0), max(map(len, holders), default=0)
    spread = str(fewest) if fewest == most else f"{fewest}-{most}"
    return CheckpointRow(
        view=view,
        attempt=f"{attempt.generation}-{attempt.number}",
        level=level_name(view.level),
        single_copies=sum(len(keepers) == 1 for keepers in holders),
        copies=f"{spread} {'node' if spread == '1' else 'nodes'} each",
        loss=_loss(view, fewest, _only_domains(holders), names),
    )


def _holders(
    checkpoint: local_pb2.LocalCheckpoint, keepers: Sequence[local_pb2.KeeperView]
) -> list[list[local_pb2.Keeper]]:
    """Return the connected keepers that have each part, by rank."""
    holders: list[list[local_pb2.Keeper]] = [[] for _ in range(checkpoint.world_size)]
    for one in keepers:
        for holding in one.holdings:
            if holding.attempt != checkpoint.attempt or holding.manifest_digest != checkpoint.manifest_digest:
                continue
            for rank in holding.ranks:
                if one.connected and rank < len(holders):
                    holders[rank].append(one.keeper)
    return holders


def _only_domains(holders: Iterable[Sequence[local_pb2.Keeper]]) -> list[str]:
    """Return the named failure domains that hold all copies of a part."""
    found = set()
    for keepers in holders:
        domains = {domain_of(keeper) for keeper in keepers}
        if len(domains) == 1 and keepers[0].failure_domain:
            found |= domains
    return sorted(found)


def _loss(
    view: local_pb2.LocalCheckpointView, fewest: int, only_domains: Sequence[str], names: dict[str, str]
) -> str:
    """Say the cost of losing a node, or a failure domain."""
    is_persisted = view.level >= local_pb2.DURABILITY_LEVEL_PERSISTED
    if view.missing_ranks:
        ranks = report.ranges(view.missing_ranks)
        lost = f"no node has the parts of ranks {ranks}"
        return f"{lost}; shared storage has it" if is_persisted else lost
    cost = "leaves only shared storage" if is_persisted else "loses it"
    if view.only_copies:
        return f"losing {_any_of([names.get(one, one) for one in view.only_copies])} {cost}"
    survived = "any node may be lost" if fewest == 2 else f"any {fewest - 1} nodes may be lost"
    return f"{survived}; losing {_any_of(only_domains)} {cost}" if only_domains else survived


def some_of(names: Collection[str]) -> str:
    """Name a few nodes: ``node-1, node-2, node-3, …``."""
    shown = [report.shown(name) for name in sorted(names, key=_in_order)[:MAX_NAMED]]
    return ", ".join([*shown, "…"] if len(names) > MAX_NAMED else shown)


def _any_of(names: Collection[str]) -> str:
    if len(names) > MAX_NAMED:
        return f"any of {len(names)} ({some_of(names)})"
    return " or ".join(report.shown(name) for name in sorted(names, key=_in_order))


def _in_order(name: str) -> tuple[int, str]:
    """Sort ``node-2`` before ``node-10``."""
    return len(name), name


def _keeper(view: local_pb2.KeeperView, names: dict[str, str], speeds: Iterable[PairSpeed]) -> KeeperRow:
    copies = sorted((names.get(one, one) for one in view.copies_to), key=_in_order)
    fetched = [(names[one.source], one.speed) for one in speeds if one.target == view.keeper.id]
    return KeeperRow(
        view=view,
        node=names[view.keeper.id],
        state="CONNECTED" if view.connected else "DISCONNECTED",
        ranks=report.ranges(view.ranks).replace(" ", "") or NOTHING,
        copies_to=", ".join(copies) or NOTHING,
        fetched=", ".join(f"{name} {speed_text(speed)}" for name, speed in fetched) or NOTHING,
        disk=disk_text(view.disk),
    )


def disk_text(disk: local_pb2.Disk) -> str:
    """Describe the space of a keeper: used bytes, and the quota if there is one."""
    if not disk.quota:
        return size(disk.used)
    return f"{size(disk.used)} of {size(disk.quota)} ({used_ratio(disk):.0%})"


def _host(keeper: local_pb2.Keeper) -> str:
    try:
        return urlsplit(keeper.url).hostname or keeper.id
    except ValueError:  # The keeper chose it.
        return keeper.id
