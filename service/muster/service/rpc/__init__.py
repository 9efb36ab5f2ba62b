"""gRPC: thin servicers, one error map, and one function that assembles the server."""
