"""HTTP, on a port of its own: the status page, metrics and health."""
