"""Rows of local checkpoints and keepers."""

from typing import Any

import pytest

from muster.service.cli.views.columns import CHECKPOINTS, KEEPERS
from muster.service.cli.views.get import (
    changes,
    checkpoint_content,
    checkpoint_key,
    keeper_content,
    keeper_key,
)
from muster.service.cli.views.table import Table
from muster.service.formatting.local_checkpoints import (
    checkpoint_rows,
    keeper_rows,
    level_name,
    node_names,
    placement,
)
from muster.v1 import local_pb2
from tests.unit.service.cli.samples import holding, keeper, local_checkpoint, local_checkpoints

PERSISTED = local_pb2.DURABILITY_LEVEL_PERSISTED


def of_two_nodes(*, domains: tuple[str, str] = ("", ""), **more):
    """One checkpoint of four ranks, with all parts on both nodes."""
    return local_checkpoints(
        [local_checkpoint(**more)],
        [keeper(number, holding(0, 1, 2, 3), domain=domains[number]) for number in (0, 1)],
    )


def loss(found: local_pb2.LocalCheckpointServiceListResponse) -> str:
    return checkpoint_rows(found)[0].loss


def test_table_of_checkpoints_has_level_copies_and_loss():
    found = local_checkpoints(
        [
            local_checkpoint(
                local_pb2.DURABILITY_LEVEL_LOCAL,
                number=18,
                step=350,
                age_seconds=2.0,
                pending="parts of ranks 2-3 have too few copies",
                only_copies=["keeper-1"],
            ),
            local_checkpoint(persisted_as="s3://bucket/job1/step-340"),
        ],
        [
            keeper(0, holding(0, 1, number=18), holding(0, 1, 2, 3)),
            keeper(1, holding(0, 1, 2, 3, number=18), holding(0, 1, 2, 3)),
        ],
    )
    assert Table(CHECKPOINTS).text(checkpoint_rows(found)).splitlines() == [
        "STEP   ATTEMPT   LEVEL        AGE   SIZE      COPIES           PENDING"
        "                                  LOSS",
        "350    2-18      LOCAL        2s    3.0 GiB   1-2 nodes each   "
        "parts of ranks 2-3 have too few copies   losing node-1 loses it",
        "340    2-17      REPLICATED   41s   3.0 GiB   2 nodes each     -"
        "                                        any node may be lost",
    ]
    wide = Table(CHECKPOINTS, wide=True).text(checkpoint_rows(found)).splitlines()
    assert "s3://bucket/job1/step-340" in wide[2]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "any node may be lost"),
        ({"only_copies": ["keeper-0"]}, "losing node-0 loses it"),
        ({"only_copies": ["keeper-0", "keeper-1"]}, "losing node-0 or node-1 loses it"),
        ({"only_copies": ["keeper-0"], "level": PERSISTED}, "losing node-0 leaves only shared storage"),
        (
            {"only_copies": [f"k{number}" for number in range(9)]},
            "losing any of 9 (k0, k1, k2, …) loses it",
        ),
        ({"missing_ranks": [1, 2, 3]}, "no node has the parts of ranks 1-3"),
        (
            {"missing_ranks": [1], "level": PERSISTED},
            "no node has the parts of ranks 1; shared storage has it",
        ),
        ({"domains": ("rack-1", "rack-2")}, "any node may be lost"),
        ({"domains": ("rack-1", "rack-1")}, "any node may be lost; losing rack-1 loses it"),
    ],
)
def test_loss_names_what_the_checkpoint_does_not_survive(more: dict[str, Any], said: str):
    assert loss(of_two_nodes(**more)) == said


def test_three_copies_survive_two_nodes():
    keepers = [keeper(number, holding(0, 1, 2, 3)) for number in range(3)]
    assert loss(local_checkpoints([local_checkpoint()], keepers)) == "any 2 nodes may be lost"


def test_copies_of_another_manifest_and_of_disconnected_keepers_do_not_count():
    other = holding(0, 1, 2, 3)
    other.manifest_digest = b"other"
    found = local_checkpoints(
        [local_checkpoint(missing_ranks=[2, 3])],
        [
            keeper(0, holding(0, 1, 9)),
            keeper(1, other),
            keeper(2, holding(0, 1, 2, 3), connected=False),
        ],
    )
    assert checkpoint_rows(found)[0].copies == "0-1 nodes each"


