"""The ``muster`` command."""

import os

# gRPC's core writes lines of its own to stderr, whatever the log's format. It looks here when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
