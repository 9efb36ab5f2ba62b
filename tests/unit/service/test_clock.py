import time

from muster.service.clock import SystemClock


def test_both_clocks_are_read_at_one_moment():
    before = time.monotonic(), time.time()
    now = SystemClock().now()
    after = time.monotonic(), time.time()
    assert before[0] <= now.monotonic <= after[0]
    assert before[1] - 1 <= now.wall <= after[1] + 1
