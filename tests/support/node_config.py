"""The settings of a node that joins a rendezvous."""

from muster.worker.node.dialogue import NodeConfig


def node_config(endpoint: str, run_id: str, nodes: int = 1) -> NodeConfig:
    """Return the settings of a node for rounds of a fixed number of nodes."""
    return NodeConfig(
        endpoint=endpoint,
        run_id=run_id,
        address="h",
        min_nodes=nodes,
        max_nodes=nodes,
        join_timeout=30,
        last_call_timeout=1,
        keep_alive_timeout=10,
        connect_timeout=30,
        call_timeout=5,
    )
