"""Checkpoints in object storage: where nothing can be renamed, and a request's answer may be lost."""
