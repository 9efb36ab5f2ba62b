"""How much may wait in a relay for callers that do not read."""

import pytest

from muster.relay.refusals import Refused
from muster.relay.unread import SMALL, Unread


def test_unread_answers_of_one_address_are_bounded_and_leave_room_for_others():
    unread = Unread(most=100_000, most_of_one=60_000)
    with unread.answer(50_000, "ipv4:10.0.0.7:1"):
        with (
            pytest.raises(Refused, match=r"50,000 bytes.*Read") as caught,
            unread.answer(50_000, "ipv4:10.0.0.7:2"),
        ):
            pass
        assert "SLOW_CONSUMER" in str(caught.value.refusal)
        with unread.answer(50_000, "ipv4:10.0.0.8:1"), unread.answer(SMALL, "ipv4:10.0.0.7:2"):
            pass
    with unread.answer(50_000, "ipv4:10.0.0.7:2"):
        pass


def test_one_answer_may_have_any_size():
    with Unread(most=100_000, most_of_one=60_000).answer(1_000_000, "unix:"):
        pass
