"""Copies of a state in host memory, and the memory that they use."""
