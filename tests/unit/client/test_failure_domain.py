"""What fails together with a machine, as its environment says."""

import pytest

from muster.client.failure_domain import failure_domain

TREE = {
    "SLURM_TOPOLOGY_ADDR": "core.rack-7.node-3",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    "SLURMD_NODENAME": "node-3",
}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ""),
        ({"MUSTER_FAILURE_DOMAIN": "zone-a"}, "zone-a"),
        (TREE, "rack-7"),
        ({**TREE, "MUSTER_FAILURE_DOMAIN": "zone-a"}, "zone-a"),
        ({**TREE, "MUSTER_FAILURE_DOMAIN": ""}, "rack-7"),
        ({"SLURM_TOPOLOGY_ADDR": "core.rack-7.node-3"}, "rack-7"),
        ({"SLURM_TOPOLOGY_ADDR": "core.s[4-5].node-3"}, "s[4-5]"),
        ({"SLURM_TOPOLOGY_ADDR": "b1.node-3", "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}, "b1"),
    ],
)
def test_failure_domain_is_the_one_given_and_else_slurms_leaf_switch(environ: dict[str, str], found: str):
    assert failure_domain(environ) == found


def test_slurm_without_a_topology_names_no_domain():
    assert failure_domain({"SLURM_TOPOLOGY_ADDR": "node-3", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}) == ""
    assert failure_domain({"SLURM_TOPOLOGY_ADDR": "node-3"}) == ""
    assert (
        failure_domain({"SLURM_TOPOLOGY_ADDR": "a.b", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch"}) == ""
    )


def test_dots_in_the_name_of_a_node_are_no_switches():
    dotted = {**TREE, "SLURM_TOPOLOGY_ADDR": "core.rack-7.node-3.example.org"}
    assert failure_domain({**dotted, "SLURMD_NODENAME": "node-3.example.org"}) == "rack-7"


def test_address_of_another_node_does_not_count():
    assert failure_domain({**TREE, "SLURMD_NODENAME": "node-4"}) == ""
