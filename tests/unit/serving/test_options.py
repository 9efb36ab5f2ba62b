"""Both sides of a connection agree on when it is idle."""

from muster.client.calls import CHANNEL_OPTIONS
from muster.serving.keepalive import Keepalive
from muster.serving.options import server_options


def test_client_closes_an_idle_connection_before_the_server_does():
    """Else gRPC prints a line to the client's stderr. It may take up to twice the client's time."""
    server = dict(
        server_options(max_streams=1, max_connections=1, max_message_bytes=1, keepalive=Keepalive(1.0, 1.0))
    )
    client = dict(CHANNEL_OPTIONS)
    assert 2 * client["grpc.client_idle_timeout_ms"] < server["grpc.max_connection_idle_ms"]
