from typing import Any

import grpc
import pytest

from muster.client.protocol import AGENT_RELAY_HEADER, RELAY_HEADER
from muster.client.replicas import Search, Target
from muster.relay.stats import RelayStats
from muster.relay.upstream import MAX_SEARCH_TIME, Upstream, search_time


@pytest.mark.parametrize(
    ("session_ttl_ms", "seconds"),
    [
        pytest.param(10_000, MAX_SEARCH_TIME, id="the default"),
        pytest.param(60_000, MAX_SEARCH_TIME, id="a long one"),
        pytest.param(3_000, 1.0, id="a short one"),
    ],
)
def test_search_takes_at_most_a_third_of_the_session_ttl(session_ttl_ms: int, seconds: float):
    assert search_time(session_ttl_ms) == seconds


@pytest.mark.parametrize(
    ("session_ttl_ms", "lease_ttl_ms", "seconds"),
    [
        pytest.param(10_000, 5_000, 6.5, id="the defaults"),
        pytest.param(6_000, 5_000, 4.0, id="a short session TTL"),
    ],
)
def test_search_among_several_lasts_until_another_may_lead(
    session_ttl_ms: int, lease_ttl_ms: int, seconds: float
):
    assert search_time(session_ttl_ms, lease_ttl_ms) == seconds


async def test_reconnect_pause_is_shorter_than_the_search(monkeypatch: pytest.MonkeyPatch):
    """However long it was away: gRPC's own pause between two attempts to connect grows to two minutes."""
    given: dict[str, Any] = {}
    theirs = grpc.aio.insecure_channel

    def channel(address: str, options: Any) -> grpc.aio.Channel:
        given.update(options)
        return theirs(address, options=options)

    monkeypatch.setattr(grpc.aio, "insecure_channel", channel)
    upstream = Upstream("127.0.0.1:1", name="relay", version="0", stats=RelayStats())
    async with upstream.channel(Target("127.0.0.1:1", "")):
        pass
    await upstream.close()
    assert (
        given["grpc.initial_reconnect_backoff_ms"]
        <= given["grpc.max_reconnect_backoff_ms"]
        < MAX_SEARCH_TIME * 1000
    )


async def test_replaced_connection_is_closed_after_its_last_user():
    """Nobody may come to the new one, or leave it, for hours."""
    upstream = Upstream("127.0.0.1:1", name="relay", version="0", stats=RelayStats())
    replacing = upstream.channel(Target("127.0.0.1:1", "", keepalive_ms=100))
    async with upstream.channel(Target("127.0.0.1:1", "")) as replaced:
        await replacing.__aenter__()
        assert replaced.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
    assert replaced.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    await replacing.__aexit__(None, None, None)
    await upstream.close()


@pytest.mark.parametrize("in_agent", [False, True])
async def test_calls_say_whether_the_relay_dies_with_the_agent(in_agent: bool):
    upstream = Upstream("127.0.0.1:1", name="relay", version="0", stats=RelayStats(), in_agent=in_agent)
    headers = dict(await upstream.metadata(Search(upstream.replicas), Target("127.0.0.1:1")))
    assert headers[RELAY_HEADER] == b"relay"
    assert (AGENT_RELAY_HEADER in headers) is in_agent
