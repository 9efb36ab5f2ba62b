"""gRPC options of every Muster server: coordinator, standby and relay."""

from muster.serving.keepalive import Keepalive

PING_INTERVAL_MS = 500
"""Least milliseconds between two pings of a client; gRPC ends the connection of one that pings faster."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""For TLS and the first HTTP/2 frames; longer than the SDK's clients wait before they try again."""
IDLE_TIMEOUT_MS = 10_000
"""A connection without calls is closed after that; a client opens another with its next call. Every host can
open connections, and one that answers pings would stay for ever."""
READ_TIMEOUT = 60.0
"""Seconds that the request of a call may take to come."""
READ_CHUNK_BYTES = 64 << 10
"""Size limit of one read from a connection."""
MAX_CONNECTIONS = 2**31 - 2
"""gRPC takes no bound above that."""
IDENTITY = 1
"""Bitset of the compression algorithms that a server accepts: none. A compressed message is UNIMPLEMENTED."""


def server_options(
    *, max_streams: int, max_connections: int, max_message_bytes: int, keepalive: Keepalive
) -> list[tuple[str, int]]:
    """Return the options of a server.

    Args:
        max_streams: streams and calls at once, for each connection.
        max_connections: open at once.
        max_message_bytes: of one message of a client.
        keepalive: when the server pings a client.
    """
    return [
        ("grpc.so_reuseport", 0),
        # By default a connection that has received large messages keeps a buffer of up to 4 MiB for the next.
        ("grpc.experimental.tcp_max_read_chunk_size", READ_CHUNK_BYTES),
        # Probing for bandwidth sends a ping for each small message: a sixth of the cost of an arrival.
        ("grpc.http2.bdp_probe", 0),
        # gRPC limits the size before a message is inflated: 16 KiB may become 16 MiB.
        ("grpc.compression_enabled_algorithms_bitset", IDENTITY),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_idle_ms", IDLE_TIMEOUT_MS),
        ("grpc.max_concurrent_streams", max_streams),
        # A whole job connects at once; by default calls beyond 1,000 that wait to be taken are cancelled.
        ("grpc.server.max_pending_requests", max_streams),
        ("grpc.server.max_pending_requests_hard_limit", max_streams),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Both timers are needed: the ping's own (``ping_timeout``) is what finds a stopped process.
        ("grpc.keepalive_time_ms", round(keepalive.interval * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive.timeout * 1000)),
        ("grpc.http2.ping_timeout_ms", round(keepalive.timeout * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # What clients may send, whatever the session TTL is: they ping before they know it.
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS),
    ]
