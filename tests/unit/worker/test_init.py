"""What the package offers, and where torch finds it."""

import pytest
from torch.distributed.checkpoint._experimental import barriers as torchs

import muster.worker
from muster.worker import barriers, fallback_barriers


def test_grpc_stands_in_torchs_own_registry_beside_torchs_own():
    assert torchs.BARRIER_REGISTRY["grpc"] is muster.worker.GrpcBarrier
    assert set(torchs.BARRIER_REGISTRY) >= {"grpc", "dist_barrier", "tcp_store"}
    assert barriers.BARRIER_REGISTRY is torchs.BARRIER_REGISTRY
    assert muster.worker.create_barrier_from_config is torchs.create_barrier_from_config
    assert issubclass(muster.worker.GrpcBarrier, torchs.Barrier)


def test_the_two_kinds_of_registry_offer_the_same_names():
    for name in barriers.__all__:
        assert name == "GrpcBarrier" or hasattr(fallback_barriers, name)


def test_all_that_is_promised_is_there():
    assert all(hasattr(muster.worker, name) for name in muster.worker.__all__)
    assert sorted(muster.worker.__all__) == muster.worker.__all__
    assert set(muster.worker.__all__) <= set(dir(muster.worker))
    everything: dict[str, object] = {}
    exec("from muster.worker import *", everything)
    assert set(everything) >= set(muster.worker.__all__)


def test_what_is_not_there_is_named():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        muster.worker.nothing  # type: ignore[attr-defined]  # noqa: B018
