"""A group as one of its processes sees it."""

import pytest

from muster.worker.groups.group import Group, Shape


@pytest.mark.parametrize(
    ("reason", "metadata", "position"),
    [
        ("SEQUENCE_BEHIND", {"start_sequence": "4"}, 4),
        ("SEQUENCE_FORGOTTEN", {"next_sequence": "7"}, 7),
        ("SEQUENCE_FORGOTTEN", {}, 2),
        ("SEQUENCE_AHEAD", {"next_sequence": "0"}, 2),
        ("LIMIT_EXCEEDED", {"limit": "max_payload_bytes"}, 2),
    ],
)
def test_position_follows_the_coordinator_only_when_it_has_no_outcome(
    reason: str, metadata: dict[str, str], position: int
):
    group = Group("checkpoint", Shape(2), position=2)
    group.go_on_after(reason, metadata)
    assert group.position == position
