"""Committed checkpoints as they are stored: markers, manifests, digests, damage, retention.

This package needs neither torch nor a coordinator. The SDK writes and loads checkpoints with it. The command
``muster checkpoint`` lists and verifies them.
"""
