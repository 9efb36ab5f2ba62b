"""What fails together with this machine, as its environment says."""

import os
from collections.abc import Mapping

VARIABLE = "MUSTER_FAILURE_DOMAIN"
SLURM_ADDRESS = "SLURM_TOPOLOGY_ADDR"
"""Where a node is: its switches or blocks, from the top, and its own name, with dots between."""
SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"
"""The kinds of the parts of that address, such as ``switch.switch.node``."""
SLURM_NODE = "SLURMD_NODENAME"


def failure_domain(environ: Mapping[str, str] = os.environ) -> str:
    """Return the failure domain of this node: ``MUSTER_FAILURE_DOMAIN``, else Slurm's; empty: none is known.

    Slurm's is the leaf switch of the node, or its block. Slurm names it if it has a topology.
    """
    return environ.get(VARIABLE) or _slurm_switch(environ)


def _slurm_switch(environ: Mapping[str, str]) -> str:
    parts = environ.get(SLURM_ADDRESS, "").split(".")
    kinds = environ[SLURM_PATTERN].split(".") if environ.get(SLURM_PATTERN) else []
    # The name of a node may have dots. Without a pattern, it is taken to have none.
    above = len(kinds) - 1 if kinds else len(parts) - 1
    if above < 1 or above >= len(parts) or (kinds and kinds[-1] != "node"):
        return ""
    node = environ.get(SLURM_NODE)
    # A process that another node has started may have the address of that node.
    return parts[above - 1] if not node or ".".join(parts[above:]) == node else ""
