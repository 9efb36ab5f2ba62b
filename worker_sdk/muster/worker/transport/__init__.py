"""Channels and calls to the coordinator, and what keeps them safe across forks."""
