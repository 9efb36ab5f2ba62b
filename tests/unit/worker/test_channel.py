"""The channels to the coordinator."""

import os

import grpc
import pytest

from muster.worker import channel
from muster.worker.channel import channel_options, explain, shared_channel
from muster.worker.errors import MusterError


@pytest.fixture(autouse=True)
def _no_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_channels", {})
    monkeypatch.setattr(channel, "_owner", None)
    monkeypatch.setattr(channel.grpc, "insecure_channel", lambda endpoint, options: object())


def test_keepalive_is_set_in_every_timer_that_grpc_has_for_it():
    options = dict(channel_options(1234))
    timers = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    assert [options[timer] for timer in timers] == [1234] * 3
    assert options["grpc.http2.max_pings_without_data"] == 0, "or the pings stop"


def test_a_process_has_one_channel_for_each_coordinator():
    assert shared_channel("a:1") is shared_channel("a:1")
    assert shared_channel("a:1") is not shared_channel("b:1")


def test_a_forked_child_gets_none_of_its_parents(monkeypatch: pytest.MonkeyPatch):
    parent = os.getpid()
    shared_channel("a:1")
    monkeypatch.setattr(channel.os, "getpid", lambda: parent + 1)
    with pytest.raises(MusterError, match=f"was forked from process {parent}, which holds a store"):
        shared_channel("a:1")


def test_a_forked_child_cannot_speak_whatever_its_parent_spoke_for(monkeypatch: pytest.MonkeyPatch):
    parent = os.getpid()
    channel.claim("a node's place")
    channel.claim("a store")
    monkeypatch.setattr(channel.os, "getpid", lambda: parent + 1)
    with pytest.raises(MusterError, match="which holds a node's place"):
        channel.claim("a session")


def test_a_child_of_a_parent_that_never_spoke_may(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel.os, "getpid", lambda: 2)
    assert shared_channel("a:1") is shared_channel("a:1")


class Failed(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"


def test_a_failed_call_is_explained_by_its_status():
    assert explain(Failed()) == "UNAVAILABLE: connection refused"


def test_a_call_that_ran_out_of_time_says_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Failed, "code", lambda _: grpc.StatusCode.DEADLINE_EXCEEDED)
    monkeypatch.setattr(Failed, "details", lambda _: "Deadline Exceeded")
    assert explain(Failed()) == "timeout (DEADLINE_EXCEEDED: Deadline Exceeded)"


def test_a_failure_without_a_status_is_shown_as_it_is():
    assert explain(grpc.RpcError("odd")) == "RpcError('odd')"
