"""What the package offers, and where torch finds it."""

import pytest
from torch.distributed.checkpoint._experimental import barriers as torchs

import muster.worker
from muster.worker import barriers, fallback_barriers


def test_grpc_barrier_is_in_torchs_registry():
    assert torchs.BARRIER_REGISTRY["grpc"] is muster.worker.GrpcBarrier
    assert set(torchs.BARRIER_REGISTRY) >= {"grpc", "dist_barrier", "tcp_store"}
    assert barriers.BARRIER_REGISTRY is torchs.BARRIER_REGISTRY
    assert muster.worker.create_barrier_from_config is torchs.create_barrier_from_config
    assert issubclass(muster.worker.GrpcBarrier, torchs.Barrier)


def test_fallback_registry_offers_torchs_names():
    for name in barriers.__all__:
        assert name == "GrpcBarrier" or hasattr(fallback_barriers, name)


def test_package_has_each_name_of_its_all():
    assert all(hasattr(muster.worker, name) for name in muster.worker.__all__)
    assert sorted(muster.worker.__all__) == muster.worker.__all__
    assert set(muster.worker.__all__) <= set(dir(muster.worker))
    everything: dict[str, object] = {}
    exec("from muster.worker import *", everything)
    assert set(everything) >= set(muster.worker.__all__)


def test_missing_attribute_is_named_in_the_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        muster.worker.nothing  # type: ignore[attr-defined]  # noqa: B018
