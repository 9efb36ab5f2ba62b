"""Pauses are random, and take no random number of the program's."""

import random

from muster.client.jitter import jittered


def test_pauses_differ_within_their_bounds():
    pauses = [jittered(2.0, 0.5, 1.5) for _ in range(100)]
    assert len(set(pauses)) > 90
    assert min(pauses) >= 1.0
    assert max(pauses) <= 3.0


def test_pause_leaves_the_programs_random_numbers_alone():
    random.seed(7)
    without = [random.random() for _ in range(3)]
    random.seed(7)
    found = []
    for _ in range(3):
        jittered(1.0, 0.5, 1.0)
        found.append(random.random())
    assert found == without
