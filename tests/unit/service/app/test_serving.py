"""What a coordinator does to its process before it serves."""

import gc

from muster.service.app.serving import tune_garbage_collector


def test_garbage_collector_looks_only_at_what_comes_later():
    thresholds = gc.get_threshold()
    earlier: list[int] = []
    try:
        tune_garbage_collector()
        later: list[int] = []
        looked_at = {id(one) for one in gc.get_objects()}
        assert id(earlier) not in looked_at
        assert id(later) in looked_at
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
