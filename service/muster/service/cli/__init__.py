"""The ``muster`` command."""

import os

# gRPC's core writes a line to stderr for every TLS handshake that fails, whatever the log's format. It looks
# at this when it is loaded, which the modules of this package do.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
