"""A relay beside a node's workers: it folds their messages into one stream to the coordinator.

It speaks the coordinator's protocol on both sides, holds no truth, and may die at any time.
"""
