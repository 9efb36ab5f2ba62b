"""HTTP: metrics and health, on a port of its own."""
