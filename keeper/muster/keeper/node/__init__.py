"""The keepers of a node: one process for each run whose ranks ask for it."""
