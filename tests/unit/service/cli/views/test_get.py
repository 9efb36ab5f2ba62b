from muster.service.cli.views.get import barrier_content, barrier_key, changes, member_content, member_key
from muster.v1 import common_pb2
from tests.unit.service.cli import samples


def test_a_watch_shows_what_is_new_or_stands_otherwise():
    looks = [
        [samples.waiting(samples.missing(3), samples.missing(4))],
        [samples.waiting(samples.missing(3), samples.missing(4), age_ms=43_000, message="later")],
        [samples.waiting(samples.missing(4)), samples.decided()],
        [],
        [samples.waiting(samples.missing(4))],
    ]
    fresh = list(changes(looks, barrier_key, barrier_content))
    assert fresh == [looks[0], [], looks[2], [], looks[4]]


def test_a_watch_of_members_shows_states_and_positions_but_not_the_clock():
    later = samples.member(0)
    later.since_ms = 99_000
    further = samples.member(0)
    further.groups[1].last_sequence = 0
    looks = [
        [samples.member(0), samples.member(1)],
        [later, samples.member(1)],
        [further, samples.member(1, state=common_pb2.MEMBER_STATE_LOST)],
    ]
    assert list(changes(looks, member_key, member_content)) == [looks[0], [], looks[2]]
