"""A keeper on a node: it keeps parts of local checkpoints, and serves them to the keepers of other nodes.

It trusts no file before it has verified its digest. Its folder is its only state, so it may be killed at any
time.
"""
