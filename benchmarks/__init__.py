"""Benchmarks of Muster beside its peers."""
