"""gRPC: thin servicers, one map of errors, and one function that assembles the server."""
