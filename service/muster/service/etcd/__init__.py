"""Speaks the part of etcd's public API that a coordinator needs; knows nothing of what is kept there."""
