"""Copies local checkpoints to shared storage, and commits them there."""
