"""Checkpoints in object storage, where nothing can be renamed and the answer to a request may be lost."""
