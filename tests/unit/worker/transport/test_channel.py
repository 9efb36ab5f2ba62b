"""The channels to the coordinator."""

import gc
import os
from weakref import WeakValueDictionary

import grpc
import pytest

from muster.client.replicas import Target
from muster.worker.errors import MusterError
from muster.worker.transport import channel, fork_guard
from muster.worker.transport.channel import shared_channel

A, B = Target("a:1"), Target("b:1")


@pytest.fixture(autouse=True)
def _no_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_channels", WeakValueDictionary())
    monkeypatch.setattr(fork_guard, "_usages", [])
    monkeypatch.setattr(fork_guard, "_last", None)
    monkeypatch.setattr(grpc, "insecure_channel", lambda endpoint, options: object())


def test_process_has_one_channel_for_each_coordinator():
    first = shared_channel(A)
    assert shared_channel(A) is first
    assert shared_channel(B) is not first


def test_unreferenced_channel_ends_with_its_usage(monkeypatch: pytest.MonkeyPatch):
    parent = os.getpid()
    first, second = shared_channel(A), shared_channel(B)
    del first
    gc.collect()
    assert [claim.what for claim in fork_guard._usages] == ["a store"]
    del second
    gc.collect()
    assert fork_guard._usages == []
    monkeypatch.setattr(fork_guard, "_last", None)  # As after a fork that has seen gRPC end.
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    shared_channel(A)


def test_usage_starts_before_grpc_and_ends_if_opening_fails(monkeypatch: pytest.MonkeyPatch):
    """Another thread may fork at any time."""
    seen: list[str] = []

    def fail(*_: object, **__: object) -> None:
        seen.extend(claim.what for claim in fork_guard._usages)
        raise RuntimeError("no channel")

    monkeypatch.setattr(grpc, "insecure_channel", fail)
    with pytest.raises(RuntimeError, match="no channel"):
        shared_channel(A)
    assert (seen, fork_guard._usages) == (["a store"], [])


def test_forked_child_gets_no_channel_of_its_parent(monkeypatch: pytest.MonkeyPatch):
    parent = os.getpid()
    held = shared_channel(A)
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(MusterError, match=f"was forked from process {parent}, which holds a store"):
        shared_channel(A)
    del held
    assert fork_guard._usages, "what the parent holds is not the child's to give back"


def test_child_of_a_parent_without_grpc_gets_a_channel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getpid", lambda: 2)
    shared_channel(A)
