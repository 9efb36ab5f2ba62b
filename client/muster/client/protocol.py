"""Constants of ``muster.v1`` that both ends of a connection must agree on."""

PROTOCOL_VERSION = 1
"""The version of ``muster.v1`` that is spoken on streams."""
NOT_LEADER_HEADER = "muster-not-leader"
"""Names the leader that the caller could not reach; empty: the caller knows of none. A standby that knows no
other leader holds the call for a while."""
RELAY_HEADER = "muster-relay-bin"
"""Names the relay in each call that it forwards."""
AGENT_RELAY_HEADER = "muster-agent-relay"
"""A relay adds it if it runs in the process of torchrun's agent: then the agent dies with its connection."""
ERROR_DOMAIN = "muster"
"""The ``domain`` of every ErrorInfo."""
MAX_ENTRIES = 65_536
"""Entries of a repeated field."""
MESSAGE_HEADROOM = 1 << 20
"""Bytes of a message beyond the payloads in it."""
MAX_UNSENT = 1_000
"""Messages that may wait for one worker. For a relay ``MAX_ENTRIES`` may wait: each rank of a message may be
answered by itself."""
TTL_PINGS = 3
"""A connection pings at a third of the TTL of a session or a lease. So a client notices a dead one after two
thirds: within the session TTL, or before another coordinator leads."""
MAX_STEP = 2**63 - 1
"""Largest training step, and largest number of a request: the fields are of 64 bits, with a sign."""
MAX_WRITE_BYTES = 2**47
"""Bytes of one rank's part of a save. The sum over 65,536 ranks fits every field that stores it."""
MAX_WRITE_SECONDS = 366 * 86_400
"""Far beyond any write."""
MAX_HOLDINGS = 64
"""Checkpoints in one report of a keeper. The coordinator refuses a report of more."""
MAX_TRANSFERS = 64
"""Other keepers in one report, from which a keeper has fetched lately. The coordinator refuses more."""
MAX_COPIES = 16
"""Further nodes that keep a copy of each part of a local checkpoint. The coordinator refuses more."""
MAX_TOKEN = 7_000
"""Characters of a token: with more, gRPC would refuse the call for the size of its headers."""