def test_table_of_keepers_names_the_nodes_of_their_copies():
    found = local_checkpoints(
        [],
        [
            keeper(10, connected=False, disk=local_pb2.Disk(used=5), ranks=[]),
            keeper(0, domain="rack-1", copies_to=["keeper-1"]),
            keeper(1, domain="rack-2", copies_to=["keeper-0", "gone"]),
        ],
    )
    assert Table(KEEPERS).text(keeper_rows(found)).splitlines() == [
        "NODE      STATE          RANKS   COPIES TO      DISK                         DOMAIN   VERSION",
        "node-0    CONNECTED      0-1     node-1         12.0 GiB of 40.0 GiB (30%)   rack-1   0.1.0",
        "node-1    CONNECTED      2-3     gone, node-0   12.0 GiB of 40.0 GiB (30%)   rack-2   0.1.0",
        "node-10   DISCONNECTED   -       -              5 bytes                      -        0.1.0",
    ]
    assert "http://10.0.0.1:40123" in Table(KEEPERS, wide=True).text(keeper_rows(found))


def test_wide_table_of_keepers_has_the_speed_of_their_fetches():
    transfers = [
        local_pb2.Transfer(url="http://10.0.0.0:40123", bytes=812 * 10**6, elapsed_ms=1000),
        local_pb2.Transfer(url="http://10.0.0.2:40123", bytes=5 * 10**6, elapsed_ms=2000),
        local_pb2.Transfer(url="http://10.0.0.9:40123", bytes=5 * 10**6, elapsed_ms=2000),
    ]
    rows = keeper_rows(local_checkpoints([], [keeper(0), keeper(1, transfers=transfers), keeper(2)]))
    assert [row.fetched for row in rows] == ["-", "node-2 2.5 MB/s, node-0 812 MB/s", "-"]


def test_placement_says_where_the_copies_of_each_node_go():
    keepers = [
        keeper(10, copies_to=["keeper-0", "keeper-1"]),
        keeper(0, copies_to=["keeper-1"]),
        keeper(1),
    ]
    assert placement(local_checkpoints([], keepers)) == "node-0 to node-1; node-10 to node-0, node-1"
    assert placement(local_checkpoints([], [keeper(0)])) == ""


def test_keepers_on_one_node_have_their_ids_behind_the_name():
    first, second, third = keeper(1), keeper(2), keeper(3)
    first.keeper.node_name = second.keeper.node_name = ""
    second.keeper.url = first.keeper.url
    third.keeper.node_name = ""
    third.keeper.url = "http://[nonsense"
    assert node_names([first, second, third]) == {
        "keeper-1": "10.0.0.1 (keeper-1)",
        "keeper-2": "10.0.0.1 (keeper-2)",
        "keeper-3": "keeper-3",
    }


def test_level_of_a_newer_coordinator_is_shown_as_its_number():
    assert level_name(PERSISTED) == "PERSISTED"
    assert level_name(local_pb2.DurabilityLevel.ValueType(9)) == "9"


def test_watch_shows_levels_and_losses_but_not_ages():
    looks = [
        checkpoint_rows(of_two_nodes()),
        checkpoint_rows(of_two_nodes(age_seconds=99.0)),
        checkpoint_rows(of_two_nodes(level=PERSISTED, persisted_as="/mnt/job1/step-340")),
    ]
    assert list(changes(looks, checkpoint_key, checkpoint_content)) == [looks[0], [], looks[2]]


def test_watch_of_keepers_shows_states_but_not_used_space():
    looks = [
        keeper_rows(local_checkpoints([], [keeper(0)])),
        keeper_rows(local_checkpoints([], [keeper(0, disk=local_pb2.Disk(used=1, quota=40 << 30))])),
        keeper_rows(local_checkpoints([], [keeper(0, connected=False)])),
    ]
    assert list(changes(looks, keeper_key, keeper_content)) == [looks[0], [], looks[2]]
