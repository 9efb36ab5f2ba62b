"""What a save is asked to write: the state, its planner, and its size."""

from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful


def expanded(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Ask each ``Stateful`` object for its state, as torch does."""
    return {key: one.state_dict() if isinstance(one, Stateful) else one for key, one in state_dict.items()}


def check_planner(planner: SavePlanner) -> None:
    """Refuse torch's cache of plans: the ranks know by themselves when nothing has changed.

    Raises:
        ValueError: the planner has one.
    """
    if getattr(planner, "_enable_plan_caching", False):
        raise ValueError(
            "the planner has enable_plan_caching=True, whose plans torch keeps for its own collectives. "
            "Leave it out: an unchanged plan is reused here in any case."
        )


def planned_bytes(plan: SavePlan) -> int:
    """Return the bytes of the tensors that a plan writes."""
    chunks = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in chunks)
